// Stands in for src/cuda/sm90/common/store.cuh where kernels are emulated.
#pragma once

#include "cuda/common/ptx.cuh"

namespace thresher::cuda::sm90 {

using emulation::machine;

inline void store_matrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  uint32_t all[32];
  machine().warp_exchange(address, all);
  const int lane = machine().thread_index().x & 31;
  for (int i = 0; i < 4; ++i)
    std::memcpy(machine().shared(all[8 * i + lane / 4]) + lane % 4 * 4, &r[i], 4);
}
inline void reduce_add(__half* address, const uint32_t (&pairs)[4]) {
  for (int i = 0; i < 4; ++i) {
    const float2 x = ptx::unpack<__half>(pairs[i]);
    address[2 * i] = __float2half_rn(static_cast<float>(address[2 * i]) + x.x);
    address[2 * i + 1] = __float2half_rn(static_cast<float>(address[2 * i + 1]) + x.y);
  }
}
inline void store_streaming(__half* address, const uint32_t (&pairs)[4]) {
  std::memcpy(static_cast<void*>(address), pairs, sizeof pairs);
}

} // namespace thresher::cuda::sm90
