// The producer warpgroup: takes work items, loads a block's keys once per item, then streams the
// rows of the tokens that chose it. Main rows are bulk copies (one a token and half, 80 cycles each
// to issue, shared by four warps); a proxy row is one head of one token, for which cp.async serves
// better.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm90/common/async.cuh"
#include "cuda/sm90/common/entries.cuh"
#include "cuda/sm90/common/swizzle.cuh"
#include "cuda/sm90/kl/config.h"

namespace thresher::cuda::sm90::kl {

struct Maps {
  const CUtensorMap *q, *k, *k_proxy;
};

template <class T, class C>
class Producer {
  static constexpr int kWarps = C::kProducers / 32;

 public:
  __device__ __forceinline__ Producer(Shared<C>& shared, const Params<T>& params, const Maps& maps)
      : s_(shared), p_(params), maps_(maps), thread_(threadIdx.x % C::kProducers),
        warp_(__shfl_sync(~0u, thread_ >> 5, 0)), lane_(thread_ & 31) {}

  __device__ __forceinline__ void run() {
    const int first = __ldg(p_.index.segment_items + p_.first_segment);
    const int work = __ldg(p_.index.segment_items + p_.last_segment) - first;
    // Thread 0 holds the next ticket, which it asked for an item before.
    auto take = [&] { return thread_ == 0 ? atomicAdd(p_.next_item, 1) : 0; };

    int ticket = take();
    uint32_t tile = 0; // since the start: stage and parity follow from it
    for (uint32_t number = 0;; ++number) {
      if (thread_ == 0)
        s_.ticket[number & 1] = ticket;
      ptx::barrier_sync(kTicket, C::kProducers);
      const int next = s_.ticket[number & 1];
      if (next >= work) {
        if (warp_ == 0)
          end(number);
        return;
      }
      const WorkItem item = p_.index.items[first + next];
      if (warp_ == 0)
        send_keys(item, number);
      ticket = take();
      EntryList list(p_.index, item, spread_start(item, next));
      for (int chunk = 0; chunk < list.chunks; ++chunk) {
        const int count = min(32, item.entry_count - list.advance());
        for (int begin = 0; begin < count; begin += C::kTokens, ++tile)
          send_tile(item, list, begin, tile);
      }
    }
  }

 private:
  __device__ __forceinline__ void end(uint32_t number) {
    barrier_wait(s_.keys_empty, number & 1 ^ 1);
    if (lane_ == 0) {
      s_.tiles = 0;
      barrier_arrive(s_.keys_full);
    }
  }

  __device__ __forceinline__ void send_keys(const WorkItem& item, uint32_t number) {
    barrier_wait(s_.keys_empty, number & 1 ^ 1);
    if (lane_ != 0)
      return;
    s_.tiles = (item.entry_count + C::kTokens - 1) / C::kTokens;
    barrier_expect(s_.keys_full, (2 + C::kProxyHalves) * C::kKeyHalfBytes);
    const int2 at = split_row(item.key_begin, p_.key_rows);
    const int head = item.proxy_head / (p_.proxy_heads / p_.kv_heads);
    const int proxy_head = item.proxy_head / (p_.proxy_heads / p_.proxy_kv_heads);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      copy_box(shared_u32(s_.keys) + half * C::kKeyHalfBytes, maps_.k, half * C::kHalf, head, at.x,
               at.y, s_.keys_full);
#pragma unroll
    for (int half = 0; half < C::kProxyHalves; ++half)
      copy_box(shared_u32(s_.proxy_keys) + half * C::kKeyHalfBytes, maps_.k_proxy, half * C::kHalf,
               proxy_head, at.x, at.y, s_.keys_full);
  }

