// The Hopper backward's own kernels on the CPU: the main kernel, then the proxy's on the teacher's
// rows that it left. Judged against double precision.
#include "../harness.h"
#include "machine.h"
#include "map.h"

#include <gtest/gtest.h>

#define __CUDACC__ // the device part of the headers below
#include "cuda/sm90/backward/kernel.cuh"
#include "cuda/sm90/backward/proxy_wgmma.cuh"

#include <set>

namespace thresher::cuda::sm90::backward {
// What the kernels declare as their shared memory.
alignas(1024) uint8_t memory[232448];
alignas(1024) uint8_t proxy_memory[232448];
} // namespace thresher::cuda::sm90::backward

namespace thresher::test {
namespace {

using namespace cuda::sm90::backward;
using cuda::BlockIndex;
using cuda::Entry;
using cuda::WorkItem;

using B = __nv_bfloat16;
using H = __half;
constexpr int kDim = 128, kBlock = 128;
constexpr double kScale = 0.09, kProxyScale = 0.11;

struct Case {
  std::vector<int64_t> documents;
  int padding, heads, proxy_heads, proxy_kv_heads, proxy_dim, top_k, max_entries;
  int kv_heads = 1;
  bool kl_values = true, gradient = true;
};

// As src/cuda/index builds it, in one window.
struct Lists {
  std::vector<int32_t> position, key_begin, segment_items;
  std::vector<Entry> entries;
  std::vector<WorkItem> items;
  std::vector<int2> order;
  std::vector<std::vector<int>> chosen; // [token * Hp + head] blocks in slot order
  BlockIndex index;
};

Lists make_lists(const Case& c, const Batch& batch, std::mt19937& random) {
  Lists lists;
  const auto tokens = batch.describe();
  lists.chosen.resize(static_cast<size_t>(batch.tokens * c.proxy_heads));
  lists.entries.resize(static_cast<size_t>(batch.tokens * c.proxy_heads * c.top_k));
  for (const auto& token : tokens)
    lists.position.push_back(static_cast<int32_t>(token.position));
  lists.segment_items.push_back(0);
  std::map<std::pair<int64_t, int>, int32_t> numbers;             // of block rows
  std::map<std::pair<int32_t, int>, int> main_turns, proxy_turns; // (block row, owner)
  for (int head = 0; head < c.proxy_heads; ++head) {
    std::map<std::pair<int64_t, int>, std::vector<Entry>> rows; // (first key, block)
    for (int64_t t = 0; t < batch.tokens; ++t) {
      const auto& token = tokens[static_cast<size_t>(t)];
      auto& chosen = lists.chosen[static_cast<size_t>(t * c.proxy_heads + head)];
      if (token.position < 0)
        continue;
      const int visible = static_cast<int>(token.position / kBlock) + 1;
      std::set<int> blocks = {visible - 1};
      while (static_cast<int>(blocks.size()) < std::min(c.top_k, visible))
        blocks.insert(static_cast<int>(random() % static_cast<unsigned>(visible)));
      chosen.assign(blocks.begin(), blocks.end());
      for (size_t slot = 0; slot < chosen.size(); ++slot)
        rows[{token.first_key, chosen[slot]}].push_back(
            static_cast<Entry>(slot) << cuda::kEntryTokenBits | static_cast<Entry>(t));
    }
    uint32_t at = 0;
    for (const auto& [row, list] : rows) {
      const auto& last = tokens[list.back() & ((1u << cuda::kEntryTokenBits) - 1)];
      const int64_t keys = batch.visible_keys(last.fragment) - int64_t{row.second} * kBlock;
      const int32_t number =
          numbers.emplace(row, static_cast<int32_t>(numbers.size())).first->second;
      for (size_t begin = 0; begin < list.size(); begin += static_cast<size_t>(c.max_entries)) {
        const int kv = c.kv_heads >= c.proxy_heads ? head : head / (c.proxy_heads / c.kv_heads);
        lists.order.push_back({main_turns[{number, kv}]++,
                               proxy_turns[{number, head / (c.proxy_heads / c.proxy_kv_heads)}]++});
        lists.items.push_back({head, 0, number, row.second * kBlock,
                               static_cast<int32_t>(row.first + row.second * kBlock),
                               static_cast<int32_t>(std::min<int64_t>(keys, kBlock)),
                               at + static_cast<uint32_t>(begin),
                               static_cast<int32_t>(std::min(list.size() - begin,
                                                             static_cast<size_t>(c.max_entries)))});
      }
      std::copy(list.begin(), list.end(),
                lists.entries.begin() + head * batch.tokens * c.top_k + at);
      at += static_cast<uint32_t>(list.size());
    }
    lists.segment_items.push_back(static_cast<int32_t>(lists.items.size()));
  }
  BlockIndex& index = lists.index;
  index.tokens = index.window_tokens = static_cast<int32_t>(batch.tokens);
  index.keys = static_cast<int32_t>(batch.keys);
  index.windows = 1;
  index.proxy_heads = c.proxy_heads;
  index.top_k = c.top_k;
  index.block_size = kBlock;
  index.max_entries = c.max_entries;
  index.position = lists.position.data();
  index.entries = lists.entries.data();
  index.segment_items = lists.segment_items.data();
  index.items = lists.items.data();
  index.order = lists.order.data();
  index.rows = static_cast<int32_t>(numbers.size());
  return lists;
}

// Column of a 128- or 64-column row -> its place in the accumulators of dK, dV and the proxy.
int permuted(int column) {
  const int m = column / 16, i = column / 8 % 2, c = column / 2 % 4, e = column % 2;
  return (4 * m + c) * 4 + 2 * i + e;
}
int permuted_dq(int column) {
  const int h = column / 64, a = column / 32 % 2, i = column / 8 % 4, c = column / 2 % 4;
  return 64 * h + (4 * a + c) * 8 + 2 * i + column % 2;
}

template <class T>
std::vector<T> random_values(std::mt19937& random, int64_t count) {
  std::normal_distribution<double> normal;
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(from_double<T>(normal(random)));
  return values;
}

double error(const std::vector<double>& expected, const std::vector<double>& got) {
  double difference = 0, size = 1e-30;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (expected[i] - got[i]) * (expected[i] - got[i]);
    size += expected[i] * expected[i];
  }
  return std::sqrt(difference / size);
}

template <class T, int kHeads, int kProxyDim, bool kDeterministic = false>
void check(const Case& c) {
  std::mt19937 random(7);
  Batch batch = packed(c.documents, c.padding);
  Lists lists = make_lists(c, batch, random);
  const auto tokens = batch.describe();
  const int64_t n = batch.tokens, rows = n * c.heads, width = c.proxy_dim;
  ASSERT_EQ(kHeads, c.heads / std::max(c.kv_heads, c.proxy_heads));

  const auto q = random_values<T>(random, rows * kDim),
             dout = random_values<T>(random, rows * kDim);
  const auto k = random_values<T>(random, n * c.kv_heads * kDim);
  const auto v = random_values<T>(random, n * c.kv_heads * kDim);
  const auto qp = random_values<T>(random, n * c.proxy_heads * width);
  const auto kp = random_values<T>(random, n * c.proxy_kv_heads * width);
  std::vector<float> dkl(static_cast<size_t>(n * c.proxy_heads));
  for (float& x : dkl)
    x = static_cast<float>(random() % 1000) / 1000.f;

  // --- double precision
  const auto dot = [&](const T* a, const T* b, int64_t d) {
    double sum = 0;
    for (int64_t i = 0; i < d; ++i)
      sum += to_double(a[i]) * to_double(b[i]);
    return sum;
  };
  using Doubles = std::vector<double>;
  Doubles dq(static_cast<size_t>(rows * kDim)), dk(static_cast<size_t>(n * c.kv_heads * kDim));
  Doubles dv(dk.size()), dqp(qp.size()), dkp(kp.size());
  Doubles kl(static_cast<size_t>(n * c.proxy_heads));
  std::vector<float> minus_lse(static_cast<size_t>(rows)), minus_delta(minus_lse.size());
  std::vector<float> proxy_lse(kl.size());
  std::vector<int8_t> exponent(minus_lse.size());
  const int group = c.heads / c.proxy_heads; // main heads of a proxy head
  for (int64_t t = 0; t < n; ++t)
    for (int head = 0; head < c.proxy_heads; ++head) {
      const auto& token = tokens[static_cast<size_t>(t)];
      std::vector<int64_t> keys; // rows that the token attends to
      for (int block : lists.chosen[static_cast<size_t>(t * c.proxy_heads + head)])
        for (int64_t j = int64_t{block} * kBlock;
             j < std::min((block + 1) * int64_t{kBlock}, token.position + 1); ++j)
          keys.push_back(token.first_key + j);
      if (keys.empty())
        continue;
      Doubles mean(keys.size());
      for (int g = 0; g < group; ++g) {
        const int h = head * group + g, kv = h / (c.heads / c.kv_heads);
        const int64_t row = t * c.heads + h;
        const T *own_q = q.data() + row * kDim, *own_dout = dout.data() + row * kDim;
        Doubles p, dp;
        double sum = 0, delta = 0;
        for (int64_t key : keys) {
          p.push_back(
              std::exp(kScale * dot(own_q, k.data() + (key * c.kv_heads + kv) * kDim, kDim)));
          dp.push_back(dot(own_dout, v.data() + (key * c.kv_heads + kv) * kDim, kDim));
          sum += p.back();
        }
        for (size_t i = 0; i < keys.size(); ++i) {
          p[i] /= sum;
          delta += p[i] * dp[i];
          mean[i] += p[i] / group;
        }
        minus_lse[static_cast<size_t>(row)] = static_cast<float>(-std::log2(sum));
        minus_delta[static_cast<size_t>(row)] = static_cast<float>(-delta);
        for (size_t i = 0; i < keys.size(); ++i) {
          const double ds = p[i] * (dp[i] - delta); // without softmax_scale, as the accumulators
          const int64_t key = (keys[i] * c.kv_heads + kv) * kDim;
          for (int d = 0; d < kDim; ++d) {
            dq[static_cast<size_t>(row * kDim + d)] +=
                ds * to_double(k[static_cast<size_t>(key + d)]);
            dk[static_cast<size_t>(key + d)] += ds * to_double(own_q[d]);
            dv[static_cast<size_t>(key + d)] += p[i] * to_double(own_dout[d]);
          }
        }
      }
      const int key_head = head / (c.proxy_heads / c.proxy_kv_heads);
      const size_t at = static_cast<size_t>(t * c.proxy_heads + head);
      const T* own = qp.data() + static_cast<int64_t>(at) * width;
      Doubles student;
      double sum = 0;
      for (int64_t key : keys) {
        student.push_back(
            std::exp(kProxyScale *
                     dot(own, kp.data() + (key * c.proxy_kv_heads + key_head) * width, width)));
        sum += student.back();
      }
      proxy_lse[at] = static_cast<float>(std::log(sum));
      for (size_t i = 0; i < keys.size(); ++i) {
        student[i] /= sum;
        kl[at] += mean[i] * std::log(mean[i] / student[i]);
        const double ds = double{dkl[at]} * (student[i] - mean[i]);
        const int64_t key = (keys[i] * c.proxy_kv_heads + key_head) * width;
        for (int64_t d = 0; d < width; ++d) {
          dqp[at * static_cast<size_t>(width) + static_cast<size_t>(d)] +=
              ds * to_double(kp[static_cast<size_t>(key + d)]);
          dkp[static_cast<size_t>(key + d)] += ds * to_double(own[d]);
        }
      }
    }

  // --- the kernels
  const int parts = std::max(1, c.kv_heads / c.proxy_heads);
  const int64_t slots = kDeterministic ? c.top_k : 1; // of partial results
  std::vector<__half> dq_sum(static_cast<size_t>(rows * kDim * slots), __float2half_rn(0.f));
  std::vector<float> dk_sum(dk.size()), dv_sum(dv.size()),
      dqp_sum(dqp.size() * static_cast<size_t>(slots)), dkp_sum(dkp.size());
  const int64_t pairs = n * c.proxy_heads * c.top_k;
  std::vector<__half> teacher(static_cast<size_t>(parts * pairs * kBlock),
                              __float2half_rn(NAN)); // as a workspace may be
  std::vector<float> kl_partial(static_cast<size_t>(pairs), -77.f);
  int32_t next_item = 0, next_proxy_item = 0;
  std::vector<int32_t> turns(static_cast<size_t>(c.kv_heads * lists.index.rows * kTurnWarps));
  std::vector<int32_t> proxy_turns(
      static_cast<size_t>(c.proxy_kv_heads * lists.index.rows * kTurnWarps));
  auto& machine = emulation::machine();
  Params params = {};
  params.index = lists.index;
  params.last_segment = c.proxy_heads;
  params.token_rows = params.key_rows = static_cast<int32_t>(n);
  params.q_heads = c.heads;
  params.kv_heads = c.kv_heads;
  params.proxy_heads = c.proxy_heads;
  params.parts = parts;
  params.next_item = &next_item;
  params.minus_lse = minus_lse.data();
  params.minus_delta = minus_delta.data();
  params.exponent = exponent.data();
  params.dq = dq_sum.data();
  params.dk = dk_sum.data();
  params.dv = dv_sum.data();
  params.teacher = teacher.data();
  params.teacher_part_stride = pairs * kBlock;
  params.score_scale = static_cast<float>(kScale * 1.4426950408889634);
  params.turns = turns.data();
  std::memset(memory, 0xff, sizeof memory); // NaN
  const CUtensorMap q_map = emulation::make_map(q.data(), 1, n, c.heads, kDim, kHeads, 1),
                    dout_map = emulation::make_map(dout.data(), 1, n, c.heads, kDim, kHeads, 1),
                    k_map = emulation::make_map(k.data(), 1, n, c.kv_heads, kDim, 1, kBlock),
                    v_map = emulation::make_map(v.data(), 1, n, c.kv_heads, kDim, 1, kBlock);
  machine.run(Config::kThreads, memory, [&] {
    backward_kernel<T, kHeads, true, kDeterministic>(q_map, dout_map, k_map, v_map, params);
  });

  if (parts > 1) // as sum_parts_kernel
    for (int64_t i = 0; i < pairs * kBlock; ++i) {
      float sum = 0;
      for (int part = 0; part < parts; ++part)
        sum += static_cast<float>(teacher[static_cast<size_t>(part * pairs * kBlock + i)]);
      teacher[static_cast<size_t>(i)] = __float2half_rn(sum);
    }
  using P = ProxyConfig<kProxyDim>;
  ProxyParams<T> proxy = {};
  proxy.index = lists.index;
  proxy.last_segment = c.proxy_heads;
  proxy.proxy_heads = c.proxy_heads;
  proxy.proxy_kv_heads = c.proxy_kv_heads;
  const auto view = [](auto* data, int heads, int64_t dim) {
    cuda::TensorView<std::remove_pointer_t<decltype(data)>> result;
    result.data = data;
    result.token_stride = heads * dim;
    result.head_stride = dim;
    return result;
  };
  proxy.q_proxy = view(qp.data(), c.proxy_heads, width);
  proxy.k_proxy = view(kp.data(), c.proxy_kv_heads, width);
  proxy.proxy_lse = view(std::as_const(proxy_lse).data(), c.proxy_heads, 1);
  if (c.gradient) {
    proxy.dkl = view(std::as_const(dkl).data(), c.proxy_heads, 1);
    proxy.dq_proxy = dqp_sum.data();
    proxy.dk_proxy = dkp_sum.data();
  }
  proxy.kl_partial = c.kl_values ? kl_partial.data() : nullptr;
  proxy.scale = static_cast<float>(kProxyScale);
  proxy.next_item = &next_proxy_item;
  proxy.turns = proxy_turns.data();
  std::memset(proxy_memory, 0xff, sizeof proxy_memory);
  const CUtensorMap teacher_map =
      emulation::make_map(teacher.data(), 1, pairs, 1, kBlock, 1, P::kTokens);
  machine.run(P::kThreads, proxy_memory,
              [&] { proxy_backward_kernel<T, P, kDeterministic>(teacher_map, proxy); });

  if constexpr (kDeterministic) { // as the combine kernels
    constexpr int kPiece = kPieceRows<kHeads>;
    std::vector<__half> dq_whole(static_cast<size_t>(rows * kDim));
    std::vector<float> dqp_whole(dqp.size());
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = row % c.heads, at = row / c.heads * c.proxy_heads + head / group;
      const auto count = static_cast<int64_t>(lists.chosen[static_cast<size_t>(at)].size());
      for (int column = 0; column < kDim; ++column) {
        double sum = 0;
        for (int64_t slot = 0; slot < count; ++slot)
          sum += to_double(dq_sum[static_cast<size_t>(
              (row / kPiece * c.top_k + slot) * kPiece * kDim + column / 32 * kPiece * 32 +
              row % kPiece * 32 + permuted_dq(column) % 32)]);
        dq_whole[static_cast<size_t>(row * kDim + permuted_dq(column))] = from_double<H>(sum);
      }
    }
    for (int64_t i = 0; i < n * c.proxy_heads * width; ++i) {
      const int64_t row = i / width;
      for (size_t slot = 0; slot < lists.chosen[static_cast<size_t>(row)].size(); ++slot)
        dqp_whole[static_cast<size_t>(i)] += dqp_sum[static_cast<size_t>(
            (row * c.top_k + static_cast<int64_t>(slot)) * width + i % width)];
    }
    dq_sum = dq_whole;
    dqp_sum = dqp_whole;
    for (size_t i = 0; i < lists.items.size(); ++i) { // everyone had a turn
      const WorkItem& item = lists.items[i];
      const int kv = c.kv_heads >= c.proxy_heads ? item.proxy_head * parts
                                                 : item.proxy_head / (c.proxy_heads / c.kv_heads);
      EXPECT_GT(turns[static_cast<size_t>((kv * lists.index.rows + item.row) * kTurnWarps)],
                lists.order[i].x);
    }
  }

