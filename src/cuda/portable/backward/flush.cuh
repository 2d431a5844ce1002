// Where gradients go when a product is done: reductions into fp32 accumulators, stores into a place
// of one's own, or the output itself.
#pragma once

#include "cuda/portable/backward/unit.cuh"

namespace thresher::cuda::portable::backward {

// The four gradients that a lane holds of one row and 16 columns, in the accumulators' order.
template <int kN>
__device__ __forceinline__ float4 quad_of(const float (&acc)[kN][4], int piece, int half) {
  return {acc[2 * piece][2 * half], acc[2 * piece][2 * half + 1], acc[2 * piece + 1][2 * half],
          acc[2 * piece + 1][2 * half + 1]};
}

// One warp's 32 keys x kColumns columns of dK or dV. accumulator: [Tk][heads][kDim].
template <int kDim, class T, int kN>
__device__ __forceinline__ void
flush_keys(const Unit& unit, const float (&acc)[2][kN][4], float* accumulator, int32_t heads,
           const TensorView<T>& out, float scale, int32_t dim, int first_key, int first_column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + m * 16 + half * 8 + lane / 4;
      if (key >= unit.key_count)
        continue;
      if (unit.only_owner) {
        T* row = out.at(unit.key_begin + key, unit.key_head) + first_column + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < kN; ++n)
          if (first_column + n * 8 < dim)
            *reinterpret_cast<uint32_t*>(row + n * 8) =
                ptx::pack<T>(acc[m][n][2 * half] * scale, acc[m][n][2 * half + 1] * scale);
      } else {
        float* row = accumulator +
                     (static_cast<int64_t>(unit.key_begin + key) * heads + unit.key_head) * kDim +
                     first_column + 4 * (lane % 4);
#pragma unroll
        for (int n = 0; n < kN / 2; ++n)
          ptx::reduce_add(row + n * 16, quad_of(acc[m], n, half));
      }
    }
}

// One warp's rows x columns of dQ. accumulator: [slots * key tiles][tokens of the
// pass][heads][kDim].
template <int kDim, int kM, int kN, class Rows>
__device__ __forceinline__ void flush_queries(const WorkParams& p, const Unit& unit,
                                              const Rows& rows, int ring,
                                              const float (&acc)[kM][kN][4], float* accumulator,
                                              int32_t heads, int first_row, int first_column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      const int32_t word = rows.token[ring][row];
      if (word < 0)
        continue;
      int64_t token = word & kTokenMask;
      if (p.slots > 1)
        token += static_cast<int64_t>(slot_of(unit, rows.reach[ring][row]) * p.key_tiles +
                                      unit.key_tile) *
                 p.pass.tokens;
      float* to = accumulator + (token * heads + unit.first_head + rows.head[row]) * kDim +
                  first_column + 4 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kN / 2; ++n)
        if (p.slots > 1)
          *reinterpret_cast<float4*>(to + n * 16) = quad_of(acc[m], n, half);
        else
          ptx::reduce_add(to + n * 16, quad_of(acc[m], n, half));
    }
}

} // namespace thresher::cuda::portable::backward
