// Reads rows of block_indices with one lane a slot and decides which ids count.
#pragma once

#include "cuda/index/index.h"

namespace thresher::cuda {

// Several tokens share a warp: `lanes` lanes (a power of two) a token, kPerLane slots a lane (slot
// = lane + 32 * j; more than one only when lanes is 32).
struct SlotLayout {
  int lanes, lane; // lanes of a token; this thread's number among them
  uint32_t group;  // the warp's lanes that hold the same token
  int token;       // within the tokens that the block reads at a time
  int tokens_per_block;

  __device__ __forceinline__ SlotLayout(int top_k, int threads) {
    lanes = top_k > 16 ? 32 : 1 << (32 - __clz(top_k - 1));
    const int warp_lane = threadIdx.x & 31;
    lane = warp_lane & (lanes - 1);
    group = (lanes == 32 ? 0xffffffffu : (1u << lanes) - 1) << (warp_lane - lane);
    token = threadIdx.x / lanes;
    tokens_per_block = threads / lanes;
  }
};

// Slots of one token as read.
template <int kPerLane>
struct RawSlots {
  int32_t id[kPerLane];
  int32_t position = -1, row_base = 0;

  // `offset` < `count`: within the window that starts at token `begin`.
  __device__ __forceinline__ void load(const BlockIndex& index,
                                       const BlockIdsView<const int32_t>& ids, int32_t head,
                                       int32_t begin, int32_t offset, int32_t count, int lane) {
    const int32_t token = begin + offset;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      id[j] = -1;
    position = -1;
    if (offset >= count)
      return;
    // No load waits for another: ids of padding are read and then not used.
    position = index.position[token];
    row_base = index.row_base[token];
    const int32_t* from = ids.at(head, token);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      if (lane + 32 * j < index.top_k)
        id[j] = __ldg(from + lane + 32 * j);
  }
};

// Slots that count: block row and number among the token's valid ids.
template <int kPerLane>
struct ValidSlots {
  int32_t row[kPerLane]; // -1: does not count
  int32_t number[kPerLane];
  int32_t count; // of the whole token

  // Called by whole warps.
  __device__ __forceinline__ ValidSlots(const BlockIndex& index, const SlotLayout& layout,
                                        const RawSlots<kPerLane>& raw) {
    const int32_t last = raw.position < 0 ? -1 : raw.position / index.block_size;
    int32_t id[kPerLane];
    bool ascending = true;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      id[j] = raw.id[j] >= 0 && raw.id[j] <= last ? raw.id[j] : -1;
    // A row that ascends strictly and has its holes at the end repeats nothing. All that our own
    // selection writes is of this kind.
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      int32_t before = __shfl_up_sync(0xffffffffu, id[j], 1);
      if (j > 0) {
        const int32_t wrapped = __shfl_sync(0xffffffffu, id[j > 0 ? j - 1 : 0], 31);
        if (layout.lane == 0)
          before = wrapped;
      }
      if (layout.lane + 32 * j > 0 && id[j] >= 0 && (before < 0 || before >= id[j]))
        ascending = false;
    }
    bool repeated[kPerLane] = {};
    if (!__all_sync(0xffffffffu, ascending)) {
      const int first_lane = (threadIdx.x & 31) - layout.lane;
#pragma unroll
      for (int other_j = 0; other_j < kPerLane; ++other_j)
        for (int other = 0; other < layout.lanes; ++other) {
          const int32_t other_id = __shfl_sync(0xffffffffu, id[other_j], first_lane + other);
#pragma unroll
          for (int j = 0; j < kPerLane; ++j)
            if (other + 32 * other_j < layout.lane + 32 * j && other_id == id[j])
              repeated[j] = true;
        }
    }
    count = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const bool valid = id[j] >= 0 && !repeated[j];
      const uint32_t votes = __ballot_sync(0xffffffffu, valid) & layout.group;
      row[j] = valid ? raw.row_base + id[j] : -1;
      number[j] = count + __popc(votes & ((1u << (threadIdx.x & 31)) - 1));
      count += __popc(votes);
    }
  }
};

} // namespace thresher::cuda
