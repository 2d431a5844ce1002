// Hopper sparse forward: WGMMA main kernel and combine, see docs/kernels/forward.md.
#pragma once

#include <thresher/params.h>

#include "core/shapes.h"

namespace thresher::cuda::sm90 {

// What it covers: bf16 and fp16, D 128, B 128, Dp 64 or 128, 4, 8 or 16 main heads on one (proxy
// head, kv head), nested head ratios.
bool forward_supported(const ForwardParams& params, const Shapes& shapes);
size_t forward_workspace_size(const ForwardParams& params, const Shapes& shapes);
void sparse_forward(const ForwardParams& params, const Shapes& shapes, const Workspace& workspace,
                    const Device& device);

} // namespace thresher::cuda::sm90
