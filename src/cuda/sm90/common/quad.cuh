// Transposes within the four lanes of a quad.
#pragma once

#include <cstdint>

namespace thresher::cuda::sm90 {

// Lane c of a quad ends with word c of lanes 0 .. 3.
__device__ __forceinline__ uint4 quad_transpose(const uint32_t (&mine)[4], int c) {
  uint32_t got[4];
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const int other = c ^ s;
    const uint32_t send = other == 0   ? mine[0]
                          : other == 1 ? mine[1]
                          : other == 2 ? mine[2]
                                       : mine[3];
    got[s] = __shfl_xor_sync(~0u, send, s); // from lane c ^ s
  }
  uint4 result;
  result.x = c == 0 ? got[0] : c == 1 ? got[1] : c == 2 ? got[2] : got[3];
  result.y = c == 0 ? got[1] : c == 1 ? got[0] : c == 2 ? got[3] : got[2];
  result.z = c == 0 ? got[2] : c == 1 ? got[3] : c == 2 ? got[0] : got[1];
  result.w = c == 0 ? got[3] : c == 1 ? got[2] : c == 2 ? got[1] : got[0];
  return result;
}

} // namespace thresher::cuda::sm90
