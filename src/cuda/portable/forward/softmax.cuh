// One warp's 16 rows: scores, mask, softmax over one tile of keys. Lane (g, c) of the mma layout
// holds of every eight keys the keys 2 c and 2 c + 1, of rows g and g + 8.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/common/tile.cuh"

#include <cmath>

namespace thresher::cuda::portable::forward {

// s = Q K^T of 16 rows.
template <class T, int kDim, int kKeys>
__device__ __forceinline__ void row_scores(float (&s)[kKeys / 8][4], const PieceLane<kDim>& rows,
                                           const PieceLane<kDim>& keys) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[n][i] = 0.f;
#pragma unroll 2 // all of them: ptxas reads so far ahead that registers run out
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    ptx::ldmatrix_x4(a, rows(k));
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, keys(k) + n * 16 * Tile<kDim>::kRowBytes);
      ptx::mma<T>(s[2 * n], a, b[0], b[1]);
      ptx::mma<T>(s[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// reach: how many of the keys rows g and g + 8 see.
template <int kEights>
__device__ __forceinline__ void mask_scores(float (&s)[kEights][4], int32_t reach, int32_t reach_8,
                                            int quad) {
  const int32_t limit[2] = {reach - 2 * quad, reach_8 - 2 * quad};
#pragma unroll
  for (int n = 0; n < kEights; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (8 * n + i % 2 >= limit[i / 2])
        s[n][i] = -INFINITY;
}

// Largest score of rows g and g + 8, not scaled; -inf: no key, or all NaN.
template <int kEights>
__device__ __forceinline__ void row_tops(const float (&s)[kEights][4], float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float highest = -INFINITY;
#pragma unroll
    for (int n = 0; n < kEights; ++n)
      highest = fmaxf(highest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    top[h] = quad_max(highest);
  }
}

// probability = exp2(s * scale - offset) as operand A of P V; sum: this lane's share of l.
template <class T, int kEights>
__device__ __forceinline__ void
exponentials(float (&s)[kEights][4], uint32_t (&probability)[kEights / 2][4],
             const float (&offset)[2], float (&sum)[2], float scale) {
#pragma unroll
  for (int n = 0; n < kEights; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float left = ptx::exp2(fmaf(s[n][2 * h], scale, -offset[h]));
      const float right = ptx::exp2(fmaf(s[n][2 * h + 1], scale, -offset[h]));
      sum[h] += left + right;
      probability[n / 2][n % 2 * 2 + h] = ptx::pack<T>(left, right);
    }
}

// Softmax of complete rows: statistics m, l of rows g and g + 8, see PartialParams.
template <class T, int kEights>
__device__ __forceinline__ void softmax(float (&s)[kEights][4],
                                        uint32_t (&probability)[kEights / 2][4],
                                        float2 (&statistics)[2], float scale) {
  float top[2], offset[2], sum[2] = {0.f, 0.f};
  row_tops(s, top);
#pragma unroll
  for (int h = 0; h < 2; ++h)
    offset[h] = top[h] == -INFINITY ? 0.f : top[h] * scale;
  exponentials<T>(s, probability, offset, sum, scale);
#pragma unroll
  for (int h = 0; h < 2; ++h)
    statistics[h] = {top[h] == -INFINITY ? -INFINITY : offset[h], quad_sum(sum[h])};
}

} // namespace thresher::cuda::portable::forward
