// Forward, backward and KL on the CPU against the reference: head ratios, dtypes, layouts, ragged
// and shared documents, sparse and warm-up.
#include <gtest/gtest.h>

#include "cpu_case.h"

namespace {

using namespace cpu_test;
using reference::Problem;

struct Heads {
  int Hq, Hkv, Hp, Hpk;
};

Problem problem_of(Heads heads, int D, int Dp, int B, int K, std::vector<int64_t> documents,
                   int64_t padding = 0) {
  Problem p;
  p.Hq = heads.Hq, p.Hkv = heads.Hkv, p.Hp = heads.Hp, p.Hpk = heads.Hpk;
  p.D = D, p.Dp = Dp, p.B = B, p.K = K;
  for (int64_t length : documents)
    append_document(&p, length);
  p.T += padding;
  p.Tk += padding;
  fill_random(&p, static_cast<unsigned>(heads.Hq * 131 + D * 17 + B + K));
  return p;
}

void expect_close(const char* name, const Array& got, const std::vector<double>& right,
                  double bound) {
  EXPECT_LE(reference::relative_error(got.values(), right), bound) << name;
  EXPECT_TRUE(got.gaps_untouched()) << name;
}

// Runs everything and compares; ids are taken from the case. The bounds hold for results that are
// computed from lse (gradients, kl) if lse itself is exact to `lse_error`.
void check_attention(Case& c, bool sparse, double lse_error = 0) {
  SCOPED_TRACE(sparse ? "sparse" : "warm-up");
  const reference::Results right = reference::attend(c.p, sparse ? &c.ids : nullptr);
  Tolerance bound = tolerance(c.dtype);
  const Tolerance exact = tolerance(c.acc);
  bound.backward += lse_error;
  for (Array* a :
       {&c.out, &c.lse, &c.proxy_lse, &c.kl, &c.dq, &c.dk, &c.dv, &c.dq_proxy, &c.dk_proxy})
    a->poison();
  c.forward(sparse);
  expect_close("out", c.out, right.out, bound.forward);
  expect_close("lse", c.lse, right.lse, exact.forward);
  expect_close("proxy_lse", c.proxy_lse, right.proxy_lse, exact.forward);
  c.proxy_kl(sparse);
  expect_close("kl alone", c.kl, right.kl, exact.forward + lse_error);
  c.kl.poison();
  c.backward(sparse);
  expect_close("kl", c.kl, right.kl, exact.forward + lse_error);
  expect_close("dq", c.dq, right.dq, bound.backward);
  expect_close("dk", c.dk, right.dk, bound.backward);
  expect_close("dv", c.dv, right.dv, bound.backward);
  expect_close("dq_proxy", c.dq_proxy, right.dq_proxy, bound.backward);
  expect_close("dk_proxy", c.dk_proxy, right.dk_proxy, bound.backward);
}

void check_both(Case& c) {
  c.ids = reference::select(c.p);
  check_attention(c, true);
  check_attention(c, false);
}

class HeadRatios : public testing::TestWithParam<Heads> {};

TEST_P(HeadRatios, MatchReferenceInFp32AndFp64) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    Case c(problem_of(GetParam(), 16, 8, 16, 3, {70, 33, 1, 16}), dtype);
    check_both(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, HeadRatios,
                         testing::Values(Heads{8, 2, 2, 1}, Heads{16, 2, 4, 1}, Heads{64, 4, 4, 1},
                                         Heads{12, 2, 2, 1}, Heads{8, 4, 2, 1}, Heads{8, 2, 4, 2},
                                         Heads{4, 4, 4, 4}, Heads{6, 1, 1, 1}, Heads{12, 6, 4, 2},
                                         Heads{12, 6, 4, 4}, Heads{12, 4, 6, 3}, Heads{6, 6, 1, 1},
                                         Heads{5, 5, 5, 1}, Heads{1, 1, 1, 1}),
                         [](const auto& test) {
                           const Heads& h = test.param;
                           return name_of(
                               {{"q", h.Hq}, {"_kv", h.Hkv}, {"_p", h.Hp}, {"_pk", h.Hpk}});
                         });

struct Extent {
  int D, Dp, B, K;
};
class Extents : public testing::TestWithParam<Extent> {};

TEST_P(Extents, MatchReference) {
  const Extent e = GetParam();
  Case c(problem_of({4, 2, 2, 1}, e.D, e.Dp, e.B, e.K, {2 * e.B + 3, 5 * e.B, e.B + 1}),
         DType::kFloat32);
  check_both(c);
}

INSTANTIATE_TEST_SUITE_P(Sizes, Extents,
                         testing::Values(Extent{64, 64, 128, 2}, Extent{128, 64, 64, 3},
                                         Extent{64, 128, 64, 3}, Extent{1, 1, 16, 2},
                                         Extent{3, 5, 7, 3}, Extent{17, 33, 1, 4},
                                         Extent{80, 16, 48, 4}, Extent{256, 32, 32, 2},
                                         Extent{8, 8, 300, 2}, Extent{16, 16, 16, 40}),
                         [](const auto& test) {
                           const Extent& e = test.param;
                           return name_of({{"D", e.D}, {"_Dp", e.Dp}, {"_B", e.B}, {"_K", e.K}});
                         });

class DTypes : public testing::TestWithParam<DType> {};

TEST_P(DTypes, EveryLayout) {
  for (Layout layout : {Layout::kPacked, Layout::kGaps, Layout::kHeadMajor}) {
    Case c(problem_of({8, 2, 2, 1}, 32, 16, 32, 3, {100, 64, 7}, 5), GetParam(), layout);
    check_both(c);
  }
}

INSTANTIATE_TEST_SUITE_P(All, DTypes,
                         testing::Values(DType::kFloat32, DType::kFloat64, DType::kBFloat16,
                                         DType::kFloat16),
                         [](const auto& test) { return dtype_name(test.param); });

TEST(CpuAttention, DocumentLengths) {
  for (std::vector<int64_t> documents : {std::vector<int64_t>{0, 1, 2, 127, 128, 129},
                                         {0, 0, 0, 5, 0, 0},
                                         {0, 0},
                                         {300},
                                         {1, 1, 1, 1}}) {
    Case c(problem_of({4, 2, 2, 1}, 16, 16, 128, 2, documents, 3), DType::kFloat32);
    check_both(c);
  }
}

// Context parallelism: several fragments of one document, in any order, with one stored key prefix.
TEST(CpuAttention, FragmentsShareKeys) {
  Problem p;
  p.Hq = 4, p.Hkv = 2, p.Hp = 2, p.Hpk = 1, p.D = 16, p.Dp = 8, p.B = 16, p.K = 3;
  p.q_begin = {0, 30, 50, 50, 75, 80, 90};
  p.k_begin = {10, 10, 10, 120, 10, 140};
  p.k_len = {110, 35, 60, 20, 41, 33};
  p.T = 93;
  p.Tk = 180;
  fill_random(&p, 5);
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    Case c(p, dtype);
    check_both(c);
  }
}