  // --- what they left
  const double limit = std::is_same_v<T, __half> ? 1e-3 : 6e-3;
  const auto natural = [](const auto& values, int64_t row_width, auto place) {
    Doubles result;
    for (size_t i = 0; i < values.size(); ++i) {
      const auto d = static_cast<int64_t>(i) % row_width;
      result.push_back(static_cast<double>(static_cast<float>(
          values[i - static_cast<size_t>(d) + static_cast<size_t>(place(static_cast<int>(d)))])));
    }
    return result;
  };
  EXPECT_LT(error(dq, natural(dq_sum, kDim, permuted_dq)), limit);
  EXPECT_LT(error(dk, natural(dk_sum, kDim, permuted)), limit);
  EXPECT_LT(error(dv, natural(dv_sum, kDim, permuted)), limit);
  if (c.gradient) {
    EXPECT_LT(error(dqp, natural(dqp_sum, width, permuted)), limit);
    EXPECT_LT(error(dkp, natural(dkp_sum, width, permuted)), limit);
  }
  if (c.kl_values)
    for (size_t row = 0; row < kl.size(); ++row) {
      double sum = 0;
      for (size_t slot = 0; slot < lists.chosen[row].size(); ++slot)
        sum += double{kl_partial[row * static_cast<size_t>(c.top_k) + slot]};
      // P of a head is rounded to T before the mean: half an ulp of every term's weight.
      ASSERT_NEAR(kl[row], sum, limit * kl[row] + 1e-3) << "row " << row;
    }
}

