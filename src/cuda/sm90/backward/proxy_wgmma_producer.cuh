// The proxy kernel's producer warpgroup: keys of an item, then its tokens' rows, tile by tile. A
// row is 128 or 256 bytes, so cp.async serves better than bulk copies (one a row, 80 cycles each to
// issue); only the teacher's rows, which follow each other in memory, come by a bulk copy.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm90/backward/proxy_wgmma_config.h"
#include "cuda/sm90/common/async.cuh"
#include "cuda/sm90/common/swizzle.cuh"

namespace thresher::cuda::sm90::backward {

// Items are dealt round robin to the CTAs; deterministic: taken in list order from a counter.
template <class T, class C, bool kDeterministic>
class ProxyProducer {
  static constexpr int kWarps = C::kProducers / 32;
  static constexpr int kShare = C::kTokens / kWarps; // tokens of a tile that a warp brings: 16
  static constexpr int kChunks = C::kDim / 8;        // of a row
  static constexpr int kRowsAtOnce = 32 / kChunks;
  static constexpr Entry kNone = ~0u; // past the end of the list

 public:
  __device__ __forceinline__ ProxyProducer(ProxyShared<C>& shared, const ProxyParams<T>& params,
                                           const CUtensorMap* teacher)
      : s_(shared), p_(params), teacher_(teacher), thread_(threadIdx.x % C::kProducers),
        warp_(thread_ >> 5), lane_(thread_ & 31) {}

  __device__ __forceinline__ void run() {
    const int last = p_.last_item();
    uint32_t tile = 0, number = 0;
    int ticket = take(); // an item ahead
    for (int i = p_.first_item() + blockIdx.x; kDeterministic || i < last;
         i += gridDim.x, ++number) {
      if constexpr (kDeterministic) {
        i = p_.first_item() + share(ticket, number);
        announce(i, i >= last, number);
        if (i >= last)
          return;
        ticket = take();
      }
      const WorkItem item = p_.index.items[i];
      send_keys(item, number);
      // An entry is read two tiles ahead, its token's position one.
      const Entry* entries = p_.index.item_entries(item);
      Entry upcoming = read_entry(item, entries, 0), later = read_entry(item, entries, C::kTokens);
      int position = read_position(item, upcoming);
      for (int begin = 0; begin < item.entry_count; begin += C::kTokens, ++tile) {
        const Entry entry = upcoming;
        const int entry_position = position;
        upcoming = later;
        position = read_position(item, upcoming);
        later = read_entry(item, entries, begin + 2 * C::kTokens);
        send_tile(item, begin, entry, entry_position, tile);
      }
    }
  }

 private:
  __device__ __forceinline__ int take() const {
    return kDeterministic && thread_ == 0 ? atomicAdd(p_.next_item, 1) : 0;
  }
  // Thread 0 tells the others what it took.
  __device__ __forceinline__ int share(int ticket, uint32_t number) {
    const int slot = number % C::kBlocks;
    if (thread_ == 0)
      s_.ticket[slot] = ticket;
    ptx::barrier_sync(kProxyTicket, C::kProducers);
    return s_.ticket[slot];
  }
  // Tells the consumers, with the arrival that only keys_full of tickets expects. Where there is no
  // item left, no keys follow.
  __device__ __forceinline__ void announce(int item, bool none, uint32_t number) {
    const int slot = number % C::kBlocks;
    barrier_wait(s_.keys_empty[slot], number / C::kBlocks & 1 ^ 1);
    if (thread_ == 0) {
      s_.item[slot] = item;
      barrier_arrive(s_.keys_full[slot]);
    }
    if (none)
      barrier_arrive(s_.keys_full[slot]);
  }

