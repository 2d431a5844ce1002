// Stands in for src/cuda/common/ptx.cuh where kernels are emulated.
#pragma once

#include "machine.h"

namespace thresher::cuda::ptx {

inline void wait_for_predecessor() {}
inline float exp2(float x) {
  return std::exp2(x);
}
inline void barrier_sync(int id, int threads) {
  emulation::machine().named_sync(id, threads);
}
inline void copy_async_16(uint32_t to_shared, const void* from, bool valid) {
  emulation::machine().copy_async(to_shared, from, 16, valid);
}
inline void copy_async_4(uint32_t to_shared, const void* from, bool valid) {
  emulation::machine().copy_async(to_shared, from, 4, valid);
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  uint32_t rows[32];
  emulation::machine().warp_exchange(address, rows);
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; ++i)
    r[i] = emulation::machine().load_word(rows[8 * i + lane / 4] +
                                          static_cast<uint32_t>(lane % 4 * 4));
}

} // namespace thresher::cuda::ptx
