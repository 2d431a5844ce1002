// Merges a token's partial results in the order of its slots: out and lse.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/view.h"
#include "cuda/index/index.h"
#include "cuda/sm90/common/quad.cuh"

namespace thresher::cuda::sm90::forward {

struct CombineParams {
  BlockIndex index;
  int32_t first_token, tokens, q_heads, group; // group: main heads of a proxy head
  const void* partial;                         // see forward's Params
  const float2* statistics;
};

// One warp a (token, head): each half takes every other slot, a lane 16 bytes of the row.
template <class T>
__global__ void __launch_bounds__(256) combine_kernel(const __grid_constant__ CombineParams p,
                                                      TensorView<T> out, TensorView<float> lse) {
  const int lane = threadIdx.x & 31, half = lane >> 4, chunk = lane & 15;
  ptx::wait_for_predecessor();
  const int64_t rows = static_cast<int64_t>(p.tokens) * p.q_heads;
  for (int64_t row = blockIdx.x * 8ll + (threadIdx.x >> 5); row < rows; row += gridDim.x * 8ll) {
    const int token = p.first_token + static_cast<int>(row / p.q_heads);
    const int head = static_cast<int>(row % p.q_heads);
    const int slots =
        __ldg(p.index.slot_count + static_cast<int64_t>(head / p.group) * p.index.tokens + token);
    const float2* statistics = p.statistics + row * p.index.top_k;
    const uint4* partial = reinterpret_cast<const uint4*>(static_cast<const T*>(p.partial) +
                                                          row * p.index.top_k * 128) +
                           chunk;

    // The rows' loads are in flight while the statistics are reduced; more than 16 slots take
    // further rounds, each with its own offset.
    constexpr int kBatch = 8;
    float top = -INFINITY, sum = 0.f, acc[8] = {};
    for (int first = 0; first < slots; first += 2 * kBatch) {
      uint4 value[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int slot = first + 2 * i + half;
        value[i] = slot < slots ? __ldcs(partial + slot * 16) : make_uint4(0, 0, 0, 0);
      }
      const bool mine = first + chunk < slots;
      const float2 ml =
          mine ? __ldg(statistics + first + chunk) : make_float2(-INFINITY, 0.f); // of 16 slots
      float round_top = ml.x;
#pragma unroll
      for (int distance = 8; distance > 0; distance >>= 1)
        round_top = fmaxf(round_top, __shfl_xor_sync(~0u, round_top, distance));
      const float next_top = fmaxf(top, round_top);
      const float rescale = ptx::exp2(top - next_top); // first round: exp2(-inf) = 0
      top = next_top;
      const float weight = mine ? ptx::exp2(ml.x - top) : 0.f;
      sum = sum * rescale + weight * ml.y;
#pragma unroll
      for (float& x : acc)
        x *= rescale;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float w = __shfl_sync(~0u, weight, 2 * i + half);
        const uint32_t pairs[4] = {value[i].x, value[i].y, value[i].z, value[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 x = ptx::unpack<T>(pairs[k]);
          acc[2 * k] = fmaf(w, x.x, acc[2 * k]);
          acc[2 * k + 1] = fmaf(w, x.y, acc[2 * k + 1]);
        }
      }
    }
#pragma unroll
    for (int distance = 8; distance > 0; distance >>= 1) // both halves hold all 16 slots' weights
      sum += __shfl_xor_sync(~0u, sum, distance);
#pragma unroll
    for (float& x : acc)
      x += __shfl_xor_sync(~0u, x, 16);

    const float inverse = slots > 0 ? 1.f / sum : 0.f;
    uint32_t mine[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      mine[k] = ptx::pack<T>(acc[2 * k] * inverse, acc[2 * k + 1] * inverse);
    const uint4 result = quad_transpose(mine, lane & 3);
    if (half == 0)
      *reinterpret_cast<uint4*>(out.at(token, head) + (chunk >> 2) * 32 + (chunk & 3) * 8) = result;
    if (lane == 0)
      *lse.at(token, head) = slots > 0 ? (top + __log2f(sum)) * 0.6931471805599453f : -INFINITY;
  }
}

} // namespace thresher::cuda::sm90::forward
