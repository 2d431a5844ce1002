// Feeds the proxy's backward, which uses mma.sync: a proxy row is one row a token, a sixteenth of
// the main attention's work. A tile is 16 tokens a warp of one work item's list x the block's 128
// keys.
//
// Everything a tile needs is fetched ahead, across work items, while the tiles before it are worked
// on. With tile t in hand:
//   t + 1   its rows and the teacher's (and its item's keys, if new) are copied to shared memory
//   t + 2   what is known of its tokens (Row) is looked up
//   t + 3   its entries are read
#pragma once

#include "cuda/common/tile.cuh"
#include "cuda/common/view.h"
#include "cuda/index/index.h"

namespace thresher::cuda::sm90::backward {

// What a row of a tile is. Past the end of the list: token -1, last_key -1.
struct ProxyRow {
  int32_t token, slot;
  int32_t last_key;          // last key of the block that the token sees
  float minus_lse, gradient; // the kernel's own: see Facts
};

struct ProxyTileInfo {
  WorkItem item;
  int32_t valid;   // 0: past the last tile
  int32_t entry;   // of the item's list
  int32_t buffer;  // of the keys
  int32_t new_key; // first tile of its item: the keys are loaded with it
};

// Where tiles come from.
template <class T>
struct ProxySource {
  BlockIndex index;
  int32_t first_item, last_item; // dealt round robin to the CTAs, or taken from next_item
  TensorView<const T> q_proxy, k_proxy;
  int32_t heads_per_key; // Hp / Hpk
  // [pairs of the pass][128] fp16, pairs counted from segment first_segment.
  const __half* teacher;
  int32_t first_segment;
  int32_t* next_item; // kInOrder only: work counter, zero at launch

  __device__ __forceinline__ int64_t first_pair(const WorkItem& item) const {
    const int64_t segment =
        static_cast<int64_t>(item.window) * index.proxy_heads + item.proxy_head - first_segment;
    return segment * index.window_tokens * index.top_k + item.entry_begin;
  }
};

// kInOrder: a CTA's items are the next in list order when it asks, and their turns come along.
template <class T, int kDim, int kWarps, bool kInOrder>
struct ProxyStream {
  static constexpr int kKeys = 128, kTokens = 16 * kWarps, kThreads = 32 * kWarps;
  static constexpr int kRowBytes = Tile<kDim>::kRowBytes;

  struct Shared {
    alignas(128) uint8_t keys[2][kKeys * kRowBytes];
    alignas(128) uint8_t rows[2][kTokens * kRowBytes];
    alignas(128) uint8_t teacher[2][kTokens * kKeys * 2];
    ProxyRow row[3][kTokens];
    ProxyTileInfo tile[8];
    int32_t turn[8]; // kInOrder only: of the tile's item, BlockIndex::order.y
  };

  // Facts: (token, proxy head) -> float2 {minus_lse, gradient}.
  template <class Facts>
  class Feed {
   public:
    __device__ __forceinline__ Feed(Shared& shared, const ProxySource<T>& source, Facts facts)
        : s_(shared), from_(source), facts_(facts), number_(source.first_item + blockIdx.x) {
      if (threadIdx.x == 0) {
        if constexpr (kInOrder) {
          take_upcoming();
          advance();
        } else {
          item_ = read_item(number_);
          upcoming_ = read_item(number_ + gridDim.x);
        }
        for (int t = 0; t < 3; ++t)
          write_info(t);
      }
      __syncthreads();
      if (threadIdx.x < kTokens) {
        s_.row[0][threadIdx.x] = describe(s_.tile[0], read_entry(s_.tile[0]));
        ahead_ = describe(s_.tile[1], read_entry(s_.tile[1]));
        entry_ = read_entry(s_.tile[2]);
      }
      __syncthreads();
      copy(0);
    }

    // Makes the next tile ready; false: there is none. Barriers: the last tile's readers are done.
    __device__ __forceinline__ bool next() {
      ++tile_;
      ring_ = ring_ == 2 ? 0 : ring_ + 1;
      if (threadIdx.x < kTokens)
        s_.row[ring_ == 2 ? 0 : ring_ + 1][threadIdx.x] = ahead_;
      if (threadIdx.x == 0)
        write_info(tile_ + 3);
      __syncthreads();
      if (!info().valid)
        return false;
      copy(tile_ + 1);
      if (threadIdx.x < kTokens) {
        ahead_ = describe(s_.tile[(tile_ + 2) & 7], entry_);
        entry_ = read_entry(s_.tile[(tile_ + 3) & 7]);
      }
      ptx::copy_async_wait<1>();
      __syncthreads();
      return true;
    }

    __device__ __forceinline__ const ProxyTileInfo& info() const { return s_.tile[tile_ & 7]; }
    __device__ __forceinline__ int32_t turn() const { return s_.turn[tile_ & 7]; }
    __device__ __forceinline__ const ProxyRow& row(int i) const { return s_.row[ring_][i]; }
    __device__ __forceinline__ uint32_t rows() const {
      return ptx::shared_address(s_.rows[tile_ & 1]);
    }
    __device__ __forceinline__ uint32_t keys() const {
      return ptx::shared_address(s_.keys[info().buffer]);
    }
    __device__ __forceinline__ uint8_t* teacher() const { return s_.teacher[tile_ & 1]; }