  __device__ __forceinline__ Entry read_entry(const WorkItem& item, const Entry* entries,
                                              int begin) const {
    const int e = begin + warp_ * kShare + lane_ % kShare;
    return e < item.entry_count ? __ldg(entries + e) : kNone;
  }
  __device__ __forceinline__ int read_position(const WorkItem& item, Entry entry) const {
    return entry == kNone ? -1 : __ldg(p_.index.position + p_.index.entry_token(item, entry));
  }

  __device__ __forceinline__ void send_keys(const WorkItem& item, uint32_t number) {
    const int slot = number % C::kBlocks, head = p_.key_head(item);
    barrier_wait(s_.keys_empty[slot], number / C::kBlocks & 1 ^ 1);
    const uint32_t to = shared_u32(s_.keys[slot]);
    for (int i = thread_; i < C::kKeys * kChunks; i += C::kProducers) {
      const int place = i / kChunks, chunk = i % kChunks, key = proxy_key(place);
      const bool exists = key < item.key_count; // a row past the document's end is zeros
      const T* from = p_.k_proxy.at(item.key_begin + (exists ? key : 0), head) + chunk * 8;
      ptx::copy_async_16(to + swizzled(place, chunk, C::kKeyHalfBytes), from, exists);
    }
    barrier_arrive_after_copies(s_.keys_full[slot]);
  }

  __device__ __forceinline__ void send_tile(const WorkItem& item, int begin, Entry entry,
                                            int position, uint32_t tile) {
    const int stage = tile % C::kStages;
    uint64_t& full = s_.rows_full[stage];
    barrier_wait(s_.rows_empty[stage], tile / C::kStages & 1 ^ 1);
    const bool exists = entry != kNone;
    const int token = exists ? p_.index.entry_token(item, entry) : p_.first_token;

    ProxyTokens<C>& tokens = s_.tokens[stage];
    const int mine = warp_ * kShare + lane_ % kShare;
    if (lane_ < kShare) {
      tokens.last_key[mine] = exists ? min(position - item.block_begin, item.key_count - 1) : -1;
      tokens.row[mine] = (token - p_.first_token) * p_.proxy_heads + item.proxy_head;
      tokens.slot[mine] = exists ? BlockIndex::entry_slot(entry) : 0;
      ptx::copy_async_4(shared_u32(tokens.minus_lse + mine),
                        p_.proxy_lse.at(token, item.proxy_head), exists);
    } else if (p_.dkl.data) {
      ptx::copy_async_4(shared_u32(tokens.dkl + mine), p_.dkl.at(token, item.proxy_head), exists);
    }
    const uint32_t to = shared_u32(s_.rows[stage]);
#pragma unroll
    for (int first = 0; first < kShare; first += kRowsAtOnce) {
      const int place = first + lane_ / kChunks, chunk = lane_ % kChunks;
      const int row_token = __shfl_sync(~0u, exists ? token : -1, place);
      const T* from = p_.q_proxy.at(max(row_token, p_.first_token), item.proxy_head) + chunk * 8;
      ptx::copy_async_16(to + swizzled(warp_ * kShare + place, chunk, C::kRowHalfBytes), from,
                         row_token >= 0);
    }
    barrier_arrive_after_copies(full);
    __syncwarp();
    if (lane_ == 0) { // what was stored above is ordered by this arrival
      if (warp_ == 0) {
        barrier_expect(full, 2 * C::kTeacherHalfBytes);
        // Rows of the next list may come along: their tokens have no visible key.
        const int pair = static_cast<int>(p_.first_pair(item)) + begin;
        const uint32_t teacher = shared_u32(s_.teacher[stage]);
        copy_box(teacher, teacher_, 0, 0, pair, 0, full);
        copy_box(teacher + C::kTeacherHalfBytes, teacher_, 64, 0, pair, 0, full);
      } else {
        barrier_arrive(full);
      }
    }
  }

  ProxyShared<C>& s_;
  const ProxyParams<T>& p_;
  const CUtensorMap* teacher_;
  const int thread_, warp_, lane_;
};

} // namespace thresher::cuda::sm90::backward
