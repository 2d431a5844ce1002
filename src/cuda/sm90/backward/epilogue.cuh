// What leaves the tensor cores: dS^T to shared memory, the teacher's rows, dQ, dK and dV.
//
// Accumulators in global memory keep natural rows, but permute the columns of a row so that what
// one lane holds of it is 16 contiguous bytes (convert.cu undoes it):
//   dQ, fp16    column 64 h + 8 (4 a + i) + 2 c + e  at  64 h + (4 a + c) 8 + 2 i + e
//   dK, dV      column 16 m + 8 i + 2 c + e          at  (4 m + c) 4 + 2 i + e
//   teacher     as dK: the proxy kernel reads it as an mma accumulator's layout
// with c the lane's place in its quad.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm90/backward/config.h"
#include "cuda/sm90/common/async.cuh"
#include "cuda/sm90/common/store.cuh"
#include "cuda/sm90/common/wgmma.cuh"

namespace thresher::cuda::sm90::backward {

// The teacher is kept as fp16 times 4096: 11 bits down to probabilities of 1.5e-8.
inline constexpr float kTeacherScale = 4096.f;

// dS^T [128 keys][64 rows], 128-byte swizzle; one warp writes its 16 keys.
__device__ __forceinline__ void store_scores(uint32_t tile, const uint32_t (&ds)[4][4],
                                             int first_key, int lane) {
  const int key = first_key + (lane & 15), chunk = lane >> 4;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t address = tile + key * 128 + (((2 * k + chunk) ^ (lane & 7)) << 4);
    store_matrix_x4(address, ds[k]);
  }
}

// Constant operand E: mean over a token's heads = P^T E. For 16 rows from 16 k, column n of E_k is
// 1 / heads at the rows of token n (modulo 8) of the tile. Core matrices of 8 columns x 8 rows.
template <class T, int kHeads>
__device__ __forceinline__ void write_head_mean(Shared& s, float value) {
  for (int i = threadIdx.x; i < 4 * 128; i += Config::kThreads) {
    const int k = i / 128, row = 16 * k + (i / 64 % 2) * 8 + i % 8, column = i / 8 % 8;
    reinterpret_cast<T*>(s.head_mean)[i] = static_cast<T>(row / kHeads % 8 == column ? value : 0.f);
  }
  fence_async_proxy();
}

template <int kHeads>
struct HeadMean {
  static constexpr int kTokens = Config::kRows / kHeads;
  static constexpr int kGroups = kTokens > 8 ? kTokens / 8 : 1; // of 8 tokens
  float mean[kGroups][4];

  template <class T>
  __device__ __forceinline__ void issue(Shared& s, const uint32_t (&probability)[4][4]) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      products_rs<T, 0>(mean[k * kGroups / 4], probability[k],
                        plain_matrix(shared_u32(s.head_mean[k]), 128, 128), k % (4 / kGroups) > 0);
    wgmma_commit();
  }

  // A lane holds two tokens x keys r, r + 8; it trades one token with the lane of key r ^ 1, so
  // that two neighbouring keys of one token are stored together.
  __device__ __forceinline__ void store(const Params& p, const ItemSlot& item, int first_entry,
                                        int first_key, int lane) {
    const bool odd = lane & 4;
    const int column = first_key + ((lane >> 3) & 3) * 4;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      keep(mean[group]);
      const float (&m)[4] = mean[group];
      const float low = __shfl_xor_sync(~0u, odd ? m[0] : m[1], 4);
      const float high = __shfl_xor_sync(~0u, odd ? m[2] : m[3], 4);
      const int token = 8 * group + 2 * (lane & 3) + (odd ? 1 : 0);
      if (token < kTokens && first_entry + token < item.pairs) {
        __half* row = p.teacher + item.part * p.teacher_part_stride +
                      (static_cast<int64_t>(item.first_pair) + first_entry + token) * Config::kKeys;
        *reinterpret_cast<uint2*>(row + column) =
            odd ? make_uint2(ptx::pack<fp16>(low, m[1]), ptx::pack<fp16>(high, m[3]))
                : make_uint2(ptx::pack<fp16>(m[0], low), ptx::pack<fp16>(m[2], high));
      }
    }
  }
};

// A tile's dQ, 64 columns a warpgroup, 16 rows a warp: added to the sums, or stored as the rows'
// partial result of this block (`pieces`: of the tile's tokens).
template <int kHeads, bool kDeterministic>
__device__ __forceinline__ void put_dq(const Params& p, const ItemSlot& item, const RowConstants& c,
                                       const int32_t (&pieces)[Config::kMostTokens], bool masked,
                                       const float (&dq)[32], int group, int warp, int lane) {
  constexpr int kRows = kPieceRows<kHeads>, kChunk = 32; // columns that the quad of a row holds
  if constexpr (kDeterministic) // addresses are made anew for every tile: registers are short
    asm volatile("" : "+r"(lane));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + (lane >> 2) + 8 * h;
    const int piece = kDeterministic ? pieces[row / kHeads] : 0;
    if (kDeterministic ? piece < 0 : masked && c.last_key[row] < 0)
      continue; // filling of the last tile
    const float scale = __int_as_float((127 + c.exponent[row]) << 23);
    __half* to = p.dq + (lane & 3) * 8;
    if constexpr (kDeterministic)
      to += static_cast<int64_t>(piece + row % kHeads / kRows * p.index.top_k) *
                (kRows * Config::kDim) +
            group * 2 * (kRows * kChunk) + row % kRows * kChunk;
    else
      to += (static_cast<int64_t>(c.token[row / kHeads]) * p.q_heads + item.first_head +
             row % kHeads) *
                Config::kDim +
            group * 64;
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 4 * a + i;
        packed[i] = ptx::pack<fp16>(dq[4 * j + 2 * h] * scale, dq[4 * j + 2 * h + 1] * scale);
      }
      if constexpr (kDeterministic)
        store_streaming(to + a * (kRows * kChunk), packed);
      else
        reduce_add(to + a * kChunk, packed);
    }
  }
}

// Adds the item's dK and dV: keys `key` and `key` + 8 of the block.
__device__ __forceinline__ void add_block(const Params& p, const ItemSlot& item,
                                          const float (&dk)[64], const float (&dv)[64], int key,
                                          int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (key + 8 * h >= item.key_count)
      continue;
    const int64_t to =
        (static_cast<int64_t>(item.key_begin + key + 8 * h) * p.kv_heads + item.kv_head) *
            Config::kDim +
        (lane & 3) * 4;
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      const int low = 8 * m + 2 * h, high = low + 4;
      ptx::reduce_add(p.dk + to + m * 16,
                      make_float4(dk[low], dk[low + 1], dk[high], dk[high + 1]));
      ptx::reduce_add(p.dv + to + m * 16,
                      make_float4(dv[low], dv[low + 1], dv[high], dv[high + 1]));
    }
  }
}

} // namespace thresher::cuda::sm90::backward
