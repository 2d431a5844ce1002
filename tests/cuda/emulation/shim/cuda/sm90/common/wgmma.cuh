// Stands in for src/cuda/sm90/common/wgmma.cuh where kernels are emulated: m64n128k16, both
// operands K-major in shared memory.
#pragma once

#include "cuda/common/dtype.h"
#include "machine.h"

namespace thresher::cuda::sm90 {

inline void wgmma_fence() {}
inline void wgmma_commit() {
  emulation::machine().commit();
}
template <int kPending>
void wgmma_wait() {
  emulation::machine().wait_products(kPending);
}
template <int kCount>
void keep(float (&)[kCount]) {}

template <class T>
float operand_value(uint16_t bits) {
  T value;
  static_assert(sizeof(T) == 2);
  std::memcpy(static_cast<void*>(&value), &bits, 2);
  return static_cast<float>(value);
}
template <class T, int kTransA, int kTransB>
void products_ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kTransA == 0 && kTransB == 0);
  emulation::machine().product({d, a, b, accumulate != 0, operand_value<T>});
}

} // namespace thresher::cuda::sm90