TEST(EmulatedBackward, SixteenHeads) {
  check<H, 16, 128>({{150, 1, 30}, 5, 32, 2, 1, 128, 2, 24});
}
TEST(EmulatedBackward, FourHeadsProxyOf64) {
  check<B, 4, 64>({{300}, 0, 4, 1, 1, 64, 2, 1024});
}
TEST(EmulatedBackward, SeveralKvHeadsAProxyHead) {
  check<H, 8, 128>({{140, 50}, 0, 16, 1, 1, 128, 2, 100, 2});
}
TEST(EmulatedBackward, ValuesAlone) {
  check<H, 4, 64>({{140}, 0, 4, 1, 1, 64, 1, 40, 1, true, false});
}
TEST(EmulatedBackward, GradientAlone) {
  check<B, 4, 128>({{140}, 3, 4, 1, 1, 128, 2, 1024, 1, false, true});
}
TEST(EmulatedBackward, DeterministicSixteenHeads) {
  check<H, 16, 128, true>({{150, 1, 30}, 5, 32, 2, 1, 128, 2, 24});
}
TEST(EmulatedBackward, DeterministicFourHeads) {
  check<B, 4, 64, true>({{200, 70}, 0, 8, 2, 1, 64, 2, 40});
}
TEST(EmulatedBackward, DeterministicSeveralKvHeads) {
  check<H, 8, 128, true>({{140}, 0, 16, 1, 1, 128, 2, 100, 2});
}

} // namespace
} // namespace thresher::test
