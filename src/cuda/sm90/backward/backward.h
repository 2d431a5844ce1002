// Hopper backward of main attention and proxy KL: WGMMA main kernel, see docs/kernels/backward.md.
#pragma once

#include <thresher/params.h>

#include "core/shapes.h"

#include <cuda_runtime_api.h>

namespace thresher::cuda::sm90 {

// What it covers: bf16 and fp16, D 128, B 128, Dp 64 or 128, 4, 8 or 16 main heads on one (proxy
// head, kv head), nested head ratios, main gradients wanted, not deterministic.
bool backward_supported(const BackwardParams& params, const Shapes& shapes);
size_t backward_workspace_size(const BackwardParams& params, const Shapes& shapes);
void sparse_backward(const BackwardParams& params, const Shapes& shapes, const Workspace& workspace,
                     const Device& device);

} // namespace thresher::cuda::sm90
