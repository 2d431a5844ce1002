// Deterministic results for queries: the partial results of a row's slots, added in their order.
#pragma once

#include "cuda/sm90/backward/passes.cuh"

namespace thresher::cuda::sm90::backward {

struct CombineParams {
  BlockIndex index;
  int32_t first_token, tokens;
  int32_t heads, group;   // of the result; its heads on one proxy head
  const __half* partial;  // see Params::dq
  const int8_t* exponent; // [tokens, heads]
  float scale;
};

// dQ. A warp takes 512 bytes of every slot's piece: of kRows = 8 heads 32 columns, of 4 heads 64.
// The four lanes of a quad share a head; a lane holds 8 columns of it.
template <class T, int kRows>
__global__ void __launch_bounds__(256, 2)
    combine_dq_kernel(const __grid_constant__ CombineParams p, TensorView<T> dq) {
  constexpr int kParts = kRows / 2; // warps of a piece
  constexpr int kBatch = 16;        // slots whose loads are in flight together
  const int lane = threadIdx.x & 31, c = lane & 3, row = (lane >> 2) % kRows;
  const int unit = blockIdx.x * 8 + (threadIdx.x >> 5), groups = p.heads / kRows;
  const int a = unit % kParts * (4 / kParts) + (lane >> 2) / kRows; // columns 32 a ...
  const int local = unit / kParts / groups;
  const int head = unit / kParts % groups * kRows + row;
  if (local >= p.tokens)
    return;
  const int token = p.first_token + local;
  const int slots =
      __ldg(p.index.slot_count + static_cast<int64_t>(head / p.group) * p.index.tokens + token);
  const uint4* partial = reinterpret_cast<const uint4*>(p.partial) +
                         static_cast<int64_t>(unit / kParts) * p.index.top_k * (kRows * 16) +
                         unit % kParts * 32 + lane;
  float sum[8] = {};
  for (int first = 0; first < slots; first += kBatch) {
    uint4 value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      value[i] =
          first + i < slots ? __ldcs(partial + (first + i) * (kRows * 16)) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t pairs[4] = {value[i].x, value[i].y, value[i].z, value[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 x = ptx::unpack<fp16>(pairs[k]);
        sum[2 * k] += x.x;
        sum[2 * k + 1] += x.y;
      }
    }
  }
  // Padding and rows without a block have no exponent.
  const int64_t place = static_cast<int64_t>(local) * p.heads + head;
  const float factor =
      slots > 0 ? p.scale * __int_as_float((127 - __ldg(p.exponent + place)) << 23) : 0.f;
  uint32_t mine[4];
#pragma unroll
  for (int k = 0; k < 4; ++k)
    mine[k] = ptx::pack<T>(sum[2 * k] * factor, sum[2 * k + 1] * factor);
  __stcs(reinterpret_cast<uint4*>(dq.at(token, head) + a * 32 + c * 8), quad_transpose(mine, c));
}

// dQ of the proxy: fp32 rows [tokens of the pass, heads, K][dim], columns permuted as dK's.
template <class T>
__global__ void __launch_bounds__(256)
    combine_rows_kernel(const float* partial, const uint8_t* slot_count, TensorView<T> to,
                        int32_t first_token, int32_t tokens, int32_t all_tokens, int32_t heads,
                        int32_t dim, int32_t top_k, float scale) {
  const int chunks_of_row = dim / 4;
  const int64_t chunks = static_cast<int64_t>(tokens) * heads * chunks_of_row;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < chunks; i += gridDim.x * 256ll) {
    const int64_t row = i / chunks_of_row;
    const int chunk = static_cast<int>(i - row * chunks_of_row);
    const int token = first_token + static_cast<int>(row / heads);
    const int head = static_cast<int>(row % heads);
    const int slots = __ldg(slot_count + static_cast<int64_t>(head) * all_tokens + token);
    const float4* from =
        reinterpret_cast<const float4*>(partial) + row * top_k * chunks_of_row + chunk;
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
    for (int slot = 0; slot < slots; ++slot) {
      const float4 x = __ldcs(from + slot * chunks_of_row);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    store_four(to.at(token, head), chunk, sum, scale);
  }
}

} // namespace thresher::cuda::sm90::backward
