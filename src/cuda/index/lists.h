// Second half of the index: the lists of entries and the work items, from block_indices.
#pragma once

#include "cuda/index/index.h"

namespace thresher::cuda {

// Fills slot_count, key_row, entries, segment_items, items and row_items.
void build_lists(const BlockIndex& index, const BlockIdsView<const int32_t>& block_ids,
                 cudaStream_t stream);

// Fills order.
void order_items(const BlockIndex& index, int32_t kv_group, int32_t proxy_kv_group,
                 cudaStream_t stream);

} // namespace thresher::cuda
