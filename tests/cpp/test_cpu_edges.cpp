// What must not happen on the CPU: NaN spreading, padding read, work for absent gradients changing
// others, results that depend on threads or neighbours, bad indices accepted.
#include <gtest/gtest.h>
#include <omp.h>
#include <sys/mman.h>

#include "cpu_case.h"

namespace {

using namespace cpu_test;
using reference::Problem;

Problem make(std::vector<int64_t> documents, int64_t padding = 0, int D = 16, int B = 16,
             int K = 3) {
  Problem p;
  p.Hq = 8, p.Hkv = 2, p.Hp = 2, p.Hpk = 1, p.D = D, p.Dp = D, p.B = B, p.K = K;
  for (int64_t length : documents)
    append_document(&p, length);
  p.T += padding;
  p.Tk += padding;
  fill_random(&p, 11);
  return p;
}

void run(Case& c, bool sparse) {
  c.forward(sparse);
  c.backward(sparse);
}

struct Snapshot {
  std::vector<double> out, lse, proxy_lse, kl, dq, dk, dv, dq_proxy, dk_proxy;
  explicit Snapshot(const Case& c)
      : out(c.out.values()), lse(c.lse.values()), proxy_lse(c.proxy_lse.values()),
        kl(c.kl.values()), dq(c.dq.values()), dk(c.dk.values()), dv(c.dv.values()),
        dq_proxy(c.dq_proxy.values()), dk_proxy(c.dk_proxy.values()) {}
};

class BothModes : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(All, BothModes, testing::Bool(),
                         [](const auto& test) { return test.param ? "sparse" : "warmup"; });

TEST_P(BothModes, PaddingIsNeverReadAndIsZero) {
  Problem p = make({50, 30}, 7);
  const double nan = std::nan("");
  auto poison = [&](std::vector<double>& x, int64_t rows) {
    const size_t per_row = x.size() / static_cast<size_t>(rows);
    std::fill(x.end() - static_cast<std::ptrdiff_t>(7 * per_row), x.end(), nan);
  };
  Case clean(p, DType::kFloat32);
  for (std::vector<double>* x : {&p.q, &p.k, &p.v, &p.q_proxy, &p.k_proxy, &p.dout, &p.dkl})
    poison(*x, p.T);
  Case c(p, DType::kFloat32);
  if (GetParam())
    clean.select(), c.select();
  run(clean, GetParam());
  run(c, GetParam());
  const Snapshot a(clean), b(c);
  EXPECT_EQ(a.out, b.out);
  EXPECT_EQ(a.lse, b.lse);
  EXPECT_EQ(a.dk, b.dk);
  EXPECT_EQ(a.dk_proxy, b.dk_proxy);
  EXPECT_EQ(a.kl, b.kl);
  for (int64_t t = 80; t < 87; ++t) {
    for (int i = 0; i < 8 * 16; ++i) {
      EXPECT_EQ(b.out[static_cast<size_t>(t * 128 + i)], 0);
      EXPECT_EQ(b.dq[static_cast<size_t>(t * 128 + i)], 0);
    }
    for (int i = 0; i < 2 * 16; ++i) {
      EXPECT_EQ(b.dk[static_cast<size_t>(t * 32 + i)], 0);
      EXPECT_EQ(b.dv[static_cast<size_t>(t * 32 + i)], 0);
      EXPECT_EQ(b.dq_proxy[static_cast<size_t>(t * 32 + i)], 0);
    }
    EXPECT_EQ(b.lse[static_cast<size_t>(t * 8)], -HUGE_VAL);
    EXPECT_EQ(b.proxy_lse[static_cast<size_t>(t * 2)], -HUGE_VAL);
    EXPECT_EQ(b.kl[static_cast<size_t>(t * 2)], 0);
  }
  if (GetParam()) {
    for (int h = 0; h < 2; ++h)
      for (int i = 80 * 3; i < 87 * 3; ++i)
        EXPECT_EQ(c.ids[static_cast<size_t>(h * 87 * 3 + i)], -1);
  }
}

TEST_P(BothModes, KeysThatNobodyReadsGetZeros) {
  Problem p = make({40});
  p.k_begin[0] = 5;
  p.Tk = 60; // rows 0..4 and 45..59 belong to nobody
  fill_random(&p, 3);
  Case c(p, DType::kFloat32);
  c.select();
  if (GetParam())
    for (int32_t& id : c.ids)
      if (id == 1)
        id = -1; // block 1: positions 16..31
  run(c, GetParam());
  const Snapshot s(c);
  for (int64_t row = 0; row < 60; ++row) {
    const bool read = row >= 5 && row < 45 && !(GetParam() && row >= 21 && row < 37);
    for (int i = 0; i < 32; ++i) {
      const size_t at = static_cast<size_t>(row * 32 + i);
      EXPECT_EQ(s.dk[at] != 0, read) << row;
      EXPECT_EQ(s.dv[at] != 0, read) << row;
    }
    EXPECT_EQ(s.dk_proxy[static_cast<size_t>(row * 16)] != 0, read) << row;
  }
}

// Puts NaN or infinity into one token's row of one input at a time. Rows that do not read it keep
// their bits, in every result.
TEST_P(BothModes, NanStaysInTheRowsThatReadIt) {
  const bool sparse = GetParam();
  const Problem base = make({90, 40});
  Case clean(base, DType::kFloat32);
  clean.select();
  run(clean, sparse);
  const Snapshot a(clean);
  const int64_t bad = 37; // in block 2 of the first document, in the middle of it
  auto sees = [&](int64_t query, int head, int64_t key) {
    if (query >= 90 || key > query)
      return false;
    if (!sparse)
      return true;
    for (int s = 0; s < base.K; ++s)
      if (clean.ids[static_cast<size_t>((head * base.T + query) * base.K + s)] == key / base.B)
        return true;
    return false;
  };
  // The rows that one bad input may change: by the queries that read the token's keys, or by the
  // keys that the token's query reads.
  for (const char* what : {"q", "k", "v", "q_proxy", "k_proxy", "dout", "dkl"})
    for (double value : {std::nan(""), HUGE_VAL}) {
      SCOPED_TRACE(what);
      Problem p = base;
      const std::string name = what;
      std::vector<double>& x = name == "q"         ? p.q
                               : name == "k"       ? p.k
                               : name == "v"       ? p.v
                               : name == "q_proxy" ? p.q_proxy
                               : name == "k_proxy" ? p.k_proxy
                               : name == "dout"    ? p.dout
                                                   : p.dkl;
      const size_t per_row = x.size() / static_cast<size_t>(p.T);
      for (size_t i = 0; i < per_row; ++i)
        x[static_cast<size_t>(bad) * per_row + i] = value;
      Case c(p, DType::kFloat32);
      c.ids = clean.ids;
      run(c, sparse);
      const Snapshot b(c);
      const bool key_side = name == "k" || name == "v" || name == "k_proxy";
      for (int64_t t = 0; t < p.T; ++t)
        for (int ph = 0; ph < 2; ++ph) {
          const bool query_clean = key_side ? !sees(t, ph, bad) : t != bad;
          for (int h = 4 * ph; query_clean && h < 4 * ph + 4; ++h) {
            for (int d = 0; d < 16; ++d) {
              ASSERT_EQ(a.out[static_cast<size_t>((t * 8 + h) * 16 + d)],
                        b.out[static_cast<size_t>((t * 8 + h) * 16 + d)]);
              ASSERT_EQ(a.dq[static_cast<size_t>((t * 8 + h) * 16 + d)],
                        b.dq[static_cast<size_t>((t * 8 + h) * 16 + d)]);
            }
            ASSERT_EQ(a.lse[static_cast<size_t>(t * 8 + h)], b.lse[static_cast<size_t>(t * 8 + h)]);
          }
          if (query_clean) {
            ASSERT_EQ(a.kl[static_cast<size_t>(t * 2 + ph)], b.kl[static_cast<size_t>(t * 2 + ph)]);
            for (int d = 0; d < 16; ++d)
              ASSERT_EQ(a.dq_proxy[static_cast<size_t>((t * 2 + ph) * 16 + d)],
                        b.dq_proxy[static_cast<size_t>((t * 2 + ph) * 16 + d)]);
          }
          // Key rows: on the key side every key that shares a query with the bad one may change.
          bool key_clean = !key_side && !sees(bad, 0, t) && !sees(bad, 1, t);
          if (key_side) {
            key_clean = true;
            for (int64_t query = 0; query < p.T; ++query)
              for (int head = 0; head < 2; ++head)
                if (sees(query, head, bad) && sees(query, head, t))
                  key_clean = false;
          }
          for (int i = 0; key_clean && i < 32; ++i) {
            ASSERT_EQ(a.dk[static_cast<size_t>(t * 32 + i)], b.dk[static_cast<size_t>(t * 32 + i)]);
            ASSERT_EQ(a.dv[static_cast<size_t>(t * 32 + i)], b.dv[static_cast<size_t>(t * 32 + i)]);
            ASSERT_EQ(a.dk_proxy[static_cast<size_t>(t * 16 + i / 2)],
                      b.dk_proxy[static_cast<size_t>(t * 16 + i / 2)]);
          }
        }
      // And the bad value does show where it is read.
      if (name == "q" || name == "k" || name == "v") {
        EXPECT_FALSE(std::isfinite(b.out[static_cast<size_t>(bad * 8 * 16)]));
      }
      if (name == "q_proxy" || name == "k_proxy") {
        EXPECT_FALSE(std::isfinite(b.dq_proxy[static_cast<size_t>(bad * 2 * 16)]));
      }
      if (name == "dout") {
        EXPECT_FALSE(std::isfinite(b.dq[static_cast<size_t>(bad * 8 * 16)]));
      }
      if (name == "dkl") {
        EXPECT_FALSE(std::isfinite(b.dk_proxy[static_cast<size_t>(bad * 16)]));
      }
    }
}

TEST_P(BothModes, SameBitsForAnyNumberOfThreads) {
  const int before = omp_get_max_threads();
  Case c(make({700, 33, 120}, 0, 16, 16, 4), DType::kFloat32);
  std::vector<std::vector<char>> first;
  for (int threads : {1, 2, 3, 8}) {
    omp_set_num_threads(threads);
    for (Array* a : {&c.out, &c.lse, &c.kl, &c.dq, &c.dk, &c.dv, &c.dq_proxy, &c.dk_proxy})
      a->poison();
    std::fill(c.ids.begin(), c.ids.end(), -7);
    c.select();
    run(c, GetParam());
    std::vector<std::vector<char>> now;
    for (Array* a : {&c.out, &c.lse, &c.kl, &c.dq, &c.dk, &c.dv, &c.dq_proxy, &c.dk_proxy})
      now.push_back(a->bytes());
    now.emplace_back(reinterpret_cast<char*>(c.ids.data()),
                     reinterpret_cast<char*>(c.ids.data() + c.ids.size()));
    if (first.empty())
      first = now;
    EXPECT_EQ(first, now) << threads << " threads";
  }
  omp_set_num_threads(before);
}

// A token's results do not depend on what else is in the batch.
TEST_P(BothModes, RowsDoNotDependOnTheirNeighbours) {
  Problem both = make({200, 61});
  Problem alone = make({61});
  auto tail = [](std::vector<double>& to, const std::vector<double>& from) {
    std::copy(from.end() - static_cast<std::ptrdiff_t>(to.size()), from.end(), to.begin());
  };
  tail(alone.q, both.q), tail(alone.k, both.k), tail(alone.v, both.v), tail(alone.dout, both.dout);
  tail(alone.q_proxy, both.q_proxy), tail(alone.k_proxy, both.k_proxy), tail(alone.dkl, both.dkl);
  Case a(both, DType::kFloat32), b(alone, DType::kFloat32);
  a.select();
  b.select();
  run(a, GetParam());
  run(b, GetParam());
  auto expect_tail = [](const Array& whole, const Array& part) {
    const std::vector<double> x = whole.values(), y = part.values();
    EXPECT_TRUE(std::equal(y.begin(), y.end(), x.end() - static_cast<std::ptrdiff_t>(y.size())));
  };
  expect_tail(a.out, b.out);
  expect_tail(a.lse, b.lse);
  expect_tail(a.kl, b.kl);
  expect_tail(a.dq, b.dq);
  expect_tail(a.dk, b.dk);
  expect_tail(a.dq_proxy, b.dq_proxy);
}

// Every subset of results gives the bits of the full run, and nothing else is written.
TEST_P(BothModes, AbsentGradients) {
  const bool sparse = GetParam();
  Case c(make({120, 9}), DType::kFloat32);
  c.select();
  run(c, sparse);
  const Snapshot full(c);
  const thresher::BackwardParams all = c.backward_params(sparse);
  using Member = thresher::Tensor thresher::BackwardParams::*;
  const Member members[] = {
      &thresher::BackwardParams::dq,       &thresher::BackwardParams::dk,
      &thresher::BackwardParams::dv,       &thresher::BackwardParams::dq_proxy,
      &thresher::BackwardParams::dk_proxy, &thresher::BackwardParams::kl};
  Array* arrays[] = {&c.dq, &c.dk, &c.dv, &c.dq_proxy, &c.dk_proxy, &c.kl};
  const std::vector<double>* right[] = {&full.dq,       &full.dk,       &full.dv,
                                        &full.dq_proxy, &full.dk_proxy, &full.kl};
  for (int subset = 0; subset < 64; ++subset) {
    thresher::BackwardParams b = all;
    for (int i = 0; i < 6; ++i) {
      arrays[i]->poison();
      if (!(subset >> i & 1))
        b.*members[i] = {};
    }
    if (!b.dq && !b.dk && !b.dv)
      b.dout = b.out = {};
    if (!b.dq_proxy && !b.dk_proxy)
      b.dkl = {};
    if (!b.dkl && !b.kl)
      b.q_proxy = b.k_proxy = b.proxy_lse = {};
    c.backward(b, sparse);
    for (int i = 0; i < 6; ++i) {
      if (subset >> i & 1)
        EXPECT_EQ(arrays[i]->values(), *right[i]) << subset << " " << i;
      else
        EXPECT_TRUE(std::isnan(arrays[i]->values()[0])) << subset << " " << i;
    }
  }
}

// Without dkl and kl the backward has no business with the proxy: its tensors, which the front end
// hands over all the same, lie in memory that nobody may read.
TEST_P(BothModes, UnusedKlNeverReadsTheProxy) {
  const bool sparse = GetParam();
  Case c(make({120, 9}), DType::kFloat32);
  c.select();
  run(c, sparse);
  const Snapshot full(c);
  thresher::BackwardParams b = c.backward_params(sparse);
  const size_t bytes = size_t{1} << 20;
  void* forbidden = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(forbidden, MAP_FAILED);
  for (thresher::Tensor* t : {&b.q_proxy, &b.k_proxy, &b.proxy_lse})
    t->data = forbidden;
  const size_t with_proxy = sparse ? thresher::sparse_backward_workspace_size(b, {})
                                   : thresher::warmup_backward_workspace_size(b, {});
  b.dkl = b.dq_proxy = b.dk_proxy = b.kl = {};
  const size_t without = sparse ? thresher::sparse_backward_workspace_size(b, {})
                                : thresher::warmup_backward_workspace_size(b, {});
  EXPECT_LT(without, with_proxy);
  for (Array* a : {&c.dq, &c.dk, &c.dv})
    a->poison();
  c.backward(b, sparse);
  EXPECT_EQ(c.dq.values(), full.dq);
  EXPECT_EQ(c.dk.values(), full.dk);
  EXPECT_EQ(c.dv.values(), full.dv);
  munmap(forbidden, bytes);
}

TEST_P(BothModes, ForwardWithoutProxy) {
  Case c(make({120, 9}), DType::kFloat32);
  c.select();
  c.forward(GetParam());
  const Snapshot full(c);
  c.out.poison();
  thresher::ForwardParams f = c.forward_params(GetParam());
  f.q_proxy = f.k_proxy = f.proxy_lse = {};
  if (GetParam())
    Case::call(f, thresher::sparse_forward_workspace_size, thresher::sparse_forward);
  else
    Case::call(f, thresher::warmup_forward_workspace_size, thresher::warmup_forward);
  // The warm-up then has other tiles, but not other rows.
  EXPECT_EQ(full.out, c.out.values());
}

TEST(CpuEdges, StudentThatUnderflows) {
  Problem p = make({64}, 0, 16, 16, 4);
  for (double& x : p.q)
    x = 0; // teacher: uniform
  std::fill(p.q_proxy.begin(), p.q_proxy.end(), 4.0);
  for (int64_t t = 0; t < p.Tk; ++t)
    std::fill_n(p.k_proxy.begin() + t * 16, 16, t == 0 ? 100.0 : -100.0);
  p.proxy_scale = 1;
  std::fill(p.dkl.begin(), p.dkl.end(), 1.0);
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    Case c(p, dtype);
    c.ids = reference::select(c.p);
    run(c, true);
    const reference::Results right = reference::attend(c.p, &c.ids);
    EXPECT_LE(reference::relative_error(c.kl.values(), right.kl), tolerance(dtype).forward);
    EXPECT_LE(reference::relative_error(c.dq_proxy.values(), right.dq_proxy),
              tolerance(dtype).backward);
    EXPECT_LE(reference::relative_error(c.dk_proxy.values(), right.dk_proxy),
              tolerance(dtype).backward);
    EXPECT_GT(c.kl.values().back(), 1000);
  }
}

