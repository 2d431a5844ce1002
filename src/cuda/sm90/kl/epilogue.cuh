// From scores to partial sums of the KL rows: the mean over a token's heads, the terms of the keys,
// their sum over a warp's 16 keys.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm90/kl/config.h"

namespace thresher::cuda::sm90::kl {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f, kTiny = 1e-37f;

// Tokens of a tile that a lane has rows of: a quad's lanes hold two of each eight rows.
template <class C>
inline constexpr int kHeldTokens = C::kHeads == 16 ? 8 : 16;

// Adds up what two lanes hold of kCount tokens, in place; each ends with half of them: the lane
// whose `bit` is not set with those at even places, the other with those at odd ones.
template <int kCount, int kSize>
__device__ __forceinline__ void fold(float (&x)[kSize][2], int bit) {
  const bool odd = threadIdx.x & bit;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float given = odd ? x[2 * i][h] : x[2 * i + 1][h];
      x[i][h] = (odd ? x[2 * i + 1][h] : x[2 * i][h]) + __shfl_xor_sync(~0u, given, bit);
    }
}

// Teacher of a tile: scores become probabilities, whose mean over a token's heads is left in
// mean[m][key, key + 8] for m < kTokens / 4, of token 4 m + 2 (c & 1) + (c >> 1) in lane c.
template <class C>
__device__ __forceinline__ void average_heads(const float (&scores)[64], const float* lse,
                                              float scale, float (&mean)[kHeldTokens<C>][2]) {
  constexpr int kHeld = kHeldTokens<C>;
  constexpr float kLog2Heads = C::kHeads == 16 ? 4.f : C::kHeads == 8 ? 3.f : 2.f;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(lse + 8 * j + (lane & 3) * 2);
    const float left = fmaf(x.x, -kLog2e, -kLog2Heads), right = fmaf(x.y, -kLog2e, -kLog2Heads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float pair = ptx::exp2(fmaf(scores[4 * j + 2 * h], scale, left)) +
                         ptx::exp2(fmaf(scores[4 * j + 2 * h + 1], scale, right));
      float& to = mean[j * kHeld / 16][h];
      to = kHeld == 16 || j % 2 == 0 ? pair : to + pair;
    }
  }
  if constexpr (C::kHeads == 4) { // lanes 0 and 1 hold one token, 2 and 3 the next
    fold<kHeld>(mean, 1);
  } else {
    fold<kHeld>(mean, 2);
    fold<kHeld / 2>(mean, 1);
  }
}

// t ln(t / s) + s - t, summed over this lane's keys `key` and `key` + 8. Both distributions sum to
// one, so adding s - t changes nothing; but now every term is least where the student is right, and
// its rounding does not come through. A key that is not visible may be anything, NaN included.
template <class C>
__device__ __forceinline__ void sum_terms(const TileFacts<C>& facts,
                                          const float (&student)[C::kTokens / 2],
                                          const float (&mean)[kHeldTokens<C>][2], float scale,
                                          int key, float (&kl)[C::kTokens / 4]) {
  const int column = (threadIdx.x & 3) * 2;
#pragma unroll
  for (int i = 0; i < C::kTokens / 8; ++i) {
    const float2 lse = *reinterpret_cast<const float2*>(facts.proxy_lse + 8 * i + column);
    const int2 last = *reinterpret_cast<const int2*>(facts.last_key + 8 * i + column);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float minus_lse = (e ? lse.y : lse.x) * -kLog2e;
      const int last_key = e ? last.y : last.x;
      float sum = 0.f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float t = mean[2 * i + e][h];
        const float log_student = fmaf(student[4 * i + 2 * h + e], scale, minus_lse); // base 2
        const float term =
            fmaf(t * kLn2, __log2f(fmaxf(t, kTiny)) - log_student, ptx::exp2(log_student) - t);
        sum += key + 8 * h <= last_key ? term : 0.f;
      }
      kl[2 * i + e] = sum;
    }
  }
}

// Sums over the warp's keys: the eight lanes of a column exchange halves of its tokens as long as
// there are several, then add up. Afterwards kl[0] belongs to the token at the place returned, in
// each lane that has one of its own; the others return -1.
template <int kCount>
__device__ __forceinline__ int sum_keys(float (&kl)[kCount]) {
  const int lane = threadIdx.x & 31;
  int m = 0;
  bool owns = true;
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int half = kCount >> (step + 1), bit = 4 << step;
    const bool upper = lane & bit;
    if (half == 0) {
      kl[0] += __shfl_xor_sync(~0u, kl[0], bit);
      owns &= !upper;
      continue;
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i)
      if (i < half) {
        const float given = upper ? kl[i] : kl[i + half];
        kl[i] = (upper ? kl[i + half] : kl[i]) + __shfl_xor_sync(~0u, given, bit);
      }
    m += upper ? half : 0;
  }
  return owns ? 8 * (m >> 1) + (lane & 3) * 2 + (m & 1) : -1;
}

// KL rows: the partial sums of a token's slots, in their order.
template <class T> // of the tensors only; the rows are fp32
__global__ void __launch_bounds__(256)
    sum_partials_kernel(const float* partial, const uint8_t* slot_count, TensorView<float> kl,
                        int32_t first_token, int32_t tokens, int32_t all_tokens,
                        int32_t proxy_heads, int32_t top_k) {
  static_assert(kPartials == 8);
  const int64_t rows = static_cast<int64_t>(tokens) * proxy_heads;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < rows; i += gridDim.x * 256ll) {
    const int token = first_token + static_cast<int>(i / proxy_heads);
    const int head = static_cast<int>(i % proxy_heads);
    const int slots = slot_count[static_cast<int64_t>(head) * all_tokens + token];
    const float4* from = reinterpret_cast<const float4*>(partial + i * top_k * kPartials);
    float sum = 0.f;
#pragma unroll 4
    for (int slot = 0; slot < slots; ++slot) {
      const float4 a = __ldcs(from + 2 * slot), b = __ldcs(from + 2 * slot + 1);
      sum += ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    }
    *kl.at(token, head) = sum;
  }
}

} // namespace thresher::cuda::sm90::kl
