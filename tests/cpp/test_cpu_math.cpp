// The kernels' exp, log and 16-bit conversions, compiled here for the baseline instruction set.
#define THRESHER_ISA isa_test
#include "cpu/kernels/half.h"
#include "cpu/kernels/math.h"

#include <gtest/gtest.h>

#include "cpu_case.h"

namespace {

namespace kernels = thresher::cpu::isa_test;

// Units in the last place between the kernel's result and the exact one.
template <class T>
double ulps(T got, long double right) {
  const T nearest = static_cast<T>(right);
  const T step =
      std::nextafter(std::fabs(nearest), std::numeric_limits<T>::infinity()) - std::fabs(nearest);
  return static_cast<double>(std::fabs(static_cast<long double>(got) - right) /
                             static_cast<long double>(step));
}

template <class T>
void check_exp(T low, T high, double bound) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<T> range(low, high);
  double worst = 0;
  for (int i = 0; i < 200000; ++i) {
    const T x = i % 2 ? range(random) : range(random) / 64;
    worst = std::max(worst, ulps<T>(kernels::exp1<T>(x), std::exp(static_cast<long double>(x))));
  }
  EXPECT_LE(worst, bound);
}

TEST(CpuMath, ExpIsAccurate) {
  check_exp<float>(-87, 88, 2);
  check_exp<double>(-707, 709, 2);
  EXPECT_EQ(kernels::exp1<float>(0), 1);
  EXPECT_EQ(kernels::exp1<double>(0), 1);
}

TEST(CpuMath, ExpAtTheEnds) {
  for (float x : {-88.0F, -1000.0F, -HUGE_VALF, std::numeric_limits<float>::lowest()})
    EXPECT_EQ(kernels::exp1<float>(x), 0) << x;
  for (double x : {-709.0, -1e300, -HUGE_VAL})
    EXPECT_EQ(kernels::exp1<double>(x), 0) << x;
  for (float x : {88.8F, 1e30F, HUGE_VALF})
    EXPECT_EQ(kernels::exp1<float>(x), HUGE_VALF) << x;
  for (double x : {709.9, 1e300, HUGE_VAL})
    EXPECT_EQ(kernels::exp1<double>(x), HUGE_VAL) << x;
  EXPECT_TRUE(std::isnan(kernels::exp1<float>(std::nanf(""))));
  EXPECT_TRUE(std::isnan(kernels::exp1<double>(std::nan(""))));
}

template <class T>
void check_log(double bound) {
  std::mt19937_64 random(2);
  std::uniform_real_distribution<T> exponent(std::numeric_limits<T>::min_exponent, 1);
  double worst = 0;
  for (int i = 0; i < 200000; ++i) {
    T x = std::exp2(exponent(random));
    if (i % 4 == 0)
      x = 1 + (x - static_cast<T>(0.5)) / 8; // near 1
    x = std::max(x, std::numeric_limits<T>::min());
    const long double right = std::log(static_cast<long double>(x));
    if (right != 0)
      worst = std::max(worst, ulps<T>(kernels::log1<T>(x), right));
  }
  EXPECT_LE(worst, bound);
  EXPECT_EQ(kernels::log1<T>(1), 0);
}

TEST(CpuMath, LogIsAccurate) {
  check_log<float>(3);
  check_log<double>(3);
}

TEST(CpuMath, EveryHalfConvertsThereAndBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const kernels::Float16 half{static_cast<uint16_t>(bits)};
    const double right = cpu_test::half_value(half.bits),
                 got = static_cast<double>(kernels::to_acc(half));
    kernels::Float16 back;
    kernels::from_acc(kernels::to_acc(half), &back);
    if (std::isnan(right)) {
      ASSERT_TRUE(std::isnan(got) && std::isnan(cpu_test::half_value(back.bits)));
    } else {
      ASSERT_EQ(got, right);
      ASSERT_EQ(back.bits, half.bits);
    }
  }
}

TEST(CpuMath, RoundingToHalf) {
  std::mt19937 random(3);
  for (int i = 0; i < 2000000; ++i) {
    const float x = kernels::float_of_bits(random());
    kernels::Float16 half;
    kernels::from_acc(x, &half);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(cpu_test::half_value(half.bits)));
    } else {
      ASSERT_EQ(half.bits, cpu_test::half_bits(static_cast<double>(x))) << x;
    }
  }
  for (float x :
       {65504.0F, 65519.9F, 65520.0F, 0x1p-24F, 0x1p-25F, 0x1.8p-25F, 0x1.ffcp-15F, 2049.0F}) {
    kernels::Float16 half;
    kernels::from_acc(x, &half);
    EXPECT_EQ(half.bits, cpu_test::half_bits(static_cast<double>(x))) << x;
  }
}

TEST(CpuMath, RoundingToBfloat) {
  std::mt19937 random(4);
  for (int i = 0; i < 1000000; ++i) {
    const float x = kernels::float_of_bits(random());
    kernels::BFloat16 b;
    kernels::from_acc(x, &b);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(kernels::to_acc(b)));
    } else {
      ASSERT_EQ(b.bits, cpu_test::bfloat_bits(static_cast<double>(x)));
    }
  }
}

} // namespace
