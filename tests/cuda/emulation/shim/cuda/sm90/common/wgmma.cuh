// Stands in for src/cuda/sm90/common/wgmma.cuh where kernels are emulated: K-major operands, A also
// in registers.
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
  emulation::machine().product({d, 64, a, b, accumulate != 0, operand_value<T>});
}
template <class T, int kTransB, int kCount>
void products_rs(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  static_assert(kTransB == 0);
  emulation::Product product = {d, kCount, 0, b, accumulate != 0, operand_value<T>, true};
  const int quad = threadIdx.x & 28;
  for (int i = 0; i < 4; ++i) {
    uint32_t words[32];
    emulation::machine().warp_exchange(a[i], words);
    std::memcpy(product.rows[i % 2] + i / 2 * 8, words + quad, 16);
  }
  emulation::machine().product(product);
}

inline uint64_t shared_matrix(uint32_t address, uint32_t leading, uint32_t stride = 1024) {
  return static_cast<uint64_t>(address >> 4 & 0x3fff) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | uint64_t{1} << 62;
}

} // namespace thresher::cuda::sm90