  // Entries of the list's chunk from `begin` on are the tile's.
  __device__ __forceinline__ void send_tile(const WorkItem& item, const EntryList& list, int begin,
                                            uint32_t tile) {
    const int stage = tile % C::kStages;
    barrier_wait(s_.rows_empty[stage], tile / C::kStages & 1 ^ 1);
    TileFacts<C>& facts = s_.facts[stage];
    uint64_t& full = s_.rows_full[stage];
    if (warp_ == 0) {
      describe(item, list, begin, facts);
      __syncwarp();
      if (lane_ == 0) // what was stored above is ordered by this arrival
        barrier_expect(full, 2 * C::kRowHalfBytes);
    }
    copy_rows(item, list, begin, stage);

    // A row that is past the end of the list is zeros, its lse too: it stays finite.
    const int token = token_at(list, begin + thread_ / C::kHeads);
    ptx::copy_async_4(shared_u32(facts.lse + thread_),
                      p_.lse.at(max(token, 0), item.proxy_head * C::kHeads + thread_ % C::kHeads),
                      token >= 0);
    copy_proxy_rows(item, list, begin, stage);
    barrier_arrive_after_copies(full);
  }

  __device__ __forceinline__ static Entry entry_at(const EntryList& list, int entry) {
    return __shfl_sync(~0u, list.entry, entry & 31);
  }
  __device__ __forceinline__ static int token_at(const EntryList& list, int entry) {
    return list.token(entry_at(list, entry));
  }

  __device__ __forceinline__ void describe(const WorkItem& item, const EntryList& list, int begin,
                                           TileFacts<C>& facts) {
    const Entry entry = entry_at(list, begin + lane_);
    const int last_key = __shfl_sync(~0u, list.last_key(), (begin + lane_) & 31);
    const int token = list.token(entry);
    if (lane_ >= C::kTokens)
      return;
    const int place = place_of(lane_);
    facts.last_key[place] = last_key;
    facts.pair[place] =
        token < 0
            ? -1
            : (static_cast<int64_t>(token - p_.first_token) * p_.proxy_heads + item.proxy_head) *
                      p_.index.top_k +
                  BlockIndex::entry_slot(entry);
    ptx::copy_async_4(shared_u32(facts.proxy_lse + place),
                      p_.proxy_lse.at(max(token, 0), item.proxy_head), token >= 0);
  }

  __device__ __forceinline__ void copy_rows(const WorkItem& item, const EntryList& list, int begin,
                                            int stage) {
    constexpr int kShare = C::kTokens / kWarps; // tokens of this warp
    const int mine = warp_ * kShare + lane_;
    const int token = token_at(list, begin + mine);
    if (lane_ >= kShare)
      return;
    // A row past the tensor's end reads as zeros.
    const int2 at = token < 0 ? make_int2(p_.token_rows, 0) : split_row(token, p_.token_rows);
    const uint32_t to = shared_u32(s_.rows[stage]) + mine * C::kHeads * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      copy_box(to + half * C::kRowHalfBytes, maps_.q, half * C::kHalf, item.proxy_head * C::kHeads,
               at.x, at.y, s_.rows_full[stage]);
  }

  __device__ __forceinline__ void copy_proxy_rows(const WorkItem& item, const EntryList& list,
                                                  int begin, int stage) {
    constexpr int kChunks = C::kProxyDim / 8, kPieces = C::kTokens * kChunks; // of 16 bytes
    const uint32_t to = shared_u32(s_.proxy_rows[stage]);
#pragma unroll
    for (int first = 0; first < kPieces; first += C::kProducers) {
      const int piece = first + thread_, chunk = piece % kChunks;
      const int token = token_at(list, begin + piece / kChunks);
      if (piece < kPieces)
        ptx::copy_async_16(to + swizzled(place_of(piece / kChunks), chunk, C::kProxyRowHalfBytes),
                           p_.q_proxy.at(max(token, 0), item.proxy_head) + chunk * 8, token >= 0);
    }
  }

  Shared<C>& s_;
  const Params<T>& p_;
  const Maps& maps_;
  const int thread_, warp_, lane_;
};

} // namespace thresher::cuda::sm90::kl
