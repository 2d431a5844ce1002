// Vectors of the instruction set that this file is compiled for, by the compiler's own extension.
#pragma once

#include <cstdint>

#ifndef THRESHER_ISA
#error "kernel files are compiled once per instruction set: define THRESHER_ISA"
#endif

namespace thresher::cpu::THRESHER_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
  using unsigned_type = uint32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
  using unsigned_type = uint64_t;
};
template <class T>
using Int = typename IntOf<T>::type;
template <class T>
using UInt = typename IntOf<T>::unsigned_type;

template <class T>
struct Simd {
  typedef T Vec __attribute__((vector_size(kVectorBytes)));
  typedef Int<T> IntVec __attribute__((vector_size(kVectorBytes)));
  typedef UInt<T> UIntVec __attribute__((vector_size(kVectorBytes)));
  static constexpr int lanes = kVectorBytes / static_cast<int>(sizeof(T));
};
template <class T>
using Vec = typename Simd<T>::Vec;
template <class T>
using IntVec = typename Simd<T>::IntVec;
template <class T>
using UIntVec = typename Simd<T>::UIntVec;
template <class T>
constexpr int kLanes = Simd<T>::lanes;

// Rows of packed tiles are padded to this many elements, so loops over vectors have no tail.
constexpr int kRowPad = 16;
constexpr int64_t round_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}

template <class T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
inline void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof v);
}
template <class T>
inline Vec<T> splat(T x) {
  return x - Vec<T>{};
}
template <class T>
inline IntVec<T> splat_int(Int<T> x) {
  return x - IntVec<T>{};
}
// Bit patterns are unsigned: sums of any two of them wrap around.
template <class T>
inline UIntVec<T> bits(Vec<T> v) {
  return (UIntVec<T>)v;
}
template <class T>
inline Vec<T> from_bits(UIntVec<T> v) {
  return (Vec<T>)v;
}

template <class T>
inline IntVec<T> iota() {
  IntVec<T> v{};
  for (int i = 0; i < kLanes<T>; ++i)
    v[i] = i;
  return v;
}
// Lanes below `count` keep v, the others get `other`.
template <class T>
inline Vec<T> keep_first(Vec<T> v, int64_t count, Vec<T> other) {
  return iota<T>() < splat_int<T>(static_cast<Int<T>>(count)) ? v : other;
}
// The numeric maximum; a NaN on the right is passed over.
template <class T>
inline Vec<T> vmax(Vec<T> a, Vec<T> b) {
  return b > a ? b : a;
}

template <class T>
inline T sum(Vec<T> v) {
  T parts[kLanes<T>];
  store<T>(parts, v);
  for (int step = kLanes<T> / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i)
      parts[i] += parts[i + step];
  return parts[0];
}
template <class T>
inline T max(Vec<T> v) {
  T parts[kLanes<T>];
  store<T>(parts, v);
  for (int step = kLanes<T> / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i)
      parts[i] = parts[i + step] > parts[i] ? parts[i + step] : parts[i];
  return parts[0];
}

template <class T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

} // namespace thresher::cpu::THRESHER_ISA
