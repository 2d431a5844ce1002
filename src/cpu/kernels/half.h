// The 16-bit floating point types in memory, and rows of any input type to and from the
// accumulation type. Written on bits, so that loops over rows vectorise on every instruction set.
#pragma once

#include "cpu/kernels/simd.h"

namespace thresher::cpu::THRESHER_ISA {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class T>
struct AccumulateOf {
  using type = float;
};
template <>
struct AccumulateOf<double> {
  using type = double;
};
template <class In>
using Acc = typename AccumulateOf<In>::type;

inline float float_of_bits(uint32_t u) {
  return __builtin_bit_cast(float, u);
}
inline uint32_t bits_of_float(float f) {
  return __builtin_bit_cast(uint32_t, f);
}

inline double to_acc(double x) {
  return x;
}
inline float to_acc(float x) {
  return x;
}
inline float to_acc(BFloat16 x) {
  return float_of_bits(static_cast<uint32_t>(x.bits) << 16);
}
inline float to_acc(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const float normal = float_of_bits((magnitude << 13) + (112u << 23));
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const float special = float_of_bits((magnitude << 13) | 0x7f800000u);
  const float value = magnitude >= 0x7c00u ? special : magnitude < 0x400u ? subnormal : normal;
  return float_of_bits(bits_of_float(value) | (static_cast<uint32_t>(x.bits & 0x8000u) << 16));
}

// Round to nearest, ties to even; NaN stays NaN.
inline void from_acc(double x, double* to) {
  *to = x;
}
inline void from_acc(float x, float* to) {
  *to = x;
}
inline void from_acc(float x, BFloat16* to) {
  const uint32_t u = bits_of_float(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;
  to->bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}
inline void from_acc(float x, Float16* to) {
  const uint32_t u = bits_of_float(x) & 0x7fffffffu;
  const uint32_t normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
  // Adding 1/2 leaves the subnormal half in the low mantissa bits, rounded by the addition.
  const uint32_t subnormal = bits_of_float(float_of_bits(u) + 0.5f) - 0x3f000000u;
  uint32_t half = u < 0x38800000u ? subnormal : normal;
  half = u >= 0x47800000u ? 0x7c00u : half;
  half = u > 0x7f800000u ? 0x7e00u : half;
  to->bits = static_cast<uint16_t>(half | ((bits_of_float(x) >> 16) & 0x8000u));
}

// to[0 .. dim) = scale * from, to[dim .. padded) = 0.
template <class In>
inline void load_row(Acc<In>* __restrict to, const In* __restrict from, int dim, int padded,
                     Acc<In> scale) {
  for (int i = 0; i < dim; ++i)
    to[i] = to_acc(from[i]) * scale;
  for (int i = dim; i < padded; ++i)
    to[i] = 0;
}
template <class In>
inline void load_row(Acc<In>* __restrict to, const In* __restrict from, int dim, int padded) {
  for (int i = 0; i < dim; ++i)
    to[i] = to_acc(from[i]);
  for (int i = dim; i < padded; ++i)
    to[i] = 0;
}
template <class In>
inline void store_row(In* __restrict to, const Acc<In>* __restrict from, int dim) {
  for (int i = 0; i < dim; ++i)
    from_acc(from[i], &to[i]);
}

} // namespace thresher::cpu::THRESHER_ISA
