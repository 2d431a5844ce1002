// Where a 16-byte chunk of a row lies in a 128-byte swizzled tile.
#pragma once

#include <cstdint>

namespace thresher::cuda::sm90 {

// Tiles of 64-column halves, half_bytes apart; the tile starts at a multiple of 1,024 bytes.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk, int half_bytes) {
  return (chunk >> 3) * half_bytes + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

} // namespace thresher::cuda::sm90
