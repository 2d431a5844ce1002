// Validation of block_indices that came from outside.
#pragma once

#include "cuda/index/geometry.h"

#include <cuda_runtime_api.h>

namespace thresher::cuda {

struct BadEntry {
  int64_t place;   // (head * T + token) * K + slot; smaller = earlier
  int32_t id;      // what stands there
  int32_t visible; // blocks that the token sees
};

// Throws an Error that names the first (head, token, slot) whose id is out of range, of a later
// block, or twice in its row; padding is not looked at. Synchronises the stream. `scratch` is
// device memory.
void check_indices(const Geometry& geometry, const Shapes& shapes, const Tensor& block_indices,
                   BadEntry* scratch, cudaStream_t stream);

} // namespace thresher::cuda
