// From the scores' choice to finished rows: merges the pieces of a row's keys, sorts ids, adds the
// forced blocks. One thread a row; short rows and padding need no scores and are written here too.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/topk.cuh"
#include "cuda/sm90/select/config.h"

namespace thresher::cuda::sm90::select {

inline constexpr int kFinishThreads = 128;
// A thread's row in shared memory: so that a warp stores whole rows, side by side.
inline size_t finish_shared_bytes(int top_k) {
  return static_cast<size_t>(kFinishThreads) * (top_k + 1) * sizeof(int32_t);
}

template <bool kDescending, class V>
__device__ __forceinline__ void order(V& a, V& b) {
  const V low = min(a, b), high = max(a, b);
  a = kDescending ? high : low;
  b = kDescending ? low : high;
}
// Sorts a bitonic sequence. Recursion instead of nested loops: those are not always unrolled, and
// the array then lies in local memory.
template <int kDistance, bool kDescending, class V, int kCount>
__device__ __forceinline__ void merge_bitonic(V (&x)[kCount]) {
  if constexpr (kDistance > 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if ((i & kDistance) == 0)
        order<kDescending>(x[i], x[i + kDistance]);
    merge_bitonic<kDistance / 2, kDescending>(x);
  }
}
// Sorted runs of kRun -> sorted runs of 2 kRun, until one is left.
template <int kRun, class V, int kCount>
__device__ __forceinline__ void sort_ascending(V (&x)[kCount]) {
  if constexpr (kRun < kCount) {
#pragma unroll
    for (int begin = 0; begin < kCount; begin += 2 * kRun)
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        order<false>(x[begin + i], x[begin + 2 * kRun - 1 - i]);
    merge_bitonic<kRun / 2, false>(x);
    sort_ascending<2 * kRun>(x);
  }
}

template <int kPlaces>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const Params p) {
  extern __shared__ int32_t rows[];
  ptx::wait_for_predecessor();
  const portable::SelectArgs& args = p.args;
  const int lane = threadIdx.x % 32, top_k = args.top_k, pitch = top_k + 1;
  int32_t* const warp_rows = rows + (threadIdx.x - lane) * pitch;
  int32_t* const out = warp_rows + lane * pitch;
  // Warps take 32 tokens of one head.
  const int32_t warps = (args.geometry.tokens + 31) / 32;
  const int32_t warp = blockIdx.x * (kFinishThreads / 32) + threadIdx.x / 32;
  const int32_t head = warp / warps, first_token = (warp - head * warps) * 32;
  if (head >= args.proxy_heads)
    return;
  const int32_t token = first_token + lane;
  const int32_t tokens = min(32, args.geometry.tokens - first_token);
  if (lane < tokens) {
    const int32_t fragment = args.geometry.fragment_of(token);
    const int32_t position = fragment < 0 ? -1 : args.geometry.position(fragment, token);
    const int32_t visible = position < 0 ? 0 : position / args.block_size + 1;
    if (visible <= top_k) {
      for (int i = 0; i < top_k; ++i)
        out[i] = i < visible ? i : -1;
    } else {
      const int scored = args.scored();
      int32_t ids[kPlaces];
      if (args.splits == 1) {
        const int32_t* from = args.block_ids.at(head, token) + args.init_blocks;
#pragma unroll
        for (int i = 0; i < kPlaces; ++i)
          ids[i] = i < scored ? from[i] : INT32_MAX;
      } else {
        const int64_t stride = int64_t{args.proxy_heads} * args.geometry.tokens;
        const Candidate* from =
            args.candidates + static_cast<int64_t>(head) * args.geometry.tokens + token;
        Candidate best[kPlaces];
#pragma unroll
        for (int i = 0; i < kPlaces; ++i)
          best[i] = from[i * stride];
#pragma unroll 1
        for (int split = 1; split < args.splits; ++split) {
          from += kPlaces * stride;
          // The larger of the one's i-th and the other's i-th from the end: the best of both.
#pragma unroll
          for (int i = 0; i < kPlaces; ++i)
            best[i] = max(best[i], from[(kPlaces - 1 - i) * stride]);
          merge_bitonic<kPlaces / 2, true>(best);
        }
#pragma unroll
        for (int i = 0; i < kPlaces; ++i)
          ids[i] = i < scored ? candidate_id(best[i]) : INT32_MAX;
      }
      sort_ascending<1>(ids);
#pragma unroll
      for (int i = 0; i < kPlaces; ++i)
        if (i < scored)
          out[args.init_blocks + i] = ids[i];
      for (int i = 0; i < args.init_blocks; ++i)
        out[i] = i;
      for (int i = 1; i <= args.local_blocks; ++i)
        out[top_k - i] = visible - i;
    }
  }
  __syncwarp();
  for (int i = lane; i < tokens * top_k; i += 32) {
    const int row = i / top_k, slot = i - row * top_k;
    args.block_ids.at(head, first_token + row)[slot] = warp_rows[row * pitch + slot];
  }
}

} // namespace thresher::cuda::sm90::select
