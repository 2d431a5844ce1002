// A consumer warpgroup: 64 keys of the item's block against all tiles of its list. The keys stay in
// registers as operand A, so that the next item's can arrive, and that the products with the few
// rows of the proxy do not wait for shared memory. The products of one warpgroup hide behind the
// exponentials of the other.
#pragma once

#include "cuda/sm90/common/async.cuh"
#include "cuda/sm90/common/swizzle.cuh"
#include "cuda/sm90/common/wgmma.cuh"
#include "cuda/sm90/kl/epilogue.cuh"

namespace thresher::cuda::sm90::kl {

// This warp's 16 keys from a swizzled tile of keys, as operand A.
template <int kSteps>
__device__ __forceinline__ void load_keys(uint32_t (&a)[kSteps][4], uint32_t tile, int first_key,
                                          int half_bytes) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    ptx::ldmatrix_x4(a[k],
                     tile + swizzled(first_key + (lane & 15), 2 * k + (lane >> 4), half_bytes));
}

// d = A B^T for rows of a swizzled tile.
template <class T, int kSteps, int kCount>
__device__ __forceinline__ void multiply(float (&d)[kCount], const uint32_t (&a)[kSteps][4],
                                         uint32_t rows, int half_bytes) {
  const uint64_t b = shared_matrix(rows, 16);
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    products_rs<T, 0>(d, a[k], b + (k >> 2) * (half_bytes >> 4) + (k & 3) * 2, k > 0);
}

template <class T, class C>
__device__ __forceinline__ void consume(Shared<C>& s, const Params<T>& p) {
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31; // warp 0 .. 7
  const int key = warp * 16 + (lane >> 2); // and + 8: this lane's keys

  uint32_t tile = 0;
  for (uint32_t number = 0;; ++number) {
    barrier_wait(s.keys_full, number & 1);
    const int tiles = __shfl_sync(~0u, s.tiles, 0);
    if (tiles == 0)
      return;
    uint32_t keys[C::kDim / 16][4], proxy_keys[C::kProxyDim / 16][4];
    load_keys(keys, shared_u32(s.keys), warp * 16, C::kKeyHalfBytes);
    load_keys(proxy_keys, shared_u32(s.proxy_keys), warp * 16, C::kKeyHalfBytes);
    __syncwarp();
    if (lane == 0)
      barrier_arrive(s.keys_empty); // the next item's arrive under this one's work

#pragma unroll 1
    for (int t = 0; t < tiles; ++t, ++tile) {
      const int stage = tile % C::kStages;
      barrier_wait(s.rows_full[stage], tile / C::kStages & 1);
      fence_async_proxy(); // the proxy's rows came by cp.async

      float scores[64], student[C::kTokens / 2]; // S^T = K Q^T
      wgmma_fence();
      multiply<T>(scores, keys, shared_u32(s.rows[stage]), C::kRowHalfBytes);
      multiply<T>(student, proxy_keys, shared_u32(s.proxy_rows[stage]), C::kProxyRowHalfBytes);
      wgmma_commit();
      wgmma_wait<0>();
      keep(scores);
      keep(student);

      const TileFacts<C>& facts = s.facts[stage];
      float mean[kHeldTokens<C>][2], kl[C::kTokens / 4];
      average_heads<C>(scores, facts.lse, p.score_scale, mean);
      sum_terms(facts, student, mean, p.proxy_score_scale, key, kl);
      const int place = sum_keys(kl);
      const int64_t pair = place < 0 ? -1 : facts.pair[place];
      __syncwarp();
      if (lane == 0)
        barrier_arrive(s.rows_empty[stage]);
      if (pair >= 0)
        p.kl_partial[pair * kPartials + warp] = kl[0];
    }
  }
}

} // namespace thresher::cuda::sm90::kl
