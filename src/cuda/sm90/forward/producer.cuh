// The producer warp: takes work items, loads a block's K and V once per item, then streams the rows
// of the tokens that chose it.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm90/common/async.cuh"
#include "cuda/sm90/common/entries.cuh"
#include "cuda/sm90/forward/config.h"

namespace thresher::cuda::sm90::forward {

struct Maps {
  const CUtensorMap *q, *k, *v;
};

class Producer {
 public:
  __device__ Producer(Shared& shared, const Params& params, const Maps& maps)
      : s_(shared), p_(params), maps_(maps), lane_(threadIdx.x & 31) {}

  template <int kHeads>
  __device__ __forceinline__ void run() {
    constexpr int kTokens = Config::kRows / kHeads; // of a tile
    constexpr int kTilesOfChunk = 32 / kTokens;
    const int first = __ldg(p_.index.segment_items + p_.first_segment);
    const int work = (__ldg(p_.index.segment_items + p_.last_segment) - first) * p_.parts;
    auto take = [&] { return __shfl_sync(~0u, lane_ == 0 ? atomicAdd(p_.next_item, 1) : 0, 0); };

    int next = take();
    int number = 0;
    for (; next < work; ++number) {
      const WorkItem item = p_.index.items[first + next / p_.parts];
      const int first_head = (item.proxy_head * p_.parts + next % p_.parts) * kHeads;
      send_block(number, item, first_head / (p_.q_heads / p_.kv_heads));
      next = take();

      // Every warpgroup must see a tile of every item, or it would hold on to old blocks.
      const int tiles = (item.entry_count + kTokens - 1) / kTokens;
      const int sent = max(tiles, Config::kConsumers);
      EntryChunk chunk, ahead = fetch_chunk(p_.index, item, 0);
      for (int t = 0; t < sent; ++t) {
        const int in_chunk = t % kTilesOfChunk;
        if (in_chunk == 0) {
          chunk = ahead;
          ahead = fetch_chunk(p_.index, item, (t + kTilesOfChunk) * kTokens);
        }
        send_tile<kHeads>(number, t < tiles, in_chunk * kTokens, chunk, first_head);
      }
    }
    for (int i = 0; i < Config::kConsumers; ++i) {
      const int stage = wait_for_stage();
      if (lane_ == 0) {
        s_.tiles[stage].kind = kEnd;
        barrier_arrive(s_.rows_full[stage]);
      }
    }
  }

 private:
  __device__ __forceinline__ int wait_for_stage() {
    const int stage = tile_ % Config::kStages;
    barrier_wait(s_.rows_empty[stage], ((tile_ / Config::kStages) & 1) ^ 1);
    ++tile_;
    return stage;
  }

  __device__ __forceinline__ void send_block(int number, const WorkItem& item, int kv_head) {
    const int slot = number % Config::kBlocks;
    barrier_wait(s_.block_empty[slot], ((number / Config::kBlocks) & 1) ^ 1);
    const bool whole = item.key_count == Config::kKeys;
    uint64_t& landed = whole ? s_.block_full[slot] : s_.tail;
    if (lane_ == 0) {
      barrier_expect(landed, 2 * Config::kBlockTileBytes);
      const int2 at = split_row(item.key_begin, p_.key_rows);
      constexpr int kHalfBytes = Config::kKeys * 128;
      const uint32_t k = shared_u32(s_.blocks[slot][0]), v = shared_u32(s_.blocks[slot][1]);
      copy_box(k, maps_.k, 0, kv_head, at.x, at.y, landed);
      copy_box(k + kHalfBytes, maps_.k, Config::kHalf, kv_head, at.x, at.y, landed);
      copy_box(v, maps_.v, 0, kv_head, at.x, at.y, landed);
      copy_box(v + kHalfBytes, maps_.v, Config::kHalf, kv_head, at.x, at.y, landed);
    }
    if (whole)
      return;
    // Rows past the document's end belong to the next one: an Inf in V would come through as
    // 0 * Inf. One item a document and head takes this way.
    barrier_wait(s_.tail, tails_++ & 1);
    for (int i = lane_; i < (Config::kKeys - item.key_count) * 16; i += 32) {
      const int key = item.key_count + i / 16, chunk = i % 8, half = i / 8 % 2;
      *reinterpret_cast<uint4*>(s_.blocks[slot][1] + half * (Config::kKeys * 128) + key * 128 +
                                chunk * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0)
      barrier_arrive(s_.block_full[slot]);
  }

  template <int kHeads>
  __device__ __forceinline__ void send_tile(int number, bool real, int in_chunk,
                                            const EntryChunk& chunk, int first_head) {
    constexpr int kTokens = Config::kRows / kHeads;
    const int token = __shfl_sync(~0u, chunk.token, (in_chunk + lane_) & 31);
    const int slot = __shfl_sync(~0u, chunk.slot, (in_chunk + lane_) & 31);
    // Two neighbouring rows a lane; kHeads is even, so they are of one token.
    const int pair_key = __shfl_sync(~0u, chunk.last_key, (in_chunk + 2 * lane_ / kHeads) & 31);
    const bool masked = __any_sync(~0u, pair_key < Config::kKeys - 1);

    const int stage = wait_for_stage();
    TileSlot& tile = s_.tiles[stage];
    if (lane_ == 0) {
      tile.kind = !real ? kEmpty : masked ? kMasked : kFull;
      tile.item = number;
    }
    uint64_t& full = s_.rows_full[stage];
    if (!real) {
      if (lane_ == 0)
        barrier_arrive(full);
      return;
    }
    *reinterpret_cast<uint32_t*>(tile.last_key + 2 * lane_) =
        static_cast<uint32_t>(static_cast<uint16_t>(pair_key)) * 0x10001u;
    if (lane_ < kTokens)
      tile.partial[lane_] =
          ((token - p_.first_token) * p_.q_heads + first_head) * p_.index.top_k + slot;
    __syncwarp();
    if (lane_ == 0)
      barrier_expect(full, Config::kRowTileBytes);
    __syncwarp();
    if (lane_ < kTokens) {
      // A row past the tensor's end reads as zeros.
      const int2 at = token < 0 ? make_int2(p_.token_rows, 0) : split_row(token, p_.token_rows);
      const uint32_t q = shared_u32(s_.rows[stage]) + lane_ * kHeads * 128;
      copy_box(q, maps_.q, 0, first_head, at.x, at.y, full);
      copy_box(q + Config::kRows * 128, maps_.q, Config::kHalf, first_head, at.x, at.y, full);
    }
  }

  Shared& s_;
  const Params& p_;
  const Maps& maps_;
  const int lane_;
  uint32_t tile_ = 0, tails_ = 0;
};

} // namespace thresher::cuda::sm90::forward
