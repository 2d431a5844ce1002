// Tensor maps of the emulation, as src/cuda/sm90/common/tensor_map.h encodes them.
#pragma once

#include "machine.h"

namespace thresher::emulation {

// Contiguous [batches, rows / batches, heads, dim] of 16-bit values; boxes of 64 columns.
inline CUtensorMap make_map(const void* data, int64_t batches, int64_t rows, int heads, int dim,
                            int box_heads, int box_rows) {
  const Map map = {static_cast<const uint16_t*>(data),
                   {dim, heads, rows / batches, batches},
                   {1, dim, int64_t{heads} * dim, rows / batches * heads * dim},
                   {64, box_heads, box_rows}};
  CUtensorMap result;
  std::memcpy(static_cast<void*>(&result), &map, sizeof map);
  return result;
}

} // namespace thresher::emulation
