// The proxy's scores of a work item by mma.sync: 128 tokens of its list x the block's 128 keys, one
// CTA of eight warps, 16 tokens a warp. A proxy row is one row a token, a sixteenth of the main
// attention's work, so wgmma is not needed here.
#pragma once

#include "cuda/common/tile.cuh"
#include "cuda/common/view.h"
#include "cuda/index/index.h"

namespace thresher::cuda::sm90 {

template <class T, int kDim>
struct ProxyTile {
  static constexpr int kTokens = 128, kKeys = 128, kThreads = 256;

  struct Shared {
    alignas(128) uint8_t keys[kKeys * kDim * 2];
    alignas(128) uint8_t rows[kTokens * kDim * 2];
    int32_t token[kTokens], slot[kTokens]; // token -1: past the end of the list
  };

  // Loads the block's keys; keys past the document's end become zeros. Complete after load_rows.
  static __device__ __forceinline__ void load_keys(Shared& s, const WorkItem& item,
                                                   const TensorView<const T>& k_proxy, int head) {
    load_rows_async<kDim, kKeys, kThreads>(
        ptx::shared_address(s.keys), threadIdx.x, kDim, k_proxy.data, [&](int row) {
          return row < item.key_count ? k_proxy.at(item.key_begin + row, head) : nullptr;
        });
  }

  // Loads the rows of entries [first, first + 128). Synchronises; the tile's former readers must
  // have passed a barrier.
  static __device__ __forceinline__ void load_rows(Shared& s, const BlockIndex& index,
                                                   const WorkItem& item, int first,
                                                   const TensorView<const T>& q_proxy) {
    if (threadIdx.x < kTokens) {
      const int e = first + threadIdx.x;
      const Entry entry = e < item.entry_count ? __ldg(index.item_entries(item) + e) : 0;
      s.token[threadIdx.x] = e < item.entry_count ? index.entry_token(item, entry) : -1;
      s.slot[threadIdx.x] = BlockIndex::entry_slot(entry);
    }
    __syncthreads();
    load_rows_async<kDim, kTokens, kThreads>(
        ptx::shared_address(s.rows), threadIdx.x, kDim, q_proxy.data, [&](int row) {
          return s.token[row] >= 0 ? q_proxy.at(s.token[row], item.proxy_head) : nullptr;
        });
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    __syncthreads();
  }

  // scores[n]: this warp's 16 tokens x keys 8 n .. 8 n + 7, as mma leaves them.
  static __device__ __forceinline__ void scores(const Shared& s, float (&scores)[16][4]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const auto row_lane = TileLane<kDim>::a(lane), key_lane = TileLane<kDim>::bt(lane);
    constexpr int kSixteenRows = 16 * Tile<kDim>::kRowBytes;
    const uint32_t rows = ptx::shared_address(s.rows) + warp * kSixteenRows;
    const uint32_t keys = ptx::shared_address(s.keys);
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

  // Last key of the block that a row of the tile sees; -1: none.
  static __device__ __forceinline__ int last_key(const Shared& s, const BlockIndex& index,
                                                 const WorkItem& item, int row) {
    const int token = s.token[row];
    return token < 0 ? -1
                     : min(__ldg(index.position + token) - item.block_begin, item.key_count - 1);
  }
};

} // namespace thresher::cuda::sm90
