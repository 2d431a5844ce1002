// The Hopper KL rows' own kernels on the CPU: roles, barriers, rings, swizzles, descriptors, the
// order of the proxy's rows, masks, sums. No GPU.
#include "../harness.h"
#include "machine.h"
#include "map.h"

#include <gtest/gtest.h>

#define __CUDACC__ // the device part of the headers below
#include "cuda/sm90/kl/kernel.cuh"

#include <array>
#include <limits>

namespace thresher::cuda::sm90::kl {
alignas(1024) uint8_t kl_memory[232448]; // what the kernel declares as its shared memory
} // namespace thresher::cuda::sm90::kl

namespace thresher::test {
namespace {

namespace kl = cuda::sm90::kl;

struct Case {
  Batch batch;
  std::array<int, 4> heads; // q, kv, proxy, proxy key
  int top_k = 3;
  int max_entries = 1024, window = 4096;
  bool bad_numbers = false; // keys and queries that are not finite, in the middle of blocks
  bool twice = false;
};

template <class T>
struct Inputs {
  std::vector<T> q, k, q_proxy, k_proxy;
  std::vector<int32_t> ids; // [Hp, T, K], ascending, then -1
  std::vector<float> lse, proxy_lse;
};

double dot(const auto* a, const auto* b, int dim) {
  double sum = 0;
  for (int d = 0; d < dim; ++d)
    sum += to_double(a[d]) * to_double(b[d]);
  return sum;
}

template <class T, class C>
class Problem {
 public:
  explicit Problem(const Case& c) : c_(c), tokens_(c.batch.describe()) {
    const auto [q_heads, kv_heads, proxy_heads, key_heads] = c.heads;
    const int64_t T_ = c.batch.tokens, keys = c.batch.keys;
    in_.q = random_values<T>(T_ * q_heads * C::kDim, 1);
    in_.k = random_values<T>(keys * kv_heads * C::kDim, 2);
    in_.q_proxy = random_values<T>(T_ * proxy_heads * C::kProxyDim, 3);
    in_.k_proxy = random_values<T>(keys * key_heads * C::kProxyDim, 4);
    if (c.bad_numbers)
      for (auto* tensor : {&in_.q, &in_.k, &in_.q_proxy, &in_.k_proxy})
        for (int64_t t : {int64_t{70}, c.batch.keys - 40})
          (*tensor)[static_cast<size_t>(t * static_cast<int64_t>(tensor->size()) / keys + 5)] =
              from_double<T>(std::numeric_limits<double>::quiet_NaN());
    in_.ids.assign(static_cast<size_t>(proxy_heads * T_ * c.top_k), -1);
    in_.lse.assign(static_cast<size_t>(T_ * q_heads), NAN);
    in_.proxy_lse.assign(static_cast<size_t>(T_ * proxy_heads), NAN);
    std::mt19937 random(5);
    for (int p = 0; p < proxy_heads; ++p)
      for (int64_t t = 0; t < T_; ++t) {
        const auto& token = tokens_[static_cast<size_t>(t)];
        if (token.position < 0)
          continue;
        int32_t* row = in_.ids.data() + (p * T_ + t) * c.top_k;
        const int visible = static_cast<int>(token.position / 128 + 1);
        int count = 0;
        for (int b = visible - 1; b >= 0 && count < c.top_k; --b)
          if (b == visible - 1 || random() % 3 > 0)
            row[count++] = b;
        std::sort(row, row + count);
      }
    expect();
  }

