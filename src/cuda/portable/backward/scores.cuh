// From S^T to P^T, the teacher's rows and dS^T: what happens between the products, in registers.
#pragma once

#include "cuda/portable/backward/products.cuh"
#include "cuda/portable/backward/rows.cuh"

#include <cmath>

namespace thresher::cuda::portable::backward {

// One warp's piece of S^T: kScoreKeys keys x kScoreRows rows. Lane (g, q) of the mma layout holds
// of 8 keys x 8 rows the keys g (and g + 8) and the rows 2 q and 2 q + 1.
template <class T, class C>
class ScorePiece {
  static constexpr int kM = C::kScoreKeys / 16, kN = C::kScoreRows / 8;
  static constexpr float kNan = __builtin_nanf("");

 public:
  float p[kM][kN][4];

  __device__ __forceinline__ ScorePiece(MainShared<C>& shared, int warp, int lane)
      : shared_(shared), lane_(lane), first_key_(warp / C::kScoreRowWarps * C::kScoreKeys),
        first_row_(warp % C::kScoreRowWarps * C::kScoreRows) {
    const int key = first_key_ + lane / 4;
    place_ = Tile<C::kRows>::offset(key, first_row_ / 8) + (lane % 4) * 4;
  }

  // Whether a row of this warp needs more than plain arithmetic: it does not see all keys, or it
  // is not finite. A warp without any row does too: a value that is not finite and that nobody
  // reads would come out of its P as 0 * NaN.
  __device__ __forceinline__ bool needs_care(int ring) const {
    bool care = false, real = false;
    if (lane_ < C::kScoreRows) {
      const int32_t word = shared_.rows.token[ring][first_row_ + lane_];
      real = word >= 0;
      care = real && ((shared_.rows.reach[ring][first_row_ + lane_] & 255) < C::kKeys ||
                      (word & (kQueryBad | kOutputBad)) != 0);
    }
    return __any_sync(0xffffffffu, care) || !__any_sync(0xffffffffu, real);
  }