// Fewer keys than queries: the first queries see nothing.
TEST(CpuAttention, RowsWithoutAnyKey) {
  Problem p;
  p.Hq = 4, p.Hkv = 1, p.Hp = 2, p.Hpk = 1, p.D = 16, p.Dp = 8, p.B = 4, p.K = 3;
  p.q_begin = {0, 76, 110, 256};
  p.k_begin = {0, 1, 2};
  p.k_len = {1, 1, 1};
  p.T = 256;
  p.Tk = 5;
  fill_random(&p, 6);
  Case c(p, DType::kFloat64);
  check_both(c);
  EXPECT_EQ(c.lse.values()[0], -HUGE_VAL);
  EXPECT_EQ(c.proxy_lse.values()[0], -HUGE_VAL);
  EXPECT_EQ(c.out.values()[0], 0);
}

TEST(CpuAttention, DocumentsWithKeysButNoQueries) {
  Problem p;
  p.Hq = 4, p.Hkv = 2, p.Hp = 2, p.Hpk = 1, p.D = 16, p.Dp = 8, p.B = 32, p.K = 2;
  p.q_begin = {0, 0, 120, 204, 204};
  p.k_begin = {0, 254, 428, 512};
  p.k_len = {254, 174, 84, 307};
  p.T = 204;
  p.Tk = 819;
  fill_random(&p, 7);
  Case c(p, DType::kFloat32);
  check_both(c);
  const std::vector<double> dk = c.dk.values();
  for (int64_t i = 0; i < 254 * p.Hkv * p.D; ++i)
    ASSERT_EQ(dk[static_cast<size_t>(i)], 0);
}

// One block that every token chose: its list is cut into chunks with partial key gradients.
TEST(CpuAttention, OneBlockChosenByAll) {
  Case c(problem_of({2, 1, 1, 1}, 16, 16, 16, 2, {1500}), DType::kFloat32);
  for (int64_t t = 0; t < c.p.T; ++t) {
    c.ids[static_cast<size_t>(2 * t)] = 0;
    c.ids[static_cast<size_t>(2 * t + 1)] = -1;
  }
  check_attention(c, true);
}

// The selection of somebody else: any order, holes, empty rows.
TEST(CpuAttention, ForeignIndices) {
  Case c(problem_of({8, 4, 4, 2}, 16, 16, 16, 4, {200, 90}), DType::kFloat64);
  c.ids = reference::select(c.p);
  std::mt19937 random(3);
  for (int64_t row = 0; row < c.p.Hp * c.p.T; ++row) {
    auto begin = c.ids.begin() + static_cast<std::ptrdiff_t>(row * c.p.K);
    std::shuffle(begin, begin + c.p.K, random);
    if (row % 3 == 0)
      *begin = -1;
    if (row % 17 == 0)
      std::fill_n(begin, c.p.K, -1);
  }
  check_attention(c, true);
}

