// Reductions and scans within a quad (the four lanes that share an mma row), a warp and a block.
#pragma once

#include <cstdint>

namespace thresher::cuda {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

__device__ __forceinline__ int32_t warp_inclusive_scan(int32_t x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int distance = 1; distance < 32; distance <<= 1) {
    const int32_t y = __shfl_up_sync(0xffffffffu, x, distance);
    if (lane >= distance)
      x += y;
  }
  return x;
}

// Exclusive scan over a block of kThreads threads (at most 1024); `total` gets the sum. `scratch`
// is 32 values of shared memory. Synchronises on entry and before it returns.
template <int kThreads>
__device__ __forceinline__ int32_t block_exclusive_scan(int32_t x, int32_t* scratch,
                                                        int32_t& total) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int32_t inclusive = warp_inclusive_scan(x);
  __syncthreads();
  if (lane == 31)
    scratch[warp] = inclusive;
  __syncthreads();
  // Every warp scans the warp sums for itself: one barrier less than handing the result round.
  const int32_t sums = warp_inclusive_scan(lane < kWarps ? scratch[lane] : 0);
  total = __shfl_sync(0xffffffffu, sums, kWarps - 1);
  const int32_t before = __shfl_sync(0xffffffffu, sums, warp > 0 ? warp - 1 : 0);
  __syncthreads();
  return inclusive - x + (warp > 0 ? before : 0);
}

} // namespace thresher::cuda