  // As build_index leaves it.
  std::vector<float> run() {
    const auto [q_heads, kv_heads, proxy_heads, key_heads] = c_.heads;
    const auto T_ = static_cast<int32_t>(c_.batch.tokens);
    cuda::BlockIndex index;
    index.tokens = T_;
    index.proxy_heads = proxy_heads;
    index.top_k = c_.top_k;
    index.block_size = 128;
    index.window_tokens = std::min(c_.window, T_);
    index.windows = (T_ + index.window_tokens - 1) / index.window_tokens;
    const int64_t segment_entries = int64_t{index.window_tokens} * c_.top_k;
    std::vector<int32_t> position;
    for (const auto& token : tokens_)
      position.push_back(static_cast<int32_t>(token.position));
    std::vector<uint8_t> slots(static_cast<size_t>(proxy_heads * T_), 0);
    std::vector<cuda::Entry> entries(
        static_cast<size_t>(index.windows * proxy_heads * segment_entries));
    std::vector<cuda::WorkItem> items;
    std::vector<int32_t> segment_items = {0};
    for (int w = 0; w < index.windows; ++w)
      for (int p = 0; p < proxy_heads; ++p) {
        std::map<std::pair<int64_t, int>, std::vector<cuda::Entry>> lists; // document, block
        const int32_t first = w * index.window_tokens;
        for (int32_t t = first; t < std::min(T_, first + index.window_tokens); ++t)
          for (int slot = 0; slot < c_.top_k; ++slot) {
            const int block = in_.ids[static_cast<size_t>((p * T_ + t) * c_.top_k + slot)];
            if (block < 0)
              break;
            ++slots[static_cast<size_t>(p * T_ + t)];
            lists[{tokens_[static_cast<size_t>(t)].first_key, block}].push_back(
                static_cast<uint32_t>(slot) << cuda::kEntryTokenBits |
                static_cast<uint32_t>(t - first));
          }
        uint32_t at = 0;
        const int64_t segment = int64_t{w} * proxy_heads + p;
        for (const auto& [key, list] : lists) {
          std::copy(list.begin(), list.end(), entries.begin() + segment * segment_entries + at);
          int64_t length = 0; // of the document
          for (int64_t f = 0; f < c_.batch.fragments(); ++f)
            if (c_.batch.first_key(f) == key.first)
              length = std::max(length, c_.batch.visible_keys(f));
          for (size_t begin = 0; begin < list.size(); begin += static_cast<size_t>(c_.max_entries))
            items.push_back(
                {p, w, 0, key.second * 128, static_cast<int32_t>(key.first + key.second * 128),
                 static_cast<int32_t>(std::min<int64_t>(128, length - key.second * 128)),
                 at + static_cast<uint32_t>(begin),
                 std::min(c_.max_entries, static_cast<int>(list.size() - begin))});
          at += static_cast<uint32_t>(list.size());
        }
        segment_items.push_back(static_cast<int32_t>(items.size()));
      }
    index.position = position.data();
    index.slot_count = slots.data();
    index.entries = entries.data();
    index.segment_items = segment_items.data();
    index.items = items.data();

    std::vector<float> rows(static_cast<size_t>(T_ * proxy_heads), NAN);
    const CUtensorMap q = emulation::make_map(in_.q.data(), 1, T_, q_heads, C::kDim, C::kHeads, 1);
    const CUtensorMap k =
        emulation::make_map(in_.k.data(), 1, c_.batch.keys, kv_heads, C::kDim, 1, 128);
    const CUtensorMap k_proxy =
        emulation::make_map(in_.k_proxy.data(), 1, c_.batch.keys, key_heads, C::kProxyDim, 1, 128);
    auto& machine = emulation::machine();
    for (int w = 0; w < index.windows; ++w) { // a pass each
      int32_t next = 0;
      kl::Params<T> params = {};
      params.index = index;
      params.first_segment = w * proxy_heads;
      params.last_segment = (w + 1) * proxy_heads;
      params.first_token = w * index.window_tokens;
      params.token_rows = T_;
      params.key_rows = static_cast<int32_t>(c_.batch.keys);
      params.kv_heads = kv_heads;
      params.proxy_heads = proxy_heads;
      params.proxy_kv_heads = key_heads;
      params.next_item = &next;
      params.q_proxy = {in_.q_proxy.data(), 0, proxy_heads * C::kProxyDim, C::kProxyDim};
      params.lse = {in_.lse.data(), 0, q_heads, 1};
      params.proxy_lse = {in_.proxy_lse.data(), 0, proxy_heads, 1};
      std::vector<float> partial(static_cast<size_t>(segment_entries * proxy_heads * kl::kPartials),
                                 NAN);
      params.kl_partial = partial.data();
      params.score_scale = static_cast<float>(scale(C::kDim) * 1.4426950408889634);
      params.proxy_score_scale = static_cast<float>(scale(C::kProxyDim) * 1.4426950408889634);
      std::memset(kl::kl_memory, 0xff, sizeof kl::kl_memory); // NaN
      machine.run(C::kThreads, kl::kl_memory, [&] { kl::kl_kernel<T, C>(q, k, k_proxy, params); });
      const int32_t tokens = std::min(T_ - params.first_token, index.window_tokens);
      machine.run(256, kl::kl_memory, [&] {
        kl::sum_partials_kernel<T>(partial.data(), slots.data(), {rows.data(), 0, proxy_heads, 1},
                                   params.first_token, tokens, T_, proxy_heads, c_.top_k);
      });
    }
    return rows;
  }

  std::vector<double> expected;

 private:
  static double scale(int dim) { return 1 / std::sqrt(dim); }

