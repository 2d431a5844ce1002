// Sums in a fixed order, so that they have the same bits in every run: who adds to the gradient
// rows of a block's keys does so when it is its turn.
//
// The warp that owns keys 16 w .. 16 w + 15 of a block is number w in every CTA, so the warps of an
// item take turns of their own, without a barrier between them: a counter a (owner of the rows,
// block row, warp), with the kv head or the proxy key head as owner. Counters are zero before the
// first pass and go on from pass to pass, as BlockIndex::order does.
//
// Nobody waits for ever: items are taken in list order, as the turns are, from one counter. Of the
// items that are taken and not finished, the earliest lies with a CTA that runs and has finished
// everything it took before; the items that it waits for are earlier, hence finished.
#pragma once

#include "cuda/common/ptx.cuh"

namespace thresher::cuda::sm90::backward {

inline constexpr int kTurnWarps = 8; // of 16 keys

struct Turn {
  int32_t* counter; // of warp 0
  int32_t number;   // items that add before
};

__device__ __forceinline__ Turn make_turn(int32_t* counters, int32_t block_rows, int32_t owner,
                                          int32_t row, int32_t number) {
  return {counters + (static_cast<int64_t>(owner) * block_rows + row) * kTurnWarps, number};
}

// Called by whole warps, as pass_turn().
__device__ __forceinline__ void wait_for_turn(const Turn& turn, int warp, int lane) {
  if (lane == 0)
    while (ptx::load_acquire(turn.counter + warp) != turn.number)
      ;
  __syncwarp();
}
// The release of one lane covers what the others added before the warp met.
__device__ __forceinline__ void pass_turn(const Turn& turn, int warp, int lane) {
  __syncwarp();
  if (lane == 0)
    ptx::store_release(turn.counter + warp, turn.number + 1);
}

} // namespace thresher::cuda::sm90::backward
