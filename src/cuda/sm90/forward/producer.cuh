// The producer: takes work items, loads a block's K and V once per item, then streams the rows of
// the tokens that chose it. One warp, or four that share the rows' copies, of which the first does
// everything else.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm90/common/async.cuh"
#include "cuda/sm90/common/entries.cuh"
#include "cuda/sm90/forward/config.h"

namespace thresher::cuda::sm90::forward {

struct Maps {
  const CUtensorMap *q, *k, *v;
};

template <int kHeads>
class Producer {
  static constexpr int kTokens = Config::kRows / kHeads; // of a tile
  static constexpr int kWarps = kProducerWarps<kHeads>;

 public:
  __device__ Producer(Shared& shared, const Params& params, const Maps& maps)
      : s_(shared), p_(params), maps_(maps), lane_(threadIdx.x & 31) {}

  __device__ __forceinline__ void run() {
    const int first = __ldg(p_.index.segment_items + p_.first_segment);
    const int work = (__ldg(p_.index.segment_items + p_.last_segment) - first) * p_.parts;
    // Lane 0 holds the next ticket, which it asked for an item before.
    auto take = [&] { return leads() && lane_ == 0 ? atomicAdd(p_.next_item, 1) : 0; };

    int ticket = take();
    for (int number = 0;; ++number) {
      int next = __shfl_sync(~0u, ticket, 0);
      if constexpr (kWarps > 1) { // the first warp tells the others
        if (threadIdx.x == 0)
          s_.ticket[number & 1] = next;
        ptx::barrier_sync(kTicket, 32 * kWarps);
        next = s_.ticket[number & 1];
      }
      if (next >= work)
        break;
      const WorkItem item = p_.index.items[first + next / p_.parts];
      const int first_head = (item.proxy_head * p_.parts + next % p_.parts) * kHeads;
      if (leads())
        send_block(number, item, first_head / (p_.q_heads / p_.kv_heads));
      ticket = take();

      EntryList list(p_.index, item, spread_start(item, next));
      int sent = 0;
      for (int chunk = 0; chunk < list.chunks; ++chunk) {
        const int count = min(32, item.entry_count - list.advance());
        for (int begin = 0; begin < count; begin += kTokens, ++sent)
          send_tile(number, true, begin, list, first_head);
      }
      // Every warpgroup must see a tile of every item, or it would hold on to old blocks.
      for (; sent < Config::kConsumers; ++sent)
        send_tile(number, false, 0, list, first_head);
    }
    for (int i = 0; i < Config::kConsumers; ++i) {
      const int stage = wait_for_stage();
      if (leads() && lane_ == 0) {
        s_.tiles[stage].kind = kEnd;
        barrier_arrive(s_.rows_full[stage]);
      }
    }
  }

 private:
  __device__ __forceinline__ bool leads() const { return kWarps == 1 || threadIdx.x < 32; }

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

  __device__ __forceinline__ void send_tile(int number, bool real, int begin, const EntryList& list,
                                            int first_head) {
    const int stage = wait_for_stage();
    TileSlot& tile = s_.tiles[stage];
    if (leads()) {
      const Entry entry = __shfl_sync(~0u, list.entry, (begin + lane_) & 31);
      // Two neighbouring rows a lane; kHeads is even, so they are of one token.
      const int pair_key = __shfl_sync(~0u, list.last_key(), (begin + 2 * lane_ / kHeads) & 31);
      const bool masked = __any_sync(~0u, pair_key < Config::kKeys - 1);
      if (lane_ == 0) {
        tile.kind = !real ? kEmpty : masked ? kMasked : kFull;
        tile.item = number;
      }
      *reinterpret_cast<uint32_t*>(tile.last_key + 2 * lane_) =
          static_cast<uint32_t>(static_cast<uint16_t>(pair_key)) * 0x10001u;
      if (lane_ < kTokens)
        tile.partial[lane_] = ((list.token(entry) - p_.first_token) * p_.q_heads + first_head) /
                                  kPieceRows<kHeads> * p_.index.top_k +
                              BlockIndex::entry_slot(entry);
    }
    uint64_t& full = s_.rows_full[stage];
    __syncwarp();
    if (leads() && lane_ == 0)
      real ? barrier_expect(full, Config::kRowTileBytes) : barrier_arrive(full);
    if (!real)
      return;
    constexpr int kShare = kTokens / kWarps; // tokens of this warp
    const int mine = (kWarps == 1 ? 0 : (threadIdx.x >> 5) * kShare) + lane_;
    const int token = list.token(__shfl_sync(~0u, list.entry, (begin + mine) & 31));
    if (lane_ < kShare) {
      // A row past the tensor's end reads as zeros.
      const int2 at = token < 0 ? make_int2(p_.token_rows, 0) : split_row(token, p_.token_rows);
      const uint32_t q = shared_u32(s_.rows[stage]) + mine * kHeads * 128;
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
