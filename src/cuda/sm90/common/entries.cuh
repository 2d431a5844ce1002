// A work item's list, 32 entries at a time, one a lane of the producer warp.
#pragma once

#include "cuda/index/index.h"

namespace thresher::cuda::sm90 {

struct EntryChunk {
  int32_t token; // -1: past the end of the list
  int32_t slot;
  int32_t last_key; // last visible key of the block; -1: none
};

__device__ __forceinline__ EntryChunk fetch_chunk(const BlockIndex& index, const WorkItem& item,
                                                  int first) {
  const int e = first + (threadIdx.x & 31);
  EntryChunk chunk = {-1, 0, -1};
  if (e < item.entry_count) {
    const Entry entry = __ldg(index.item_entries(item) + e);
    chunk.token = index.entry_token(item, entry);
    chunk.slot = BlockIndex::entry_slot(entry);
    chunk.last_key =
        min(__ldg(index.position + chunk.token) - item.block_begin, item.key_count - 1);
  }
  return chunk;
}

// TMA coordinates of a row: (row within its batch row, batch row).
__device__ __forceinline__ int2 split_row(int row, int rows) {
  const int batch = row / rows;
  return {row - batch * rows, batch};
}

} // namespace thresher::cuda::sm90
