// Selection on the CPU: exact against the reference where scores are exact, and right in the sense
// of the contract (no left-out block beats a kept one by more than rounding) elsewhere.
#include <gtest/gtest.h>

#include "cpu_case.h"

namespace {

using namespace cpu_test;
using reference::Problem;

Problem make(int Hp, int Hpk, int Dp, int B, int K, int init, int local,
             std::vector<int64_t> documents, int64_t padding = 0) {
  Problem p;
  p.Hq = Hp, p.Hkv = 1, p.Hp = Hp, p.Hpk = Hpk, p.D = 1, p.Dp = Dp, p.B = B, p.K = K;
  p.init = init, p.local = local;
  for (int64_t length : documents)
    append_document(&p, length);
  p.T += padding;
  p.Tk += padding;
  fill_random(&p, static_cast<unsigned>(Hp * 7 + Dp + B * 3 + K));
  return p;
}

// Small integers: every product and sum is exact in every dtype, so ids must match exactly, ties
// (there are many) included.
void make_exact(Problem* p, unsigned seed) {
  std::mt19937 random(seed);
  for (std::vector<double>* x : {&p->q_proxy, &p->k_proxy})
    for (double& value : *x)
      value = static_cast<double>(static_cast<int>(random() % 5) - 2);
  p->proxy_scale = 0.5;
}

struct Extent {
  int Hp, Hpk, Dp, B, K, init, local;
};
class Selection : public testing::TestWithParam<Extent> {};

TEST_P(Selection, ExactWithTies) {
  const Extent e = GetParam();
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    Problem p = make(e.Hp, e.Hpk, e.Dp, e.B, e.K, e.init, e.local,
                     {0, 11 * e.B + 3, 1, 0, 4 * e.B, 7 * e.B - 1}, 4);
    make_exact(&p, 9);
    Case c(p, dtype);
    c.select();
    EXPECT_EQ(c.ids, reference::select(c.p));
  }
}

TEST_P(Selection, RandomWithinRounding) {
  const Extent e = GetParam();
  Case c(make(e.Hp, e.Hpk, e.Dp, e.B, e.K, e.init, e.local, {20 * e.B + 5, 3, 9 * e.B}, 2),
         DType::kFloat32);
  c.select();
  for (int h = 0; h < e.Hp; ++h)
    for (int64_t t = 0; t < c.p.T; ++t) {
      const std::vector<double> scores = reference::block_scores(c.p, t, h);
      const int32_t* ids = &c.ids[static_cast<size_t>((h * c.p.T + t) * e.K)];
      const int blocks = static_cast<int>(scores.size()), expected = std::min(blocks, e.K);
      std::vector<bool> kept(scores.size(), false);
      for (int s = 0; s < e.K; ++s) {
        if (s >= expected) {
          ASSERT_EQ(ids[s], -1);
          continue;
        }
        ASSERT_TRUE(ids[s] >= 0 && ids[s] < blocks && (s == 0 || ids[s] > ids[s - 1]));
        kept[static_cast<size_t>(ids[s])] = true;
      }
      double worst_kept = HUGE_VAL, best_left = -HUGE_VAL;
      for (int b = 0; b < blocks; ++b) {
        const bool forced = b < e.init || b >= blocks - e.local;
        const double score = scores[static_cast<size_t>(b)];
        if (forced) {
          ASSERT_TRUE(kept[static_cast<size_t>(b)]);
        } else if (kept[static_cast<size_t>(b)]) {
          worst_kept = std::min(worst_kept, score);
        } else {
          best_left = std::max(best_left, score);
        }
      }
      ASSERT_LE(best_left - worst_kept, 1e-5);
    }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Selection,
    testing::Values(Extent{2, 1, 64, 16, 4, 0, 1}, Extent{4, 2, 16, 8, 3, 1, 1},
                    Extent{3, 3, 7, 5, 4, 1, 2}, Extent{1, 1, 1, 1, 6, 2, 3},
                    Extent{2, 1, 32, 16, 4, 0, 0}, Extent{2, 2, 32, 16, 3, 1, 0},
                    Extent{8, 1, 128, 4, 2, 1, 1}, Extent{5, 1, 24, 32, 5, 0, 1},
                    Extent{1, 1, 16, 300, 2, 0, 1}, Extent{2, 1, 8, 16, 30, 0, 1},
                    Extent{200, 1, 8, 2, 3, 0, 1}),
    [](const auto& test) {
      const Extent& e = test.param;
      return name_of({{"p", e.Hp},
                      {"_pk", e.Hpk},
                      {"_Dp", e.Dp},
                      {"_B", e.B},
                      {"_K", e.K},
                      {"_i", e.init},
                      {"_l", e.local}});
    });

