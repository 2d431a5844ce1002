// The Hopper selection's own kernels on the CPU: roles, barriers, rings, swizzles, descriptors,
// top-k and the finished rows. With small whole numbers every score is exact, so that the ids must
// be the reference's, ties and NaN included.
#include "../harness.h"
#include "machine.h"
#include "map.h"

#include <gtest/gtest.h>

#define __CUDACC__ // the device part of the headers below
#include "cuda/sm90/select/finish.cuh"
#include "cuda/sm90/select/kernel.cuh"

#include <limits>
#include <numeric>

namespace thresher::cuda::sm90::select {
// What the kernels declare as their shared memory.
alignas(1024) uint8_t memory[232448];
int32_t rows[kFinishThreads * 129];
} // namespace thresher::cuda::sm90::select

namespace thresher::test {
namespace {

using namespace cuda::sm90::select;
using cuda::Candidate;

enum class Data { kWhole, kEqual, kRising, kNan };

struct Case {
  Batch batch;
  int heads, key_heads, dim, top_k, init_blocks, local_blocks, splits;
  Data data = Data::kWhole;
  bool batch_rows = false; // tensors keep their batch dimension
};

template <class T>
struct Inputs {
  std::vector<T> q, k;
};

template <class T>
Inputs<T> make_inputs(const Case& c) {
  std::mt19937 random(5);
  Inputs<T> inputs;
  const auto fill = [&](std::vector<T>& values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      double value = c.data == Data::kEqual ? 0.5 : static_cast<int>(random() % 3) - 1;
      if (c.data == Data::kNan && random() % 6000 == 0)
        value = std::numeric_limits<double>::quiet_NaN();
      values.push_back(from_double<T>(value));
    }
  };
  fill(inputs.q, c.batch.tokens * c.heads * c.dim);
  fill(inputs.k, c.batch.keys * c.key_heads * c.dim);
  if (c.data == Data::kRising) { // a score is the number of its run of 64 keys: every block enters
    std::fill(inputs.q.begin(), inputs.q.end(), from_double<T>(1));
    std::fill(inputs.k.begin(), inputs.k.end(), from_double<T>(0));
    for (size_t key = 0; key < inputs.k.size() / c.dim; ++key)
      inputs.k[key * c.dim] = from_double<T>(static_cast<double>(key / c.key_heads / 64));
  }
  return inputs;
}

template <class T, class C>
std::vector<int32_t> run_kernels(const Case& c, const Inputs<T>& inputs) {
  const Batch& batch = c.batch;
  Params params = {};
  auto& args = params.args;
  auto& geometry = args.geometry;
  geometry.q_begin_array = batch.q_begin.empty() ? nullptr : batch.q_begin.data();
  geometry.k_begin_array = batch.k_begin.empty() ? nullptr : batch.k_begin.data();
  geometry.k_len_array = batch.k_len.empty() ? nullptr : batch.k_len.data();
  geometry.fragments = static_cast<int32_t>(batch.fragments());
  geometry.tokens = static_cast<int32_t>(batch.tokens);
  geometry.keys = static_cast<int32_t>(batch.keys);
  geometry.tokens_per_row = geometry.keys_per_row = static_cast<int32_t>(batch.per_row);
  if (c.batch_rows)
    params.token_rows = params.key_rows = geometry.tokens_per_row;

  std::vector<int32_t> ids(static_cast<size_t>(batch.tokens * c.heads * c.top_k), -77);
  args.block_ids.data = ids.data();
  args.block_ids.head_stride = batch.tokens * c.top_k;
  args.block_ids.token_stride = c.top_k;
  args.proxy_heads = c.heads;
  args.proxy_kv_heads = c.key_heads;
  args.dim = c.dim;
  args.block_size = C::kBlock;
  args.top_k = c.top_k;
  args.init_blocks = c.init_blocks;
  args.local_blocks = c.local_blocks;
  args.scale = 0.25f;
  args.splits = c.splits;
  const int heads_per_key = c.heads / c.key_heads;
  args.tile_heads = min(heads_per_key, int{C::kRows});
  args.head_groups = (heads_per_key + args.tile_heads - 1) / args.tile_heads;
  args.tile_tokens = C::kRows / args.tile_heads;
  args.tile_slots = static_cast<int32_t>(cuda::tile_slots(geometry, args.tile_tokens));

  // As order_tiles, but in any order.
  std::vector<int32_t> tiles;
  for (int32_t slot = args.tile_slots - 1; slot >= 0; --slot) {
    const cuda::QueryTile tile = cuda::query_tile(geometry, slot, args.tile_tokens);
    if (tile.fragment >= 0 &&
        cuda::portable::scored_end(args, tile.first_position + tile.tokens - 1) > 0)
      tiles.push_back(slot);
  }
  int32_t counters[2] = {static_cast<int32_t>(tiles.size()), 0};
  args.tiles = tiles.data();
  args.counters = counters;
  std::vector<Candidate> candidates(
      static_cast<size_t>(c.splits > 1 ? c.splits * C::kPlaces * c.heads * batch.tokens : 0),
      ~Candidate{0});
  args.candidates = candidates.data();

  const int64_t batches = c.batch_rows ? batch.rows : 1;
  const CUtensorMap q = emulation::make_map(inputs.q.data(), batches, batch.tokens, c.heads, c.dim,
                                            args.tile_heads, args.tile_tokens);
  const CUtensorMap k =
      emulation::make_map(inputs.k.data(), batches, batch.keys, c.key_heads, c.dim, 1, C::kKeys);
  auto& machine = emulation::machine();
  std::memset(memory, 0xff, sizeof memory); // NaN
  machine.run(C::kThreads, memory, [&] { select_kernel<T, C>(q, k, params); });
  const int64_t warps = c.heads * ((batch.tokens + 31) / 32);
  for (int64_t first = 0; first < warps; first += kFinishThreads / 32) {
    const int block = static_cast<int>(first / (kFinishThreads / 32));
    machine.run(kFinishThreads, memory, [&] { finish_kernel<C::kPlaces>(params); }, block);
  }
  return ids;
}

template <class T, class C>
std::vector<int32_t> expected_row(const Case& c, const Inputs<T>& inputs, const Batch::Token& token,
                                  int64_t t, int head) {
  const int visible = token.position < 0 ? 0 : static_cast<int>(token.position / C::kBlock + 1);
  std::vector<int32_t> row(static_cast<size_t>(c.top_k), -1);
  if (visible <= c.top_k) {
    std::iota(row.begin(), row.begin() + visible, 0);
    return row;
  }
  std::vector<double> score(static_cast<size_t>(visible), -INFINITY);
  std::vector<int32_t> order;
  const int key_head = head / (c.heads / c.key_heads);
  for (int b = c.init_blocks; b < visible - c.local_blocks; ++b) {
    double& best = score[static_cast<size_t>(b)];
    for (int64_t j = int64_t{b} * C::kBlock; j < (b + 1) * int64_t{C::kBlock}; ++j) {
      const T* q = inputs.q.data() + (t * c.heads + head) * c.dim;
      const T* k = inputs.k.data() + ((token.first_key + j) * c.key_heads + key_head) * c.dim;
      double sum = 0;
      for (int d = 0; d < c.dim; ++d)
        sum += to_double(q[d]) * to_double(k[d]);
      best = std::isnan(best) || sum <= best ? best : sum; // a NaN stays
    }
    order.push_back(b);
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const double x = score[static_cast<size_t>(a)], y = score[static_cast<size_t>(b)];
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  order.resize(static_cast<size_t>(c.top_k - c.init_blocks - c.local_blocks));
  for (int i = 0; i < c.init_blocks; ++i)
    order.push_back(i);
  for (int i = 1; i <= c.local_blocks; ++i)
    order.push_back(visible - i);
  std::sort(order.begin(), order.end());
  return order;
}

// The last queries of long documents: {queries, visible keys}.
Batch late(const std::vector<std::pair<int32_t, int32_t>>& documents) {
  Batch batch;
  batch.q_begin = {0};
  for (const auto [queries, keys] : documents) {
    batch.q_begin.push_back(batch.q_begin.back() + queries);
    batch.k_begin.push_back(static_cast<int32_t>(batch.keys));
    batch.k_len.push_back(keys);
    batch.keys += keys;
  }
  batch.tokens = batch.q_begin.back();
  return batch;
}

template <class T, class C>
void check(const Case& c) {
  const Inputs<T> inputs = make_inputs<T>(c);
  const std::vector<int32_t> ids = run_kernels<T, C>(c, inputs);
  const auto tokens = c.batch.describe();
  for (int64_t t = 0; t < c.batch.tokens; ++t)
    for (int head = static_cast<int>(t % 3); head < c.heads; head += 3) {
      const auto row = ids.begin() + (head * c.batch.tokens + t) * c.top_k;
      ASSERT_EQ(std::vector<int32_t>(row, row + c.top_k),
                (expected_row<T, C>(c, inputs, tokens[static_cast<size_t>(t)], t, head)))
          << "token " << t << " head " << head << " splits " << c.splits;
    }
}

using B = __nv_bfloat16;
using H = __half;
template <int kDim, int kBlock, int kPlaces>
using C = cuda::sm90::select::Config<kDim, kBlock, kPlaces>;

TEST(EmulatedSelect, RingOfStages) {
  check<B, C<128, 128, 16>>({packed({2300, 37, 500}, 5), 4, 2, 128, 3, 0, 1, 1});
}
TEST(EmulatedSelect, PiecesOfKeys) {
  for (Data data : {Data::kEqual, Data::kNan})
    check<H, C<64, 128, 16>>({packed({900, 0, 3, 129, 700}), 3, 1, 40, 3, 0, 1, 3, data});
}
TEST(EmulatedSelect, HalfStageBlocks) {
  check<B, C<128, 64, 16>>({packed({800, 37, 300}, 5), 6, 1, 96, 4, 1, 2, 3, Data::kNan});
}
TEST(EmulatedSelect, DoubleStageBlocks) {
  for (int splits : {1, 2})
    check<H, C<64, 256, 16>>({packed({1500, 3, 1100}), 2, 1, 64, 3, 0, 1, splits});
}
TEST(EmulatedSelect, LongLists) {
  check<B, C<64, 64, 32>>({packed({1930, 3}), 1, 1, 64, 22, 1, 1, 5, Data::kEqual});
  check<B, C<64, 64, 32>>({packed({1930, 3}), 1, 1, 64, 22, 1, 1, 1});
}
// Lists of 64: one set of accumulators, so another order of products, waits and releases.
TEST(EmulatedSelect, LongestLists) {
  for (Data data : {Data::kWhole, Data::kEqual, Data::kRising, Data::kNan})
    check<B, C<64, 64, 64>>({late({{70, 6400}, {3, 4500}, {1, 50}}), 2, 1, 64, 66, 1, 1,
                             data == Data::kWhole ? 1 : 3, data});
}
TEST(EmulatedSelect, LongestListsOfLargerBlocks) {
  check<H, C<128, 128, 64>>({late({{40, 6300}}), 4, 2, 128, 40, 0, 2, 1});
  check<B, C<64, 256, 64>>({late({{9, 10300}, {20, 9500}}), 3, 1, 40, 34, 0, 1, 2, Data::kNan});
}
TEST(EmulatedSelect, LongestListsPassThroughTheRing) { // many units, more stages than places
  check<B, C<128, 64, 64>>({late({{300, 3900}, {140, 2700}}), 2, 2, 96, 36, 0, 1, 1});
}
TEST(EmulatedSelect, MoreHeadsThanRows) {
  check<B, C<64, 128, 16>>({packed({300}), 300, 1, 64, 2, 0, 1, 1});
}
TEST(EmulatedSelect, EqualRows) {
  for (bool batch_rows : {false, true})
    check<B, C<64, 128, 16>>({rows(3, 500), 2, 1, 64, 2, 0, 1, 2, Data::kWhole, batch_rows});
}
TEST(EmulatedSelect, FragmentsWithSharedKeys) {
  check<B, C<64, 64, 16>>({context_parallel({1400, 64, 0, 333}, 3, 1), 2, 1, 64, 4, 0, 1, 8});
}

} // namespace
} // namespace thresher::test
