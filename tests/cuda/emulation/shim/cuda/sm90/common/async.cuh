// Stands in for src/cuda/sm90/common/async.cuh where kernels are emulated.
#pragma once

#include "machine.h"

namespace thresher::cuda::sm90 {

using emulation::machine;

inline uint32_t shared_u32(const void* p) {
  return machine().shared_address(p);
}
inline void barrier_init(uint64_t& barrier, int arrivals) {
  machine().barrier_init(&barrier, arrivals);
}
inline void fence_barrier_init() {}
inline void fence_async_proxy() {}
inline void barrier_arrive(uint64_t& barrier) {
  machine().barrier_arrive(&barrier, 0);
}
inline void barrier_expect(uint64_t& barrier, int bytes) {
  machine().barrier_arrive(&barrier, bytes);
}
inline void barrier_arrive_after_copies(uint64_t& barrier) {
  machine().arrive_after_copies(&barrier);
}
inline void barrier_wait(uint64_t& barrier, uint32_t parity) {
  machine().barrier_wait(&barrier, parity);
}
inline void copy_box(uint32_t to_shared, const CUtensorMap* map, int column, int head, int row,
                     int batch, uint64_t& barrier) {
  machine().copy(to_shared, map, {column, head, row, batch}, &barrier);
}
template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

} // namespace thresher::cuda::sm90
