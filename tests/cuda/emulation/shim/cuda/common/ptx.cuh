// Stands in for src/cuda/common/ptx.cuh where kernels are emulated.
#pragma once

#include "cuda/common/dtype.h"
#include "machine.h"

namespace thresher::cuda::ptx {

using emulation::machine;

inline void wait_for_predecessor() {}
inline void barrier_sync(int id, int threads) {
  machine().named_sync(id, threads);
}
inline int32_t load_acquire(const int32_t* address) {
  machine().give_way();
  return *address;
}
inline void store_release(int32_t* address, int32_t value) {
  *address = value;
}
inline void copy_async_16(uint32_t to, const void* from, bool valid) {
  machine().copy_async(to, from, 16, valid);
}
inline void copy_async_4(uint32_t to, const void* from, bool valid) {
  machine().copy_async(to, from, 4, valid);
}

inline float exp2(float x) {
  return std::exp2(x);
}
template <class T>
uint16_t bits(float x) {
  T value;
  if constexpr (std::is_same_v<T, bf16>)
    value = __float2bfloat16_rn(x);
  else
    value = __float2half_rn(x);
  uint16_t result;
  std::memcpy(&result, &value, 2);
  return result;
}
template <class T>
uint32_t pack(float low, float high) {
  return bits<T>(low) | static_cast<uint32_t>(bits<T>(high)) << 16;
}
template <class T>
float2 unpack(uint32_t pair) {
  T values[2];
  std::memcpy(static_cast<void*>(values), &pair, 4);
  return {static_cast<float>(values[0]), static_cast<float>(values[1])};
}

// Lane l gets of matrix i elements 2 (l % 4) and the next of row l / 4.
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  uint32_t all[32];
  machine().warp_exchange(address, all);
  const int lane = machine().thread_index().x & 31;
  for (int i = 0; i < 4; ++i)
    std::memcpy(&r[i], machine().shared(all[8 * i + lane / 4]) + lane % 4 * 4, 4);
}
// Lane l gets of matrix i, transposed, elements 2 (l % 4) and the next of column l / 4.
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  uint32_t all[32];
  machine().warp_exchange(address, all);
  const int lane = machine().thread_index().x & 31;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e)
      std::memcpy(&pair[e], machine().shared(all[8 * i + 2 * (lane % 4) + e]) + lane / 4 * 2, 2);
    std::memcpy(&r[i], pair, 4);
  }
  machine().warp_exchange(0, all);
}

inline void reduce_add(float* address, float4 v) {
  address[0] += v.x, address[1] += v.y, address[2] += v.z, address[3] += v.w;
}

} // namespace thresher::cuda::ptx
