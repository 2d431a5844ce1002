// Checks of every public operation: shapes, dtypes, strides, head ratios, fragments. They throw an
// Error that names the argument, its value and what is supported, before anything is written.
#pragma once

#include <thresher/error.h>
#include <thresher/params.h>

#include "core/shapes.h"

namespace thresher {

enum class Keys { kSelected, kVisible }; // with block_indices, or over all visible keys

Shapes check(const SelectParams& params, const Device& device);
Shapes check(const ForwardParams& params, const Device& device, Keys keys);
Shapes check(const BackwardParams& params, const Device& device, Keys keys);
Shapes check(const KlParams& params, const Device& device);
// Only what check_block_indices uses of the params: problem, q, k, block_indices.
Shapes check_for_indices(const ForwardParams& params, const Device& device);

void check_workspace(const Workspace& workspace, size_t needed);

} // namespace thresher
