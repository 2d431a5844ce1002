// Selection by every kernel that takes a case, against scores in double. With small whole numbers
// every score is exact, so the ids must be the reference's, ties and NaN included; with random data
// no block left out may beat one kept by more than the rounding bound.
#include "harness.h"

#include "cuda/portable/select/select.h"
#if THRESHER_CUDA_SM90
#include "cuda/sm90/select/select.h"
#endif

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <set>
#include <thread>

namespace thresher::test {
namespace {

enum class Data { kNormal, kWhole, kEqual, kRising, kNan };
enum class Kind { kPortable, kSm90 };

struct Case {
  const char* name;
  Batch batch;
  int heads = 4, key_heads = 1, dim = 128, block_size = 128, top_k = 4;
  int init_blocks = 0, local_blocks = 1;
  Data data = Data::kWhole;
  double scale = 0.25;
  int64_t check_every = 1; // rows that are compared
  bool head_major = false; // [N, H, S + 3, D] seen as [N, S, H, D]
};

// A kernel and how its work is cut; 0 as in SelectOptions.
struct Launch {
  Kind kind = Kind::kPortable;
  size_t shared_limit = 0;
  int splits = 0;
};

template <class F>
void parallel_for(int64_t count, F&& f) {
  std::atomic<int64_t> next = 0;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i)
    threads.emplace_back([&] {
      for (int64_t n; (n = next++) < count;)
        f(n);
    });
  for (std::thread& thread : threads)
    thread.join();
}

// Values of a packed [T, H, D] tensor under the layout of a case.
template <class T>
class Input {
 public:
  Input(const Case& c, const std::vector<T>& values, int64_t tokens, int heads)
      : array_(c.head_major ? head_major(c, values, heads) : values) {
    tensor = tensor_of(array_, tokens, heads, c.dim);
    if (!c.head_major)
      return;
    const int64_t per_row = c.batch.per_row, head = (per_row + kGap) * c.dim;
    const int64_t shape[4] = {c.batch.rows, per_row, heads, c.dim};
    const int64_t stride[4] = {heads * head, c.dim, head, 1};
    tensor.rank = 4;
    std::copy(shape, shape + 4, tensor.shape);
    std::copy(stride, stride + 4, tensor.stride);
  }
  Tensor tensor;

