// Rows with an infinity or NaN in a tile that rows of the other operand see only in part.
#pragma once

#include "cuda/common/tile.cuh"

namespace thresher::cuda {

// Whether one of two packed 16-bit floats is infinite or NaN.
template <class T>
__device__ __forceinline__ bool not_finite(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<T, bf16> ? 0x7f807f80u : 0x7c007c00u;
  const uint32_t rest = (pair & kExponent) ^ kExponent;
  return ((rest - 0x00010001u) & ~rest & 0x80008000u) != 0;
}

template <class T>
__device__ __forceinline__ bool not_finite(const uint4& x) {
  return not_finite<T>(x.x) || not_finite<T>(x.y) || not_finite<T>(x.z) || not_finite<T>(x.w);
}

// Rows that are not finite would spoil, as 0 * NaN, the results of queries that do not see
// them: they become zeros and are noted in `bad` (one bit a row, (kRows + 31) / 32 words). Returns
// whether there are any. `tile` is loaded and seen by all threads; synchronises.
template <class T, int kDim, int kRows, int kThreads>
__device__ __forceinline__ bool clear_bad_rows(uint8_t* tile, uint32_t* bad) {
  constexpr int kPerRow = kThreads / kRows, kChunks = Tile<kDim>::kChunks;
  static_assert(kThreads % kRows == 0 && kChunks % kPerRow == 0);
  const int row = threadIdx.x / kPerRow;
  bool found = false;
#pragma unroll
  for (int i = 0; i < kChunks; i += kPerRow) {
    const int chunk = i + threadIdx.x % kPerRow;
    const uint4 x = *reinterpret_cast<const uint4*>(tile + Tile<kDim>::offset(row, chunk));
    found |= not_finite<T>(x.x) || not_finite<T>(x.y) || not_finite<T>(x.z) || not_finite<T>(x.w);
  }
  if (!__syncthreads_or(found))
    return false;
  if (threadIdx.x < (kRows + 31) / 32)
    bad[threadIdx.x] = 0;
  __syncthreads();
  if (found)
    atomicOr(bad + row / 32, 1u << (row % 32));
  __syncthreads();
  if (bad[row / 32] >> (row % 32) & 1)
    for (int chunk = threadIdx.x % kPerRow; chunk < kChunks; chunk += kPerRow)
      *reinterpret_cast<uint4*>(tile + Tile<kDim>::offset(row, chunk)) = make_uint4(0, 0, 0, 0);
  __syncthreads();
  return true;
}

// Whether one of the first `reach` rows is noted in `bad`.
template <int kRows>
__device__ __forceinline__ bool sees_bad_row(const uint32_t* bad, int reach) {
  bool sees = false;
#pragma unroll
  for (int word = 0; word < (kRows + 31) / 32; ++word) {
    const int bits = min(32, max(0, reach - 32 * word));
    const uint32_t mask = bits == 32 ? ~0u : (1u << bits) - 1;
    sees |= (bad[word] & mask) != 0;
  }
  return sees;
}

// Changes the sign of all 16-bit floats of a tile: a negative softmax scale is a positive one of
// -Q. kThreads threads that start and end together.
template <int kBytes, int kThreads>
__device__ __forceinline__ void negate_tile(uint8_t* tile) {
  for (int i = threadIdx.x * 16; i < kBytes; i += kThreads * 16) {
    uint4& x = *reinterpret_cast<uint4*>(tile + i);
    x = make_uint4(x.x ^ 0x80008000u, x.y ^ 0x80008000u, x.z ^ 0x80008000u, x.w ^ 0x80008000u);
  }
  __syncthreads();
}

} // namespace thresher::cuda
