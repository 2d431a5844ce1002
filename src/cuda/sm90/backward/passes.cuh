// What surrounds the main kernel: the bound for dQ's scale, row constants, conversions.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/common/view.h"
#include "cuda/index/index.h"
#include "cuda/sm90/backward/epilogue.cuh"
#include "cuda/sm90/common/quad.cuh"
#include "cuda/sm90/common/taint.cuh"

namespace thresher::cuda::sm90::backward {

__device__ __forceinline__ float finite_or_zero(float x) {
  return isfinite(x) ? x : 0.f;
}

// Four neighbouring values of a 128-column row, one group a lane.
template <class T>
__device__ __forceinline__ void load_four(float (&x)[4], const T* row) {
  const uint2 packed = __ldg(reinterpret_cast<const uint2*>(row) + (threadIdx.x & 31));
  const float2 low = ptx::unpack<T>(packed.x), high = ptx::unpack<T>(packed.y);
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

// bound[0] = max over keys of |v|_2, bound[1] = max |k|_inf; finite values only. Zero at launch.
template <class T>
__global__ void __launch_bounds__(256)
    bound_kernel(TensorView<const T> k, TensorView<const T> v, const int32_t* key_row, int32_t keys,
                 int32_t kv_heads, float* bound, int32_t* gate) {
  const int lane = threadIdx.x & 31;
  const int64_t rows = static_cast<int64_t>(keys) * kv_heads;
  float v_norm = 0.f, k_max = 0.f;
  bool tainted = false;
  for (int64_t row = blockIdx.x * 8ll + (threadIdx.x >> 5); row < rows; row += gridDim.x * 8ll) {
    const int key = static_cast<int>(row / kv_heads), head = static_cast<int>(row % kv_heads);
    if (__ldg(key_row + key) == 0)
      continue;
    float x[4], y[4], squares = 0.f;
    load_four(x, k.at(key, head));
    load_four(y, v.at(key, head));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tainted |= !isfinite(x[i]) || !isfinite(y[i]);
      k_max = fmaxf(k_max, finite_or_zero(fabsf(x[i])));
      squares = fmaf(y[i], y[i], squares);
    }
    v_norm = fmaxf(v_norm, finite_or_zero(sqrtf(warp_sum(squares))));
  }
  taint(gate, tainted);
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1)
    k_max = fmaxf(k_max, __shfl_xor_sync(~0u, k_max, distance));
  if (lane == 0) { // non-negative floats compare like their bits
    atomicMax(reinterpret_cast<int*>(bound), __float_as_int(v_norm));
    atomicMax(reinterpret_cast<int*>(bound) + 1, __float_as_int(k_max));
  }
}

// Row constants of a pass and, where tiles add to it, a cleared dQ.
//   |sum over any keys of dS_j k_j| <= 2 |dout|_2 max |v|_2 max |k|_inf, since sum P <= 1 and out
//   is a mean of v: the exponent keeps that bound, and so every partial sum, inside fp16.
template <class T, bool kClears>
__global__ void __launch_bounds__(256)
    row_constants_kernel(TensorView<const T> out, TensorView<const T> dout,
                         TensorView<const float> lse, const int32_t* position, int32_t first_token,
                         int32_t tokens, int32_t q_heads, const float* bound, float* minus_lse,
                         float* minus_delta, int8_t* exponent, __half* dq, int32_t* gate) {
  const int lane = threadIdx.x & 31;
  const int64_t rows = static_cast<int64_t>(tokens) * q_heads;
  const float key_bound = 2.f * bound[0] * bound[1];
  for (int64_t row = blockIdx.x * 8ll + (threadIdx.x >> 5); row < rows; row += gridDim.x * 8ll) {
    const int local = static_cast<int>(row / q_heads), head = static_cast<int>(row % q_heads);
    const int token = first_token + local;
    if constexpr (kClears)
      reinterpret_cast<uint2*>(dq + row * Config::kDim)[lane] = make_uint2(0, 0);
    if (__ldg(position + token) < 0)
      continue; // padding, or a row without a key: no list holds it
    float x[4], y[4], product = 0.f, squares = 0.f;
    load_four(x, out.at(token, head));
    load_four(y, dout.at(token, head));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product = fmaf(x[i], y[i], product);
      squares = fmaf(y[i], y[i], squares);
    }
    product = warp_sum(product);
    squares = warp_sum(squares);
    if (lane == 0) {
      const float row_lse = *lse.at(token, head);
      taint(gate, !isfinite(row_lse) || !isfinite(product) || !isfinite(squares));
      minus_lse[row] = -row_lse * 1.4426950408889634f;
      minus_delta[row] = -product;
      const float limit = finite_or_zero(sqrtf(squares) * key_bound);
      // 2^14 / limit leaves a factor of two for rounding below fp16's 65504.
      const int e = limit > 0.f ? 14 - ilogbf(limit) : 0;
      exponent[row] = static_cast<int8_t>(max(-100, min(100, e)));
    }
  }
}