TEST(CpuSelect, AllEqualScoresKeepLowestIds) {
  Problem p = make(2, 1, 8, 4, 4, 0, 1, {100});
  std::fill(p.q_proxy.begin(), p.q_proxy.end(), 0.0);
  Case c(p, DType::kFloat32);
  c.select();
  const int32_t expected[] = {0, 1, 2, 24};
  for (int s = 0; s < 4; ++s)
    EXPECT_EQ(c.ids[static_cast<size_t>(99 * 4 + s)], expected[s]);
}

TEST(CpuSelect, NegativeAndPositiveZeroTie) {
  Problem p = make(1, 1, 1, 1, 2, 0, 1, {6});
  std::fill(p.q_proxy.begin(), p.q_proxy.end(), 1.0);
  p.k_proxy = {-1.0, -0.0, 0.0, -0.0, 0.0, 5.0};
  p.proxy_scale = 1;
  Case c(p, DType::kFloat32);
  c.select();
  EXPECT_EQ(c.ids[10], 1);
  EXPECT_EQ(c.ids[11], 5);
}

TEST(CpuSelect, NanAndInfinityAreRanked) {
  const double inf = HUGE_VAL, nan = std::nan("");
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    Problem p = make(1, 1, 1, 2, 4, 0, 1, {24});
    std::fill(p.q_proxy.begin(), p.q_proxy.end(), 1.0);
    p.proxy_scale = 1;
    //           0       1         2          3       4         5      6     7       8..11
    p.k_proxy = {1, nan, -inf, -inf, inf, 0, nan, inf, -9, -8, nan, nan,
                 3, 3,   -inf, 2,    0,   0, 0,   0,   0,  0,  0,   0};
    Case c(p, dtype);
    c.select();
    EXPECT_EQ(c.ids, reference::select(c.p));
    const std::vector<int32_t> last(c.ids.end() - 4, c.ids.end());
    EXPECT_EQ(last, (std::vector<int32_t>{2, 6, 7, 11}));
  }
}

TEST(CpuSelect, FewNumbersAmongNan) {
  Problem p = make(1, 1, 1, 1, 4, 0, 1, {9});
  std::fill(p.q_proxy.begin(), p.q_proxy.end(), 1.0);
  const double nan = std::nan("");
  p.k_proxy = {nan, nan, nan, -HUGE_VAL, nan, nan, 1, nan, nan};
  Case c(p, DType::kFloat32);
  c.select();
  const std::vector<int32_t> last(c.ids.end() - 4, c.ids.end());
  EXPECT_EQ(last, (std::vector<int32_t>{0, 3, 6, 8})); // NaN blocks tie: the lowest id
}

TEST(CpuSelect, NanOfOneTokenStaysInItsRow) {
  Problem p = make(2, 1, 16, 8, 3, 0, 1, {200});
  Case clean(p, DType::kFloat32);
  clean.select();
  p.q_proxy[static_cast<size_t>(150 * 2 * 16 + 3)] = std::nan("");
  Case c(p, DType::kFloat32);
  c.select();
  for (int h = 0; h < 2; ++h)
    for (int64_t t = 0; t < 200; ++t)
      for (int s = 0; s < 3; ++s) {
        const size_t i = static_cast<size_t>((h * 200 + t) * 3 + s);
        if (t != 150 || h != 0) {
          ASSERT_EQ(c.ids[i], clean.ids[i]);
        }
        ASSERT_GE(c.ids[i], -1);
      }
}

TEST(CpuSelect, NegativeScale) {
  Problem p = make(2, 1, 16, 8, 3, 0, 1, {100});
  make_exact(&p, 2);
  p.proxy_scale = -0.25;
  Case c(p, DType::kFloat32);
  c.select();
  EXPECT_EQ(c.ids, reference::select(c.p));
}

} // namespace