std::string error_of(Case& c) {
  try {
    c.forward(true);
  } catch (const thresher::Error& error) {
    EXPECT_EQ(error.argument(), "block_indices");
    EXPECT_TRUE(std::isnan(c.out.values()[0])) << "written before the check";
    return error.what();
  }
  return "";
}

TEST(CpuEdges, BadIndicesNameTheFirstOffender) {
  Case c(make({40, 90}, 3), DType::kFloat32);
  c.ids = reference::select(c.p);
  const std::vector<int32_t> good = c.ids;
  auto at = [&](int head, int64_t token, int slot) -> int32_t& {
    return c.ids[static_cast<size_t>((head * c.p.T + token) * c.p.K + slot)];
  };
  auto expect = [&](const char* where) {
    const std::string text = error_of(c);
    EXPECT_NE(text.find(where), std::string::npos) << text;
    c.ids = good;
  };
  at(1, 20, 2) = 9;
  expect("head 1, token 20, slot 2: block 9");
  at(0, 39, 0) = 3; // of a later block than the document has
  expect("head 0, token 39, slot 0: block 3");
  at(0, 60, 2) = 2; // token 60 is at position 20: blocks 0 and 1
  expect("head 0, token 60, slot 2: block 2");
  at(1, 100, 0) = at(1, 100, 2);
  expect("head 1, token 100, slot 2");
  at(0, 5, 1) = -2;
  expect("head 0, token 5, slot 1: block -2");
  at(0, 129, 1) = 1 << 30;
  at(1, 0, 0) = 77;
  expect("head 0, token 129, slot 1");
  at(0, 131, 0) = 12345; // padding: never read
  EXPECT_EQ(error_of(c), "");
}

TEST(CpuEdges, OverlappingDocumentsAreRefused) {
  Problem p = make({40, 40});
  p.k_begin[1] = 20;
  Case c(p, DType::kFloat32);
  std::fill(c.ids.begin(), c.ids.end(), -1);
  EXPECT_THROW(c.forward(true), thresher::Error);
}

} // namespace