TEST(CpuAttention, LargeLogits) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    Problem p = problem_of({4, 2, 2, 1}, 16, 16, 16, 3, {100});
    // Small integers, so that scores near 30,000 are exact in fp32 too.
    std::mt19937 random(4);
    for (std::vector<double>* x : {&p.q, &p.k, &p.q_proxy, &p.k_proxy})
      for (double& value : *x)
        value = static_cast<double>(static_cast<int>(random() % 7) - 3);
    p.scale = p.proxy_scale = 256; // scores up to 256 * 9 * 16 = 36,864
    Case c(p, dtype);
    c.ids = reference::select(c.p);
    // lse is kept in the accumulation type: between 2^14 and 2^16 half a unit of fp32 is up to
    // 2^-9.
    const double lse_error = dtype == DType::kFloat32 ? 0x1p-9 : 0;
    check_attention(c, true, lse_error);
    check_attention(c, false, lse_error);
  }
}

TEST(CpuAttention, EqualLogitsAndZeroInputs) {
  Problem p = problem_of({4, 2, 2, 1}, 16, 16, 16, 3, {100});
  for (std::vector<double>* x : {&p.q, &p.q_proxy})
    std::fill(x->begin(), x->end(), 0.0);
  Case c(p, DType::kFloat32);
  check_both(c);
}

// Batched tensors [N, S, H, D]: the same data under a fourth dimension.
TEST(CpuAttention, BatchedEqualsPacked) {
  Case c(problem_of({4, 2, 2, 1}, 16, 8, 16, 3, {90, 90, 90}), DType::kFloat32);
  c.select();
  c.forward(true);
  c.backward(true);
  const std::vector<int32_t> ids = c.ids;
  const std::vector<char> out = c.out.bytes(), dq = c.dq.bytes(), dk = c.dk.bytes(),
                          kl = c.kl.bytes();
  auto batched = [&](thresher::Tensor t) {
    if (!t)
      return t;
    for (int i = t.rank; i > 1; --i)
      t.shape[i] = t.shape[i - 1], t.stride[i] = t.stride[i - 1];
    t.rank += 1;
    t.shape[0] = 3, t.shape[1] = 90;
    t.stride[1] = t.stride[0], t.stride[0] = 90 * t.stride[1];
    return t;
  };
  // block_indices become [N, Hp, S, K].
  std::vector<int32_t> batched_ids(ids.size());
  thresher::Tensor indices = c.indices();
  indices.rank = 4;
  indices.data = batched_ids.data();
  const int64_t shape[4] = {3, 2, 90, 3}, stride[4] = {540, 270, 3, 1};
  std::copy_n(shape, 4, indices.shape);
  std::copy_n(stride, 4, indices.stride);
  c.problem.fragments = {};
  thresher::SelectParams select = c.select_params();
  select.q_proxy = batched(select.q_proxy), select.k_proxy = batched(select.k_proxy);
  select.block_indices = indices;
  Case::call(select, thresher::select_blocks_workspace_size, thresher::select_blocks);
  for (int64_t n = 0; n < 3; ++n)
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < 270; ++i)
        ASSERT_EQ(batched_ids[static_cast<size_t>(n * 540 + h * 270 + i)],
                  ids[static_cast<size_t>(h * 810 + n * 270 + i)]);
  thresher::BackwardParams b = c.backward_params(true);
  for (thresher::Tensor* t :
       {&b.q, &b.k, &b.v, &b.q_proxy, &b.k_proxy, &b.out, &b.lse, &b.proxy_lse, &b.dout, &b.dkl,
        &b.dq, &b.dk, &b.dv, &b.dq_proxy, &b.dk_proxy, &b.kl})
    *t = batched(*t);
  b.block_indices = indices;
  thresher::ForwardParams f{c.problem, b.q,     b.k,   b.v,   b.q_proxy,
                            b.k_proxy, indices, b.out, b.lse, b.proxy_lse};
  for (Array* a : {&c.out, &c.dq, &c.dk, &c.kl})
    a->poison();
  Case::call(f, thresher::sparse_forward_workspace_size, thresher::sparse_forward);
  Case::call(b, thresher::sparse_backward_workspace_size, thresher::sparse_backward);
  EXPECT_EQ(out, c.out.bytes());
  EXPECT_EQ(dq, c.dq.bytes());
  EXPECT_EQ(dk, c.dk.bytes());
  EXPECT_EQ(kl, c.kl.bytes());
}

} // namespace