   private:
    __device__ __forceinline__ WorkItem read_item(int number) const {
      return number < from_.last_item ? from_.index.items[number] : WorkItem{};
    }
    // Thread 0 walks the items one ahead of what it hands out.
    __device__ __forceinline__ void write_info(int t) {
      ProxyTileInfo& info = s_.tile[t & 7];
      info.item = item_;
      info.valid = number_ < from_.last_item;
      info.entry = first_entry_;
      info.buffer = buffer_;
      info.new_key = first_entry_ == 0;
      first_entry_ += kTokens;
      if constexpr (kInOrder)
        s_.turn[t & 7] = turn_;
      if (first_entry_ >= item_.entry_count) {
        if constexpr (kInOrder) {
          advance();
        } else {
          number_ += gridDim.x;
          item_ = upcoming_;
          upcoming_ = read_item(number_ + gridDim.x);
        }
        first_entry_ = 0;
        buffer_ ^= 1;
      }
    }
    __device__ __forceinline__ void take_upcoming() {
      upcoming_number_ = from_.first_item + atomicAdd(from_.next_item, 1);
      upcoming_ = read_item(upcoming_number_);
      upcoming_turn_ =
          upcoming_number_ < from_.last_item ? __ldg(&from_.index.order[upcoming_number_].y) : 0;
    }
    __device__ __forceinline__ void advance() {
      number_ = upcoming_number_;
      item_ = upcoming_;
      turn_ = upcoming_turn_;
      if (number_ < from_.last_item)
        take_upcoming();
    }
    __device__ __forceinline__ Entry read_entry(const ProxyTileInfo& info) const {
      const int e = info.entry + static_cast<int>(threadIdx.x);
      return info.valid && e < info.item.entry_count
                 ? __ldg(from_.index.item_entries(info.item) + e)
                 : 0;
    }
    __device__ __forceinline__ ProxyRow describe(const ProxyTileInfo& info, Entry entry) const {
      ProxyRow row = {-1, 0, -1, 0.f, 0.f};
      if (!info.valid || info.entry + static_cast<int>(threadIdx.x) >= info.item.entry_count)
        return row;
      row.token = from_.index.entry_token(info.item, entry);
      row.slot = BlockIndex::entry_slot(entry);
      row.last_key = min(__ldg(from_.index.position + row.token) - info.item.block_begin,
                         info.item.key_count - 1);
      const float2 facts = facts_(row.token, info.item.proxy_head);
      row.minus_lse = facts.x;
      row.gradient = facts.y;
      return row;
    }
    // Enqueues the copies of tile t; its rows are described.
    __device__ __forceinline__ void copy(int t) {
      const ProxyTileInfo& info = s_.tile[t & 7];
      if (info.valid) {
        const WorkItem& item = info.item;
        if (info.new_key)
          load_rows_async<kDim, kKeys, kThreads>(
              ptx::shared_address(s_.keys[info.buffer]), threadIdx.x, kDim, from_.k_proxy.data,
              [&](int key) {
                return key < item.key_count
                           ? from_.k_proxy.at(item.key_begin + key,
                                              item.proxy_head / from_.heads_per_key)
                           : nullptr;
              });
        const ProxyRow* rows = s_.row[t % 3];
        load_rows_async<kDim, kTokens, kThreads>(
            ptx::shared_address(s_.rows[t & 1]), threadIdx.x, kDim, from_.q_proxy.data,
            [&](int row) {
              return rows[row].token >= 0 ? from_.q_proxy.at(rows[row].token, item.proxy_head)
                                          : nullptr;
            });
        const __half* pairs = from_.teacher + (from_.first_pair(item) + info.entry) * kKeys;
        const int count = item.entry_count - info.entry;
        load_rows_async<kKeys, kTokens, kThreads>(
            ptx::shared_address(s_.teacher[t & 1]), threadIdx.x, kKeys, from_.teacher,
            [&](int row) { return row < count ? pairs + row * kKeys : nullptr; });
      }
      ptx::copy_async_commit();
    }

    Shared& s_;
    const ProxySource<T>& from_;
    Facts facts_;
    int tile_ = -1, ring_ = 2;
    // Token threads.
    Entry entry_ = 0;
    ProxyRow ahead_ = {};
    // Thread 0.
    int number_, first_entry_ = 0, buffer_ = 0;
    WorkItem item_ = {}, upcoming_ = {};
    int upcoming_number_ = 0, turn_ = 0, upcoming_turn_ = 0; // kInOrder only
  };

  // scores[n]: this warp's 16 tokens x keys 8 n .. 8 n + 7, as mma leaves them.
  static __device__ __forceinline__ void scores(uint32_t rows, uint32_t keys,
                                                float (&scores)[16][4]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const auto row_lane = TileLane<kDim>::a(lane), key_lane = TileLane<kDim>::bt(lane);
    constexpr int kSixteenRows = 16 * kRowBytes;
    rows += warp * kSixteenRows;
#pragma unroll
    for (auto& quad : scores)
      quad[0] = quad[1] = quad[2] = quad[3] = 0.f;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t a[4], b[4];
      ptx::ldmatrix_x4(a, rows + row_lane(k));
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        ptx::ldmatrix_x4(b, keys + n * kSixteenRows + key_lane(k));
        ptx::mma<T>(scores[2 * n], a, b[0], b[1]);
        ptx::mma<T>(scores[2 * n + 1], a, b[2], b[3]);
      }
    }
  }
};

} // namespace thresher::cuda::sm90::backward
