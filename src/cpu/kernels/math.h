// exp and log on vectors, to 1-2 units in the last place. NaN stays NaN.
#pragma once

#include "cpu/kernels/simd.h"

namespace thresher::cpu::THRESHER_ISA {

template <class T>
struct MathConstants;
template <>
struct MathConstants<float> {
  static constexpr int mantissa_bits = 23;
  static constexpr float round_magic = 0x1.8p23f; // x + magic - magic rounds x to an integer
  static constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f; // k * high is exact
  static constexpr float min_normal = 0x1p-126f;
  static constexpr float exp_low = -87.0f;  // below: 0, the results would be subnormal
  static constexpr float exp_high = 88.72f; // above: infinity
  static constexpr int exp_terms = 7, log_terms = 5;
  static constexpr uint32_t sqrt_half_bits = 0x3f3504f3;
};
template <>
struct MathConstants<double> {
  static constexpr int mantissa_bits = 52;
  static constexpr double round_magic = 0x1.8p52;
  static constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
  static constexpr double min_normal = 0x1p-1022;
  static constexpr double exp_low = -708.0;
  static constexpr double exp_high = 709.78;
  static constexpr int exp_terms = 13, log_terms = 11;
  static constexpr uint64_t sqrt_half_bits = 0x3fe6a09e667f3bcd;
};

template <class T>
struct TaylorOfExp {
  T coefficient[MathConstants<T>::exp_terms + 1]; // 1 / i!
  constexpr TaylorOfExp() : coefficient() {
    double factorial = 1;
    for (int i = 0; i <= MathConstants<T>::exp_terms; ++i) {
      coefficient[i] = static_cast<T>(1 / factorial);
      factorial *= i + 1;
    }
  }
};

// exp(x) = 2^k exp(r) with |r| <= ln(2)/2; exp(r) by its Taylor series, whose first omitted term is
// below half a unit in the last place.
template <class T>
inline Vec<T> exp(Vec<T> x) {
  using C = MathConstants<T>;
  const Vec<T> shifted = x * static_cast<T>(1.4426950408889634074) + C::round_magic;
  const Vec<T> k = shifted - C::round_magic;
  const Vec<T> r = (x - k * C::ln2_high) - k * C::ln2_low;
  constexpr TaylorOfExp<T> series;
  Vec<T> y = splat<T>(series.coefficient[C::exp_terms]);
#pragma GCC unroll 16
  for (int i = C::exp_terms - 1; i >= 0; --i)
    y = y * r + series.coefficient[i];
  // shifted holds k in its low mantissa bits; the shift drops the rest.
  y = from_bits<T>(bits<T>(y) + (bits<T>(shifted) << C::mantissa_bits));
  y = x > splat<T>(C::exp_high) ? splat<T>(kInfinity<T>) : y;
  return x < splat<T>(C::exp_low) ? Vec<T>{} : y;
}

// ln(x) of normal positive x = 2^e m with m in [sqrt(1/2), sqrt(2)): ln(m) = 2 artanh((m-1)/(m+1)).
template <class T>
inline Vec<T> log(Vec<T> x) {
  using C = MathConstants<T>;
  const IntVec<T> e_bits = (IntVec<T>)(bits<T>(x) - C::sqrt_half_bits) >> C::mantissa_bits;
  const Vec<T> m = from_bits<T>(bits<T>(x) - ((UIntVec<T>)e_bits << C::mantissa_bits));
  const Vec<T> e = __builtin_convertvector(e_bits, Vec<T>);
  const Vec<T> s = (m - 1) / (m + 1);
  const Vec<T> s2 = s * s;
  Vec<T> y = splat<T>(static_cast<T>(1) / static_cast<T>(2 * C::log_terms - 1));
#pragma GCC unroll 16
  for (int i = C::log_terms - 2; i >= 1; --i)
    y = y * s2 + static_cast<T>(1) / static_cast<T>(2 * i + 1);
  return e * C::ln2_high + ((2 * s) * (y * s2) + (e * C::ln2_low + 2 * s));
}

template <class T>
inline T log1(T x) {
  return log<T>(splat<T>(x))[0];
}
template <class T>
inline T exp1(T x) {
  return exp<T>(splat<T>(x))[0];
}

} // namespace thresher::cpu::THRESHER_ISA