 private:
  static constexpr int64_t kGap = 3;
  static std::vector<T> head_major(const Case& c, const std::vector<T>& values, int heads) {
    const int64_t per_row = c.batch.per_row;
    std::vector<T> result(static_cast<size_t>(c.batch.rows * heads * (per_row + kGap) * c.dim),
                          from_double<T>(std::numeric_limits<double>::quiet_NaN()));
    for (int64_t t = 0; t < c.batch.rows * per_row; ++t)
      for (int h = 0; h < heads; ++h)
        std::copy_n(values.begin() + (t * heads + h) * c.dim, c.dim,
                    result.begin() +
                        ((t / per_row * heads + h) * (per_row + kGap) + t % per_row) * c.dim);
    return result;
  }
  DeviceArray<T> array_;
};

// Empty if the kernel does not take the case.
template <class T>
std::vector<int32_t> run_select(const Case& c, const std::vector<T>& q, const std::vector<T>& k,
                                const Launch& launch = {}) {
  SelectParams params;
  Shapes shapes;
  const DeviceBatch device_batch(c.batch);
  device_batch.describe(params.problem, shapes);
  shapes.proxy_heads = c.heads;
  shapes.proxy_kv_heads = c.key_heads;
  shapes.proxy_dim = c.dim;
  shapes.block_size = params.problem.block_size = c.block_size;
  shapes.top_k = params.problem.top_k_blocks = c.top_k;
  shapes.dtype = dtype_of<T>();
  params.problem.init_blocks = c.init_blocks;
  params.problem.local_blocks = c.local_blocks;
  params.problem.proxy_scale = c.scale;
  const Input<T> device_q(c, q, c.batch.tokens, c.heads);
  const Input<T> device_k(c, k, c.batch.keys, c.key_heads);
  const DeviceArray<int32_t> ids(int64_t{c.heads} * c.batch.tokens * c.top_k);
  params.q_proxy = device_q.tensor;
  params.k_proxy = device_k.tensor;
  params.block_indices = tensor_of(ids, c.heads, c.batch.tokens, c.top_k);
  const auto run = [&](size_t bytes, auto&& kernel) {
    const DeviceArray<char> workspace(static_cast<int64_t>(bytes));
    kernel(Workspace{workspace.data(), bytes});
    CUDA_CHECK(cudaDeviceSynchronize());
    EXPECT_TRUE(workspace.guards_intact());
  };
  if (launch.kind == Kind::kPortable) {
    const cuda::portable::SelectOptions options = {launch.shared_limit, launch.splits};
    run(cuda::portable::select_workspace_size(params, shapes, options),
        [&](const Workspace& workspace) {
          cuda::portable::run_select(params, shapes, workspace, options, nullptr);
        });
  } else {
#if THRESHER_CUDA_SM90
    if (!cuda::sm90::select_blocks.refuses(params, shapes, cuda::device_facts()).empty())
      return {};
    run(cuda::sm90::select_workspace_size(params, shapes, launch.splits),
        [&](const Workspace& workspace) {
          cuda::sm90::run_select(params, shapes, workspace, launch.splits, nullptr);
        });
#else
    return {};
#endif
  }
  EXPECT_TRUE(ids.guards_intact());
  return ids.download();
}

template <class T>
void make_data(const Case& c, std::vector<T>& q, std::vector<T>& k) {
  q = random_values<T>(c.batch.tokens * c.heads * c.dim, 1);
  k = random_values<T>(c.batch.keys * c.key_heads * c.dim, 2);
  std::mt19937 random(3);
  if (c.data == Data::kWhole || c.data == Data::kNan) {
    for (auto* values : {&q, &k})
      for (T& x : *values)
        x = from_double<T>(static_cast<int>(random() % 3) - 1);
  } else if (c.data == Data::kEqual) {
    for (T& x : k)
      x = from_double<T>(0.5);
  } else if (c.data == Data::kRising) { // every block beats all before it
    for (T& x : q)
      x = from_double<T>(1);
    std::fill(k.begin(), k.end(), from_double<T>(0));
    for (int64_t i = 0; i < c.batch.keys * c.key_heads; ++i) { // two digits: exact in 16 bits
      const int64_t number = i / c.key_heads / c.block_size;
      k[static_cast<size_t>(i * c.dim)] = from_double<T>(static_cast<double>(number % 256));
      k[static_cast<size_t>(i * c.dim + 1)] =
          from_double<T>(static_cast<double>(number / 256 * 256));
    }
  }
  if (c.data == Data::kNan) {
    const T nan = from_double<T>(std::numeric_limits<double>::quiet_NaN());
    for (int64_t key = 0; key < c.batch.keys; key += 1 + random() % 300)
      k[static_cast<size_t>(key * c.key_heads * c.dim + random() % (c.key_heads * c.dim))] = nan;
    for (int64_t t = 0; t < c.batch.tokens; t += 1 + random() % 50)
      q[static_cast<size_t>(t * c.heads * c.dim + random() % (c.heads * c.dim))] = nan;
  }
  // What lies behind the last document must not be read.
  const int64_t real = c.batch.first_query(c.batch.fragments());
  const T nan = from_double<T>(std::numeric_limits<double>::quiet_NaN());
  for (int64_t i = real * c.heads * c.dim; i < static_cast<int64_t>(q.size()); ++i)
    q[static_cast<size_t>(i)] = nan;
}

template <class T>
void check_ids(const Case& c, const std::vector<T>& q, const std::vector<T>& k,
               const std::vector<int32_t>& ids) {
  const auto tokens = c.batch.describe();
  const bool exact = c.data != Data::kNormal;
  const int64_t rows = c.heads * c.batch.tokens;
  std::atomic<int64_t> wrong_row = -1;
  std::vector<double> k_double(k.size());
  for (size_t i = 0; i < k.size(); ++i)
    k_double[i] = to_double(k[i]);

  const auto row_is_right = [&](int64_t row) {
    const int64_t head = row / c.batch.tokens, t = row % c.batch.tokens;
    const int32_t* got = ids.data() + row * c.top_k;
    const Batch::Token& token = tokens[static_cast<size_t>(t)];
    const int visible =
        token.position < 0 ? 0 : static_cast<int>(token.position / c.block_size + 1);
    const int kept = std::min(visible, c.top_k);
    for (int slot = 0; slot < c.top_k; ++slot) {
      if (slot >= kept ? got[slot] != -1 : got[slot] < 0 || got[slot] >= visible)
        return false;
      if (slot > 0 && slot < kept && got[slot] <= got[slot - 1])
        return false;
    }
    if (visible <= c.top_k)
      return true;
    for (int i = 0; i < c.init_blocks; ++i)
      if (got[i] != i)
        return false;
    for (int i = 0; i < c.local_blocks; ++i)
      if (got[c.top_k - 1 - i] != visible - 1 - i)
        return false;

    // Scores of the blocks that are not forced, with the bound of their rounding.
    struct Block {
      double score, bound;
      int id;
    };
    std::vector<Block> blocks;
    const int64_t key_head = head / (c.heads / c.key_heads);
    std::vector<double> query(static_cast<size_t>(c.dim));
    for (int d = 0; d < c.dim; ++d)
      query[d] = c.scale * to_double(q[static_cast<size_t>((t * c.heads + head) * c.dim + d)]);
    for (int b = c.init_blocks; b < visible - c.local_blocks; ++b) {
      Block block = {-INFINITY, 0, b};
      for (int64_t j = int64_t{b} * c.block_size;
           j < std::min<int64_t>((b + 1) * int64_t{c.block_size}, token.position + 1); ++j) {
        const double* key =
            k_double.data() + ((token.first_key + j) * c.key_heads + key_head) * c.dim;
        double sum = 0, magnitude = 0;
        for (int d = 0; d < c.dim; ++d) {
          sum += query[d] * key[d];
          magnitude += std::abs(query[d] * key[d]);
        }
        if (std::isnan(sum) || sum > block.score || std::isnan(block.score))
          block.score = std::isnan(block.score) ? block.score : sum;
        block.bound = std::max(block.bound, magnitude * c.dim * std::ldexp(1.0, -23));
      }
      blocks.push_back(block);
    }
    const auto better = [](const Block& a, const Block& b) {
      if (std::isnan(a.score) != std::isnan(b.score))
        return std::isnan(b.score);
      return a.score != b.score && !std::isnan(a.score) ? a.score > b.score : a.id < b.id;
    };
    const size_t places = c.top_k - c.init_blocks - c.local_blocks;
    const std::set<int> chosen(got + c.init_blocks, got + c.init_blocks + places);
    if (exact) {
      std::sort(blocks.begin(), blocks.end(), better);
      for (size_t i = 0; i < places; ++i)
        if (!chosen.count(blocks[i].id))
          return false;
      return true;
    }
    double worst_kept = INFINITY, best_left = -INFINITY, bound = 0;
    for (const Block& block : blocks) {
      if (chosen.count(block.id))
        worst_kept = std::min(worst_kept, block.score);
      else
        best_left = std::max(best_left, block.score);
      bound = std::max(bound, block.bound);
    }
    return best_left <= worst_kept + 2 * bound;
  };
  parallel_for((rows + c.check_every - 1) / c.check_every, [&](int64_t i) {
    if (!row_is_right(i * c.check_every))
      wrong_row = i * c.check_every;
  });
  if (wrong_row >= 0) {
    const int64_t row = wrong_row;
    std::string text;
    for (int slot = 0; slot < c.top_k; ++slot)
      text += std::to_string(ids[static_cast<size_t>(row * c.top_k + slot)]) + " ";
    FAIL() << "head " << row / c.batch.tokens << " token " << row % c.batch.tokens << " position "
           << tokens[static_cast<size_t>(row % c.batch.tokens)].position << " got " << text;
  }
}

// Whether the Hopper kernel took the case.
template <class T>
bool check_case(const Case& c) {
  SCOPED_TRACE(c.name);
  std::vector<T> q, k;
  make_data(c, q, k);
  {
    SCOPED_TRACE("portable");
    check_ids(c, q, k, run_select<T>(c, q, k));
  }
  SCOPED_TRACE("sm90");
  const auto ids = run_select<T>(c, q, k, {Kind::kSm90});
  if (!ids.empty())
    check_ids(c, q, k, ids);
  return !ids.empty();
}
bool check_both(const Case& c) {
  const bool bf16 = check_case<__nv_bfloat16>(c), fp16 = check_case<__half>(c);
  return bf16 && fp16;
}

bool has_hopper() {
#if THRESHER_CUDA_SM90
  return cuda::device_facts().major == 9;
#else
  return false;
#endif
}

const std::vector<int64_t> kLengths = {5, 0, 129, 1, 900, 128, 127, 0, 1500, 64};

TEST(Select, ExactScores) {
  for (Data data : {Data::kWhole, Data::kEqual, Data::kNan})
    check_both({"exact", packed(kLengths, 13), 4, 1, 128, 64, 6, 0, 1, data});
}
TEST(Select, RandomScores) {
  for (Data data : {Data::kNormal, Data::kRising})
    check_both({"random", packed(kLengths, 13), 4, 1, 128, 64, 6, 0, 1, data});
}
TEST(Select, HeadDimensions) {
  for (int dim : {8, 48, 64, 80, 96, 128, 136, 192, 200, 256})
    for (Data data : {Data::kWhole, Data::kNormal})
      check_both({"dim", packed({700, 3, 400}), 2, 1, dim, 32, 5, 0, 1, data});
}
TEST(Select, BlockSizes) {
  for (int block_size : {32, 64, 128, 256})
    check_both({"block", packed({1900, 77, 2049}, 3), 4, 2, 64, block_size, 3, 0, 1});
}
TEST(Select, HeadRatios) {
  for (auto [heads, key_heads] : {std::pair{1, 1}, {2, 2}, {6, 1}, {12, 2}, {16, 1}, {160, 1}})
    check_both({"ratio", packed({600, 10, 333}), heads, key_heads, 64, 32, 4, 0, 1});
}
TEST(Select, ForcedBlocks) {
  for (auto [init, local] :
       {std::pair{0, 0}, {1, 1}, {0, 2}, {2, 0}, {3, 3}, {6, 0}, {0, 6}, {1, 0}})
    for (Data data : {Data::kWhole, Data::kNan})
      check_both({"forced", packed({1000, 31, 650}), 2, 1, 64, 32, 6, init, local, data});
}
TEST(Select, EveryTopK) {
  for (int top_k : {1, 2, 7, 16, 33, 64, 100, 128})
    check_both({"top_k", packed({5000, 40}), 2, 1, 64, 32, top_k, 0, 1});
}
TEST(Select, NegativeAndZeroScale) {
  check_both({"negative", packed({900}), 2, 1, 64, 32, 5, 0, 1, Data::kWhole, -0.5});
  check_both({"zero", packed({900}), 2, 1, 64, 32, 5, 0, 1, Data::kWhole, 0.0});
}
TEST(Select, EqualRows) {
  for (bool head_major : {false, true})
    for (int block_size : {32, 128}) {
      Case c = {"rows", rows(3, 700), 2, 1, 64, block_size, 4};
      c.head_major = head_major;
      check_both(c);
    }
}
TEST(Select, FragmentsWithSharedKeys) {
  for (int rank : {0, 2})
    check_both({"context parallel", context_parallel({1000, 64, 0, 333, 2000, 7}, 3, rank), 4, 2,
                64, 32, 5});
  Batch few; // few queries, many keys: split over the GPU
  few.q_begin = {0, 100};
  few.k_begin = {3};
  few.k_len = {60000};
  few.tokens = 100;
  few.keys = 60003;
  check_both({"few queries", few, 1, 1, 64, 64, 16, 1, 2});
  check_both({"few queries, large K", few, 1, 1, 64, 64, 128, 1, 2});
}
TEST(Select, QueriesWithoutKeys) {
  Batch batch;
  batch.q_begin = {0, 76, 110, 256};
  batch.k_begin = {0, 1, 2};
  batch.k_len = {1, 1, 1};
  batch.tokens = 256;
  batch.keys = 3;
  check_both({"one key each", batch, 2, 1, 64, 32, 4});
}
TEST(Select, ManyShortDocumentsBesideALongOne) {
  std::vector<int64_t> lengths(10000, 7);
  lengths.insert(lengths.begin() + 3000, 20000);
  Case c = {"short and long", packed(lengths), 1, 1, 64, 128, 16};
  c.check_every = 17;
  check_both(c);
}
TEST(Select, LongDocument) {
  Case c = {"long", packed({40000}), 4, 1, 128, 128, 16, 0, 1, Data::kNormal};
  c.check_every = 331;
  check_both(c);
}

// What the Hopper kernel must take and get right.
TEST(Select, Hopper) {
  if (!has_hopper())
    GTEST_SKIP() << "needs compute capability 9.0";
  const auto check = [](Case c, int64_t every = 1) {
    c.check_every = every;
    EXPECT_TRUE(check_both(c)) << "not taken";
  };
  for (int block_size : {64, 128, 256})
    for (int dim : {40, 64, 96, 128})
      for (Data data : {Data::kWhole, Data::kNormal})
        check({"dims", packed({2900, 0, 77, 2049, 1}, 3), 4, 2, dim, block_size, 3, 0, 1, data},
              13);
  for (auto [heads, key_heads] : {std::pair{1, 1}, {2, 2}, {6, 1}, {12, 2}, {16, 1}, {300, 1}})
    check({"ratio", packed({600, 10, 733}), heads, key_heads, 64, 64, 4, 0, 1}, 3);
  for (int top_k : {1, 2, 7, 16, 17, 18, 33})
    for (int block_size : {64, 128})
      for (Data data : {Data::kWhole, Data::kEqual, Data::kRising, Data::kNan})
        check({"top_k", packed({5500, 40}), 2, 1, 128, block_size, top_k, 0, 1, data}, 29);
  for (auto [init, local] : {std::pair{1, 1}, {0, 2}, {3, 3}, {5, 1}, {0, 6}})
    check({"forced", packed({1900, 31, 1050}), 2, 1, 64, 64, 6, init, local});
  for (int block_size : {64, 128, 256})
    check({"context parallel", context_parallel({3000, 64, 0, 933, 2000, 7}, 3, 1), 4, 2, 128,
           block_size, 3},
          7);
}

// Lists of 33 to 64 take another loop than shorter ones.
TEST(Select, HopperLongestLists) {
  if (!has_hopper())
    GTEST_SKIP() << "needs compute capability 9.0";
  const auto check = [](Case c) {
    c.check_every = 29;
    EXPECT_TRUE(check_both(c)) << "not taken";
  };
  for (int dim : {64, 128})
    for (Data data : {Data::kWhole, Data::kNormal, Data::kEqual, Data::kRising, Data::kNan})
      check({"K 65", packed({5500, 40, 4700}, 3), 2, 1, dim, 64, 65, 0, 1, data});
  for (int top_k : {34, 35, 50})
    for (int block_size : {64, 128})
      check({"K", packed({7000, 1}), 4, 2, 96, block_size, top_k, 0, 1});
  check({"large blocks", packed({18000}), 1, 1, 64, 256, 64, 1, 2});
  check({"K 128", packed({9000}), 1, 1, 64, 64, 128, 32, 32}); // rows of 129 words: over 48 KB
}

// Long rows whose every block enters, or ties with the last that did.
TEST(Select, HopperAdversarialScores) {
  if (!has_hopper())
    GTEST_SKIP() << "needs compute capability 9.0";
  for (int top_k : {16, 33, 65})
    for (Data data : {Data::kEqual, Data::kRising}) {
      Case c = {"adversarial", packed({30000, 9000}), 4, 1, 128, 64, top_k, 0, 1, data};
      c.check_every = 331;
      EXPECT_TRUE(check_both(c)) << "not taken";
    }
}

// Cut keys: the same ids.
TEST(Select, SameIdsFromEveryHopperLaunchShape) {
  if (!has_hopper())
    GTEST_SKIP() << "needs compute capability 9.0";
  using T = __nv_bfloat16;
  for (int block_size : {64, 128, 256})
    for (int top_k : {16, 32, 66}) {
      Case c = {"hopper",     packed({9000, 20000, 5}), 4, 1, 128, block_size, top_k, 1, 1,
                Data::kNormal};
      std::vector<T> q, k;
      make_data(c, q, k);
      const auto ids = run_select<T>(c, q, k, {Kind::kSm90, 0, 1});
      ASSERT_FALSE(ids.empty());
      for (int splits : {2, 3, 5, 8})
        ASSERT_EQ(ids, run_select<T>(c, q, k, {Kind::kSm90, 0, splits})) << splits << " splits";
    }
}

// Cut keys, lists in global memory, other documents in the batch: the same ids.
TEST(Select, SameIdsFromEveryLaunchShape) {
  using T = __nv_bfloat16;
  for (int top_k : {16, 100}) {
    Case alone = {"alone", packed({9000}), 4, 1, 128, 64, top_k, 1, 1, Data::kNormal};
    std::vector<T> q, k;
    make_data(alone, q, k);
    const auto ids = run_select<T>(alone, q, k);
    for (int splits : {1, 2, 5, 8})
      for (size_t shared_limit : {size_t{0}, size_t{1}}) {
        ASSERT_EQ(ids, run_select<T>(alone, q, k, {Kind::kPortable, shared_limit, splits}))
            << splits << " splits, shared limit " << shared_limit;
      }
    Case among = alone;
    among.batch = packed({9000, 20000, 5});
    std::vector<T> more_q, more_k;
    make_data(among, more_q, more_k);
    std::copy(q.begin(), q.end(), more_q.begin());
    std::copy(k.begin(), k.end(), more_k.begin());
    const auto more_ids = run_select<T>(among, more_q, more_k);
    for (int head = 0; head < alone.heads; ++head)
      for (int64_t i = 0; i < 9000 * top_k; ++i)
        ASSERT_EQ(ids[static_cast<size_t>(head * 9000 * top_k + i)],
                  more_ids[static_cast<size_t>(head * among.batch.tokens * top_k + i)])
            << "head " << head << " token " << i / top_k;
  }
}

} // namespace
} // namespace thresher::test
