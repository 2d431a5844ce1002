// Validation of block_indices that came from outside.
#pragma once

#include "cpu/geometry.h"
#include "cpu/threads.h"

namespace thresher::cpu {

// Throws an Error that names the first (head, token, slot) whose id is out of range, of a later
// block, or twice in its row.
void check_indices(const Threads& threads, const Geometry& geometry, const View& indices,
                   const Shapes& shapes);

} // namespace thresher::cpu
