// Merges a token's partial results in the order of its slots: out and lse.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
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

// A warp takes 512 bytes of every slot's piece: of kRows = 8 heads 32 columns, of 4 heads 64. The
// four lanes of a quad share a head; a lane holds 8 columns of it.
template <class T, int kRows>
__global__ void __launch_bounds__(256, 2) combine_kernel(const __grid_constant__ CombineParams p,
                                                         TensorView<T> out, TensorView<float> lse) {
  constexpr int kParts = kRows / 2; // warps of a piece
  constexpr int kBatch = 16;        // slots whose loads are in flight together
  const int lane = threadIdx.x & 31, c = lane & 3, row = (lane >> 2) % kRows;
  const int unit = blockIdx.x * 8 + (threadIdx.x >> 5), groups = p.q_heads / kRows;
  const int a = unit % kParts * (4 / kParts) + (lane >> 2) / kRows; // columns 32 a ...
  const int local = unit / kParts / groups;
  const int head = unit / kParts % groups * kRows + row;
  ptx::wait_for_predecessor();
  if (local >= p.tokens)
    return;
  const int token = p.first_token + local;
  const int slots =
      __ldg(p.index.slot_count + static_cast<int64_t>(head / p.group) * p.index.tokens + token);
  const int64_t piece = static_cast<int64_t>(unit / kParts) * p.index.top_k;
  const uint4* partial =
      static_cast<const uint4*>(p.partial) + piece * (kRows * 16) + unit % kParts * 32 + lane;
  const float2* statistics = p.statistics + piece * kRows + row;

  // More than 16 slots take further rounds, each with its own offset.
  float top = -INFINITY, sum = 0.f, acc[8] = {};
  for (int first = 0; first < slots; first += kBatch) {
    uint4 value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      value[i] =
          first + i < slots ? __ldcs(partial + (first + i) * (kRows * 16)) : make_uint4(0, 0, 0, 0);
    float2 ml[4]; // of slots 4 c .. 4 c + 3
    float round_top = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = first + 4 * c + i;
      ml[i] = slot < slots ? __ldg(statistics + slot * kRows) : make_float2(-INFINITY, 0.f);
      round_top = fmaxf(round_top, ml[i].x);
    }
    const float next_top = fmaxf(top, quad_max(round_top));
    const float rescale = ptx::exp2(top - next_top); // first round: exp2(-inf) = 0
    top = next_top;
    float weight[4], round_sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weight[i] = ptx::exp2(ml[i].x - top);
      round_sum = fmaf(weight[i], ml[i].y, round_sum);
    }
    sum = fmaf(sum, rescale, quad_sum(round_sum));
#pragma unroll
    for (float& x : acc)
      x *= rescale;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float w = __shfl_sync(~0u, weight[i % 4], (lane & ~3) | (i / 4));
      const uint32_t pairs[4] = {value[i].x, value[i].y, value[i].z, value[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 x = ptx::unpack<T>(pairs[k]);
        acc[2 * k] = fmaf(w, x.x, acc[2 * k]);
        acc[2 * k + 1] = fmaf(w, x.y, acc[2 * k + 1]);
      }
    }
  }

  const float inverse = slots > 0 ? 1.f / sum : 0.f;
  uint32_t mine[4];
#pragma unroll
  for (int k = 0; k < 4; ++k)
    mine[k] = ptx::pack<T>(acc[2 * k] * inverse, acc[2 * k + 1] * inverse);
  *reinterpret_cast<uint4*>(out.at(token, head) + a * 32 + c * 8) = quad_transpose(mine, c);
  if (a == 0 && c == 0)
    *lse.at(token, head) = slots > 0 ? (top + __log2f(sum)) * 0.6931471805599453f : -INFINITY;
}

} // namespace thresher::cuda::sm90::forward
