// Merges a row's partial results in the order of its slots: the same bits whoever made them first.
#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/portable/forward/forward.h"

#include <algorithm>
#include <cmath>

namespace thresher::cuda::portable::forward {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr float kLn2 = 0.6931471805599453f;

// Slots of a row of the pass that hold partial results.
__device__ __forceinline__ int32_t filled_slots(const CombineParams& p, int32_t token,
                                                int32_t head) {
  const int64_t row = static_cast<int64_t>(head / p.group) * p.index.tokens + token;
  return __ldg(p.index.slot_count + row) * p.key_tiles;
}

// One warp a (token, head): kLanes lanes hold a row, kTogether slots are read at a time, kBatch
// such reads are in flight.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineParams p, const T* partial, TensorView<T> out,
                   TensorView<float> lse) {
  if (p.index.idle())
    return;
  constexpr int kLanes = kDim / 8, kTogether = 32 / kLanes, kBatch = 8;
  constexpr int kRound = kBatch * kTogether; // slots, one a lane when their weights are formed
  const int lane = threadIdx.x % 32, chunk = lane % kLanes, group = lane / kLanes;
  const int64_t rows = static_cast<int64_t>(p.tokens) * p.heads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int32_t pass_token = static_cast<int32_t>(row / p.heads);
    const int32_t head = static_cast<int32_t>(row - static_cast<int64_t>(pass_token) * p.heads);
    const int32_t token = p.first_token + pass_token;
    const int32_t slots = filled_slots(p, token, head);
    const int64_t first_place = row * p.index.top_k * p.key_tiles;
    const uint4* from = reinterpret_cast<const uint4*>(partial + first_place * kDim) + chunk;

    float top = -INFINITY, sum = 0.f, acc[8] = {};
    for (int32_t first = 0; first < slots; first += kRound) {
      uint4 value[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t slot = first + i * kTogether + group;
        value[i] = slot < slots ? __ldcs(from + static_cast<int64_t>(slot) * kLanes)
                                : make_uint4(0, 0, 0, 0);
      }
      float2 own = {-INFINITY, 0.f}; // of slot first + lane
      if (lane < kRound && first + lane < slots)
        own = __ldg(p.statistics + first_place + first + lane);
      float next_top = fmaxf(top, own.x);
#pragma unroll
      for (int distance = 16; distance > 0; distance >>= 1)
        next_top = fmaxf(next_top, __shfl_xor_sync(~0u, next_top, distance));
      const float offset = next_top == -INFINITY ? 0.f : next_top;
      const float rescale = ptx::exp2(top - offset); // first round: 0
      top = next_top;
      const float weight = ptx::exp2(own.x - offset) * own.y;
      sum = sum * rescale + weight;
#pragma unroll
      for (float& x : acc)
        x *= rescale;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float w = __shfl_sync(~0u, weight, i * kTogether + group);
        const uint32_t pairs[4] = {value[i].x, value[i].y, value[i].z, value[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 x = ptx::unpack<T>(pairs[k]);
          acc[2 * k] = fmaf(w, x.x, acc[2 * k]);
          acc[2 * k + 1] = fmaf(w, x.y, acc[2 * k + 1]);
        }
      }
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int distance = kLanes; distance < 32; distance <<= 1)
#pragma unroll
      for (float& x : acc)
        x += __shfl_xor_sync(~0u, x, distance);

    const float inverse = slots > 0 ? 1.f / sum : 0.f;
    T* to = out.at(token, head);
    if (group == 0)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = partial_column(chunk, i);
        if (column < p.dim)
          *reinterpret_cast<uint32_t*>(to + column) =
              ptx::pack<T>(acc[2 * i] * inverse, acc[2 * i + 1] * inverse);
      }
    if (lane == 0)
      *lse.at(token, head) = slots > 0 ? (top + log2f(sum)) * kLn2 : -INFINITY;
  }
}

// One thread a (token, head).
__global__ void __launch_bounds__(kThreads)
    combine_statistics_kernel(const __grid_constant__ CombineParams p, TensorView<float> lse) {
  const int64_t rows = static_cast<int64_t>(p.tokens) * p.heads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int32_t pass_token = static_cast<int32_t>(row / p.heads);
    const int32_t head = static_cast<int32_t>(row - static_cast<int64_t>(pass_token) * p.heads);
    const int32_t token = p.first_token + pass_token;
    const int32_t slots = filled_slots(p, token, head);
    const float2* from = p.statistics + row * p.index.top_k * p.key_tiles;
    float top = -INFINITY, sum = 0.f;
    for (int32_t slot = 0; slot < slots; ++slot)
      top = fmaxf(top, from[slot].x);
    const float offset = top == -INFINITY ? 0.f : top;
    for (int32_t slot = 0; slot < slots; ++slot)
      sum += from[slot].y * ptx::exp2(from[slot].x - offset);
    *lse.at(token, head) = slots > 0 ? (top + log2f(sum)) * kLn2 : -INFINITY;
  }
}

dim3 grid_for(int64_t blocks) {
  return dim3(
      static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{8} * device_facts().sm_count)));
}

} // namespace

template <class T>
void combine(const CombineParams& params, const T* partial, const TensorView<T>& out,
             const TensorView<float>& lse, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(params.tokens) * params.heads;
  with_dim<64, 128, 256>(params.padded_dim, [&]<int kDim>() {
    launch("forward combine", combine_kernel<T, kDim>, grid_for(ceil_div<int64_t>(rows, kWarps)),
           dim3(kThreads), 0, stream, params, partial, out, lse);
  });
}
template void combine(const CombineParams&, const bf16*, const TensorView<bf16>&,
                      const TensorView<float>&, cudaStream_t);
template void combine(const CombineParams&, const fp16*, const TensorView<fp16>&,
                      const TensorView<float>&, cudaStream_t);

void combine_statistics(const CombineParams& params, const TensorView<float>& lse,
                        cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(params.tokens) * params.heads;
  launch("forward combine_statistics", combine_statistics_kernel,
         grid_for(ceil_div<int64_t>(rows, kThreads)), dim3(kThreads), 0, stream, params, lse);
}

} // namespace thresher::cuda::portable::forward