  void expect() {
    const auto [q_heads, kv_heads, proxy_heads, key_heads] = c_.heads;
    const int64_t T_ = c_.batch.tokens;
    for (int64_t t = 0; t < T_; ++t)
      for (int p = 0; p < proxy_heads; ++p) {
        std::vector<int64_t> keys;
        const auto& token = tokens_[static_cast<size_t>(t)];
        for (int slot = 0; slot < c_.top_k; ++slot) {
          const int64_t block = in_.ids[static_cast<size_t>((p * T_ + t) * c_.top_k + slot)];
          for (int64_t j = block * 128; block >= 0 && j < block * 128 + 128; ++j)
            if (j <= token.position)
              keys.push_back(token.first_key + j);
        }
        const auto softmax = [&](const T* q, const std::vector<T>& all, int heads, int head,
                                 int dim, float& lse) {
          std::vector<double> s;
          double sum = 0;
          for (int64_t key : keys) {
            s.push_back(scale(dim) * dot(q, all.data() + (key * heads + head) * dim, dim));
            sum += std::exp(s.back());
          }
          lse = static_cast<float>(std::log(sum));
          for (double& x : s)
            x -= std::log(sum);
          return s; // logarithms
        };
        std::vector<double> teacher(keys.size());
        if (keys.empty()) {
          expected.push_back(0);
          continue;
        }
        for (int h = p * C::kHeads; h < (p + 1) * C::kHeads; ++h) {
          const int64_t row = t * q_heads + h;
          const auto s = softmax(in_.q.data() + row * C::kDim, in_.k, kv_heads,
                                 h / (q_heads / kv_heads), C::kDim, in_.lse[row]);
          for (size_t i = 0; i < s.size(); ++i)
            teacher[i] += std::exp(s[i]) / C::kHeads;
        }
        const int64_t row = t * proxy_heads + p;
        const auto student =
            softmax(in_.q_proxy.data() + row * C::kProxyDim, in_.k_proxy, key_heads,
                    p / (proxy_heads / key_heads), C::kProxyDim, in_.proxy_lse[row]);
        double sum = 0;
        for (size_t i = 0; i < keys.size(); ++i)
          sum += teacher[i] * (std::log(teacher[i]) - student[i]);
        expected.push_back(sum);
      }
  }

  const Case& c_;
  std::vector<Batch::Token> tokens_;
  Inputs<T> in_;
};

template <class T, int kHeads, int kDim>
void check(const Case& c) {
  Problem<T, kl::Config<kHeads, kDim>> problem(c);
  const std::vector<float> rows = problem.run();
  int finite = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const double want = problem.expected[i];
    finite += std::isfinite(want);
    if (std::isfinite(want))
      ASSERT_NEAR(rows[i], want, 1e-5 * (1 + want))
          << "token " << i / c.heads[2] << " head " << i % c.heads[2];
    else
      ASSERT_TRUE(std::isnan(rows[i])) << "row " << i;
  }
  EXPECT_GT(finite, 0);
  EXPECT_EQ(finite < static_cast<int>(rows.size()), c.bad_numbers);
  if (c.twice) {
    const std::vector<float> again = problem.run();
    EXPECT_EQ(std::memcmp(rows.data(), again.data(), rows.size() * sizeof(float)), 0)
        << "not the same bits";
  }
}

using B = __nv_bfloat16;
using H = __half;

TEST(EmulatedKl, SixteenHeads) {
  check<B, 16, 128>({packed({150, 5, 0, 129}, 3), {32, 1, 2, 1}});
}
TEST(EmulatedKl, EightHeads) {
  check<H, 8, 128>({packed({200, 5, 0, 129}, 3), {16, 2, 2, 2}});
}
TEST(EmulatedKl, FourHeads) {
  check<B, 4, 128>({packed({200, 5, 0, 129}, 3), {16, 2, 4, 1}});
}
TEST(EmulatedKl, SmallProxyHeads) {
  check<B, 16, 64>({packed({60}), {16, 1, 1, 1}});
  check<H, 8, 64>({packed({90}), {8, 1, 1, 1}});
  check<B, 4, 64>({packed({140, 30}), {12, 1, 3, 1}});
}
TEST(EmulatedKl, ManyItemsAndPasses) {
  check<B, 4, 128>({packed({430, 20}), {4, 1, 1, 1}, 4, 40, 256, false, true});
}
TEST(EmulatedKl, FragmentsWithSharedKeys) {
  check<B, 16, 128>({context_parallel({300, 64, 0, 133}, 3, 1), {16, 1, 1, 1}});
}
TEST(EmulatedKl, BadNumbersStayInTheirRows) {
  check<B, 4, 128>({packed({200, 90}), {4, 1, 1, 1}, 3, 1024, 4096, true, true});
}

} // namespace
} // namespace thresher::test