  // p: products -> probabilities, also written to shared memory as T for dV.
  template <bool kCareful>
  __device__ __forceinline__ void softmax(int ring, float scale, bool bad_keys) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float4 constants = row_constants(ring, n);
      const uint32_t reach = kCareful ? row_reach(ring, n) : 0;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& left = p[m][n][2 * half];
          float& right = p[m][n][2 * half + 1];
          left = ptx::exp2(fmaf(left, scale, -constants.x));
          right = ptx::exp2(fmaf(right, scale, -constants.z));
          float stored_left = left, stored_right = right;
          if constexpr (kCareful) {
            const int key = first_key_ + m * 16 + half * 8 + lane_ / 4;
            const bool bad = bad_keys && (shared_.bad_keys[key / 32] >> (key % 32) & 1);
            const bool sees_left = key < static_cast<int>(reach & 255);
            const bool sees_right = key < static_cast<int>(reach >> 16 & 255);
            left = !sees_left ? 0.f : bad ? kNan : left;
            right = !sees_right ? 0.f : bad ? kNan : right;
            stored_left = sees_left && isinf(constants.y) ? kNan : left;
            stored_right = sees_right && isinf(constants.w) ? kNan : right;
          }
          store(shared_.probability, m, n, half, ptx::pack<T>(stored_left, stored_right));
        }
    }
  }

  // dP^T, p -> dS^T in shared memory.
  template <bool kCareful>
  __device__ __forceinline__ void differentiate(int ring, const float (&dp)[kM][kN][4]) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float4 constants = row_constants(ring, n);
      const uint32_t reach = kCareful ? row_reach(ring, n) : 0;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float left = p[m][n][2 * half] * (dp[m][n][2 * half] - constants.y);
          float right = p[m][n][2 * half + 1] * (dp[m][n][2 * half + 1] - constants.w);
          if constexpr (kCareful) {
            const int key = first_key_ + m * 16 + half * 8 + lane_ / 4;
            if (key >= static_cast<int>(reach & 255))
              left = 0.f;
            if (key >= static_cast<int>(reach >> 16 & 255))
              right = 0.f;
          }
          store(shared_.gradient, m, n, half, ptx::pack<T>(left, right));
        }
    }
  }

  // Sums p over the heads of each token and stores the sums, scaled. The sum is a product
  // with a 0/1 matrix (tokens x rows), for which p in the mma layout of S^T already is operand B.
  //   selection   this lane's share of that matrix, see selection_bits
  //   pairs       (token, block) pairs from the tile's first to the end of the list
  //   to          the unit's first key of the tile's first pair; pairs are B apart
  //   room        keys of the block from there on (a multiple of 32; the unit may reach beyond)
  template <bool kCareful>
  __device__ __forceinline__ void store_teacher(uint32_t selection, int tokens_per_warp, int pairs,
                                                float scale, float* to, int block_size,
                                                int room) const {
    const auto value = [&](int m, int n, int i) {
      const float x = p[m][n][i];
      // A row that is not finite must not spoil the other tokens' sums; its own token is known to
      // be bad (RowConstants).
      return (kCareful && !(x == x) ? 0.f : x) * kPackScale;
    };
    const int first_pair = first_row_ / C::kScoreRows * tokens_per_warp;
    // One head a token and 32 rows: 32 tokens, 16 for each half of the rows.
    const bool apart = tokens_per_warp > 16;
    float sum[kM][2][4];
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t bits = selection >> (8 * j + 2 * i);
        a[i] = (bits & 1 ? 0x3c00u : 0u) | (bits & 2 ? 0x3c000000u : 0u);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (j == 0 || apart)
            sum[m][half][0] = sum[m][half][1] = sum[m][half][2] = sum[m][half][3] = 0.f;
          float x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            x[i] = value(m, 2 * j + i / 2, 2 * half + i % 2);
          add_heads(sum[m][half], a, x);
        }
      if (!apart && j + 1 < kN / 2)
        continue;
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int token = lane_ / 4 + 8 * upper + (apart ? 16 * j : 0);
        const int pair = first_pair + token;
        if (token < tokens_per_warp && pair < pairs) {
          float* row = to + static_cast<int64_t>(pair) * block_size + first_key_ + 4 * (lane_ % 4);
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            if (first_key_ + 16 * m >= room)
              break;
            *reinterpret_cast<float4*>(row + 16 * m) =
                make_float4(sum[m][0][2 * upper] * scale, sum[m][0][2 * upper + 1] * scale,
                            sum[m][1][2 * upper] * scale, sum[m][1][2 * upper + 1] * scale);
          }
        }
      }
    }
  }

 private:
  // sum += A x for four values of P, each in two parts of 11 bits.
  static __device__ __forceinline__ void add_heads(float (&sum)[4], const uint32_t (&a)[4],
                                                   const float (&x)[4]) {
    const uint32_t low = ptx::pack<fp16>(x[0], x[1]), high = ptx::pack<fp16>(x[2], x[3]);
    ptx::mma<fp16>(sum, a, low, high);
    const float2 rounded_low = ptx::unpack<fp16>(low), rounded_high = ptx::unpack<fp16>(high);
    ptx::mma<fp16>(sum, a, ptx::pack<fp16>(x[0] - rounded_low.x, x[1] - rounded_low.y),
                   ptx::pack<fp16>(x[2] - rounded_high.x, x[3] - rounded_high.y));
  }

  // lse and delta of rows 2 q and 2 q + 1 of the n-th eight.
  __device__ __forceinline__ float4 row_constants(int ring, int n) const {
    return *reinterpret_cast<const float4*>(
        &shared_.rows.constants[ring][first_row_ + n * 8 + 2 * (lane_ % 4)]);
  }
  __device__ __forceinline__ uint32_t row_reach(int ring, int n) const {
    return *reinterpret_cast<const uint32_t*>(
        &shared_.rows.reach[ring][first_row_ + n * 8 + 2 * (lane_ % 4)]);
  }
  __device__ __forceinline__ void store(uint8_t* tile, int m, int n, int half, uint32_t pair) {
    *reinterpret_cast<uint32_t*>(tile + (place_ ^ (n << 4)) +
                                 (m * 16 + half * 8) * Tile<C::kRows>::kRowBytes) = pair;
  }

  MainShared<C>& shared_;
  int lane_, first_key_, first_row_;
  uint32_t place_;
};

// This lane's share of the 0/1 matrix (16 tokens x 16 rows) of each 16 rows of a warp: bit 8 j + 2
// i
// + e says whether register i, half e of operand A is 1.
template <class C>
__device__ __forceinline__ uint32_t selection_bits(int heads, int lane) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < C::kScoreRows / 16; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 16 * j + 2 * (lane % 4) + e + 8 * (i / 2);
        int token = row / heads;
        if (C::kScoreRows / heads > 16)
          token -= 16 * j;
        if (token == lane / 4 + 8 * (i % 2))
          bits |= 1u << (8 * j + 2 * i + e);
      }
  return bits;
}

} // namespace thresher::cuda::portable::backward