// dQ: fp16 scaled, permuted -> T, natural.
template <class T>
__global__ void __launch_bounds__(256)
    convert_dq_kernel(const __half* from, const int8_t* exponent, TensorView<T> dq,
                      int32_t first_token, int32_t tokens, int32_t q_heads, const int32_t* position,
                      float scale) {
  const int64_t chunks = static_cast<int64_t>(tokens) * q_heads * 16;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < chunks; i += gridDim.x * 256ll) {
    const int64_t row = i / 16;
    const int chunk = i % 16, c = chunk & 3;
    const int token = first_token + static_cast<int>(row / q_heads);
    const float factor =
        __ldg(position + token) < 0 ? 0.f : scale * __int_as_float((127 - exponent[row]) << 23);
    const uint4 packed = __ldcs(reinterpret_cast<const uint4*>(from) + i);
    uint32_t mine[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (uint32_t& pair : mine) {
      const float2 x = ptx::unpack<fp16>(pair);
      pair = ptx::pack<T>(x.x * factor, x.y * factor);
    }
    const uint4 result = quad_transpose(mine, c); // 16 contiguous bytes
    T* to = dq.at(token, static_cast<int>(row % q_heads)) + (chunk >> 2) * 32 + c * 8;
    __stcs(reinterpret_cast<uint4*>(to), result);
  }
}

// Four permuted columns of a row (see epilogue.cuh), number `chunk`, to their natural places.
template <class T>
__device__ __forceinline__ void store_four(T* row, int chunk, float4 x, float scale) {
  T* out = row + (chunk >> 2) * 16 + (chunk & 3) * 2;
  *reinterpret_cast<uint32_t*>(out) = ptx::pack<T>(x.x * scale, x.y * scale);
  *reinterpret_cast<uint32_t*>(out + 8) = ptx::pack<T>(x.z * scale, x.w * scale);
}

// Rows of dK, dV or a proxy gradient: fp32, permuted -> T, natural. Every row is written.
template <class T>
__global__ void __launch_bounds__(256)
    convert_rows_kernel(const float* from, TensorView<T> to, int32_t first_row, int32_t rows,
                        int32_t heads, int32_t dim, float scale) {
  const int chunks_of_row = dim / 4;
  const int64_t chunks = static_cast<int64_t>(rows) * heads * chunks_of_row;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < chunks; i += gridDim.x * 256ll) {
    const int64_t row = i / chunks_of_row;
    const int chunk = static_cast<int>(i - row * chunks_of_row);
    const float4 x = __ldcs(reinterpret_cast<const float4*>(from) + i);
    store_four(to.at(first_row + static_cast<int>(row / heads), static_cast<int>(row % heads)),
               chunk, x, scale);
  }
}

// KL rows: the partial sums of a token's slots, in their order.
template <class T> // of the tensors only; the rows are fp32
__global__ void __launch_bounds__(256)
    sum_kl_kernel(const float* partial, const uint8_t* slot_count, TensorView<float> kl,
                  int32_t first_token, int32_t tokens, int32_t all_tokens, int32_t proxy_heads,
                  int32_t top_k) {
  const int64_t rows = static_cast<int64_t>(tokens) * proxy_heads;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < rows; i += gridDim.x * 256ll) {
    const int token = first_token + static_cast<int>(i / proxy_heads);
    const int head = static_cast<int>(i % proxy_heads);
    const int slots = slot_count[static_cast<int64_t>(head) * all_tokens + token];
    float sum = 0.f;
    for (int slot = 0; slot < slots; ++slot)
      sum += partial[i * top_k + slot];
    *kl.at(token, head) = sum;
  }
}

} // namespace thresher::cuda::sm90::backward
