// Stands in for src/cuda/sm90/common/wgmma.cuh where kernels are emulated.
#pragma once

#include "cuda/common/dtype.h"
#include "machine.h"

namespace thresher::cuda::sm90 {

inline uint64_t plain_matrix(uint32_t address, uint32_t leading, uint32_t stride) {
  return uint64_t{address >> 4} | uint64_t{leading >> 4} << 16 | uint64_t{stride >> 4} << 32;
}
inline uint64_t shared_matrix(uint32_t address, uint32_t leading, uint32_t stride = 1024) {
  return plain_matrix(address, leading, stride) | uint64_t{1} << 62;
}
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
template <class T, int kTransA, int kTransB, int kCount>
void products_ss(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
  emulation::machine().product({d,
                                kCount,
                                {a, kTransA != 0},
                                {b, kTransB != 0},
                                false,
                                {},
                                accumulate != 0,
                                operand_value<T>});
}
// A lane's words: (row lane / 4, columns 2 (lane % 4) and the next), the same 8 rows down, then
// both 8 columns on.
template <class T, int kTransB, int kCount>
void products_rs(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  emulation::Product product = {
      d, kCount, {}, {b, kTransB != 0}, true, {}, accumulate != 0, operand_value<T>};
  const int quad = emulation::machine().thread_index().x & 28;
  for (int word = 0; word < 4; ++word) {
    uint32_t all[32];
    emulation::machine().warp_exchange(a[word], all);
    for (int i = 0; i < 4; ++i)
      std::memcpy(&product.rows[word & 1][(word >> 1) * 8 + 2 * i], &all[quad + i], 4);
  }
  emulation::machine().product(product);
}

} // namespace thresher::cuda::sm90
