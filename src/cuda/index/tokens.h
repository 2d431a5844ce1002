// First half of the index: what each token and each block row is, from the fragments alone.
#pragma once

#include "cuda/index/index.h"

namespace thresher::cuda {

// Fills index.position, row_base and block_rows.
void describe_tokens(const BlockIndex& index, const Geometry& geometry, cudaStream_t stream);

} // namespace thresher::cuda
