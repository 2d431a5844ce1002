// The Hopper selection, as tests and measurements reach it.
#pragma once

#include "cuda/kernel.h"

namespace thresher::cuda::sm90 {

// splits: pieces that a tile's keys are cut into; 0: chosen from shapes and device.
size_t select_workspace_size(const SelectParams& params, const Shapes& shapes, int splits);
void run_select(const SelectParams& params, const Shapes& shapes, const Workspace& workspace,
                int splits, cudaStream_t stream);

} // namespace thresher::cuda::sm90
