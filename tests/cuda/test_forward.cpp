// Portable sparse and warm-up forward against loops over doubles.
#include "forward_case.h"

#include "cuda/kernel.h"
#include "cuda/portable/forward/forward.h"

namespace thresher::test {
namespace {

template <class T>
void run(const ForwardCase& c, ForwardRun<T>& call, cudaStream_t stream = nullptr) {
  const cuda::portable::forward::ForwardOptions options = {c.pass_bytes};
  const auto& kernel = cuda::portable::warmup_forward;
  const size_t bytes =
      c.dense ? kernel.workspace_size(call.params, call.shapes)
              : cuda::portable::forward::forward_workspace_size(call.params, call.shapes, options);
  const DeviceArray<char> memory(static_cast<int64_t>(bytes));
  const Workspace workspace = {memory.data(), bytes};
  if (c.dense)
    kernel.run(call.params, call.shapes, workspace, stream);
  else
    cuda::portable::forward::run_forward(call.params, call.shapes, workspace, options, stream);
  CUDA_CHECK(cudaDeviceSynchronize());
  EXPECT_TRUE(memory.guards_intact());
}

template <class T>
using Change = std::function<void(Inputs<T>&)>;

template <class T>
void check(const ForwardCase& c, const Change<T>& change = nullptr) {
  SCOPED_TRACE(c.name + (c.dense ? " dense" : "") + (std::is_same_v<T, __half> ? " fp16" : ""));
  Inputs<T> x = make_inputs<T>(c);
  if (change)
    change(x);
  const std::vector<int32_t> ids = c.dense ? std::vector<int32_t>() : make_ids(c);
  ForwardRun<T> call(c, x, ids);
  run(c, call);
  const ForwardResults first = call.results(c);
  expect_right(c, x, ids, first);
  call.poison();
  run(c, call);
  const ForwardResults second = call.results(c);
  const auto same = [](const std::vector<double>& a, const std::vector<double>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) {
      return x == y || (std::isnan(x) && std::isnan(y));
    });
  };
  EXPECT_TRUE(same(first.out, second.out) && same(first.lse, second.lse) &&
              same(first.proxy_lse, second.proxy_lse))
      << "two runs differ";
}

// Sparse and dense, bf16 and fp16.
void check_all(ForwardCase c) {
  for (bool dense : {false, true}) {
    c.dense = dense;
    check<__nv_bfloat16>(c);
    check<__half>(c);
  }
}

ForwardCase make_case(std::string name, Batch batch) {
  ForwardCase c;
  c.name = std::move(name);
  c.batch = std::move(batch);
  return c;
}

const std::vector<int64_t> kLengths = {5, 0, 129, 1, 700, 128, 127, 0, 300, 2};

TEST(Forward, OddDocumentsAndPadding) {
  check_all(make_case("odd", packed(kLengths, 13)));
}
TEST(Forward, HeadRatios) {
  for (auto [q, kv, proxy, proxy_kv] : {std::array{1, 1, 1, 1},
                                        {4, 4, 4, 4},
                                        {4, 1, 4, 1},
                                        {4, 4, 1, 1},
                                        {16, 2, 4, 1},
                                        {6, 1, 1, 1},
                                        {12, 2, 6, 3},
                                        {12, 4, 6, 2},
                                        {24, 4, 2, 1},
                                        {12, 3, 4, 4},
                                        {64, 4, 4, 1},
                                        {40, 2, 1, 1}}) {
    ForwardCase c = make_case("heads " + std::to_string(q) + "/" + std::to_string(kv) + "/" +
                                  std::to_string(proxy) + "/" + std::to_string(proxy_kv),
                              packed({200, 3, 77}, 5));
    c.q_heads = q;
    c.kv_heads = kv;
    c.proxy_heads = proxy;
    c.proxy_kv_heads = proxy_kv;
    c.dim = c.proxy_dim = 64;
    c.block_size = 32;
    check_all(c);
  }
}
TEST(Forward, HeadDimensions) {
  for (int dim : {8, 48, 64, 72, 96, 128, 136, 192, 200, 256}) {
    ForwardCase c = make_case("dim " + std::to_string(dim), packed({333, 70}, 3));
    c.dim = dim;
    c.proxy_dim = dim == 64 ? 256 : dim == 256 ? 64 : dim;
    c.block_size = 64;
    check_all(c);
  }
}
TEST(Forward, BlockSizes) {
  for (int block_size : {32, 64, 128, 256})
    for (int dim : {64, 128, 256}) {
      ForwardCase c =
          make_case("block " + std::to_string(block_size) + " dim " + std::to_string(dim),
                    packed({1100, 60, 257}, 3));
      c.block_size = block_size;
      c.dim = c.proxy_dim = dim;
      c.q_heads = 2;
      c.check_every = 3;
      check<__nv_bfloat16>(c);
      check<__half>(c);
    }
}
TEST(Forward, EveryTopK) {
  for (int top_k : {1, 2, 15, 33, 64, 128})
    for (Ids ids : {Ids::kRandom, Ids::kHoles}) {
      ForwardCase c = make_case("top_k " + std::to_string(top_k), packed({1500, 40}));
      c.top_k = top_k;
      c.ids = ids;
      c.block_size = 32;
      c.dim = c.proxy_dim = 64;
      c.check_every = 3;
      check<__nv_bfloat16>(c);
      check<__half>(c);
    }
}
TEST(Forward, IdsFromOutside) {
  for (Ids ids : {Ids::kHoles, Ids::kAll, Ids::kSame, Ids::kNone}) {
    ForwardCase c = make_case("ids", packed(kLengths, 9));
    c.ids = ids;
    c.block_size = 32;
    c.top_k = 40; // more than there are blocks
    check<__nv_bfloat16>(c);
  }
}
TEST(Forward, Layouts) {
  for (Layout layout : {Layout::kHeadMajor, Layout::kBatchedHeads}) {
    ForwardCase c = make_case("layout", rows(3, 190));
    c.layout = layout;
    c.dim = 72;
    check_all(c);
  }
  ForwardCase c = make_case("strides and documents", packed(kLengths, 4));
  c.layout = Layout::kHeadMajor;
  check_all(c);
}
TEST(Forward, FragmentsWithSharedKeys) {
  for (int rank : {0, 2})
    check_all(make_case("context parallel", context_parallel({500, 64, 0, 333, 700, 7}, 3, rank)));
}
TEST(Forward, QueriesWithoutKeys) {
  Batch batch;
  batch.q_begin = {0, 76, 110, 256};
  batch.k_begin = {0, 1, 2};
  batch.k_len = {1, 1, 1};
  batch.tokens = 256;
  batch.keys = 3;
  check_all(make_case("one key each", batch));
  batch.q_begin = {0, 0, 608, 1024, 1024};
  batch.k_begin = {0, 638, 1238, 2078};
  batch.k_len = {638, 600, 840, 900};
  batch.tokens = 1030;
  batch.keys = 2978;
  check_all(make_case("unused keys", batch));
}
TEST(Forward, WithoutProxy) {
  ForwardCase c = make_case("no proxy", packed({300}));
  c.proxy = false;
  check_all(c);
}
TEST(Forward, Scales) {
  for (double scale : {-0.125, 1e-30, 1.0}) {
    ForwardCase c = make_case("scale", packed({300, 20}));
    c.scale = c.proxy_scale = scale;
    check_all(c);
  }
}
TEST(Forward, SmallPasses) {
  ForwardCase c = make_case("passes", packed({1000, 64, 400}, 30));
  c.block_size = 64;
  c.pass_bytes = 1 << 20;
  check<__nv_bfloat16>(c);
}
TEST(Forward, LongerBatch) {
  ForwardCase c = make_case("long", packed({6000, 700, 3000}, 17));
  c.q_heads = 16;
  c.proxy_heads = 4;
  c.top_k = 16;
  c.check_every = 61;
  check_all(c);
}
TEST(Forward, ManyShortDocuments) {
  std::vector<int64_t> lengths(3000, 7);
  lengths.insert(lengths.begin() + 1000, 3000);
  ForwardCase c = make_case("short", packed(lengths));
  c.check_every = 29;
  check_all(c);
}

// NaN and infinities stay in the rows that read them.
TEST(Forward, NotFiniteInputs) {
  using T = __nv_bfloat16;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (double value : {nan, double(INFINITY), -double(INFINITY)})
    for (auto member :
         {&Inputs<T>::q, &Inputs<T>::k, &Inputs<T>::v, &Inputs<T>::q_proxy, &Inputs<T>::k_proxy})
      for (bool dense : {false, true}) {
        ForwardCase c = make_case("not finite", packed({300, 500}));
        c.dense = dense;
        c.block_size = 64;
        check<T>(c, [&](Inputs<T>& x) {
          const size_t token = (x.*member).size() / 800;
          // In the middle of a block that later tokens of the document choose, and in its last one.
          for (size_t t : {size_t{130}, size_t{299}, size_t{301}, size_t{790}})
            (x.*member)[t * token + token / 3] = from_double<T>(value);
        });
      }
}

// Logits of +-30,000 plus a little: known to 30,000 * eps only.
TEST(Forward, LargeLogits) {
  using T = __nv_bfloat16;
  for (double sign : {1.0, -1.0})
    for (bool dense : {false, true}) {
      ForwardCase c = make_case("large", packed({290, 140}));
      c.dense = dense;
      c.block_size = 32;
      c.scale = c.proxy_scale = 1;
      Inputs<T> x = make_inputs<T>(c);
      const auto shift = [](std::vector<T>& values, int dim, double first) {
        for (size_t i = 0; i < values.size(); ++i)
          values[i] =
              i % dim == 0 ? from_double<T>(first) : from_double<T>(0.25 * to_double(values[i]));
      };
      shift(x.q, c.dim, sign * 175);
      shift(x.k, c.dim, 175);
      shift(x.q_proxy, c.proxy_dim, sign * 175);
      shift(x.k_proxy, c.proxy_dim, 175);
      const auto ids = c.dense ? std::vector<int32_t>() : make_ids(c);
      ForwardRun<T> call(c, x, ids);
      run(c, call);
      const ForwardResults got = call.results(c);
      const auto tokens = c.batch.describe();
      double error = 0, norm = 0, lse_error = 0;
      for (int64_t t = 0; t < c.batch.tokens; ++t)
        for (int h = 0; h < c.q_heads; ++h) {
          std::vector<int64_t> keys;
          for (int64_t j = 0; j <= tokens[t].position; ++j) {
            const int32_t* row = ids.data() + (h / 2 * c.batch.tokens + t) * c.top_k;
            if (c.dense || std::find(row, row + c.top_k, j / c.block_size) != row + c.top_k)
              keys.push_back(tokens[t].first_key + j);
          }
          std::vector<double> out(c.dim);
          double lse;
          const int64_t at = t * c.q_heads + h;
          reference_row<T, false>(x.q.data() + at * c.dim, x.k.data(), x.v.data(), keys, c.kv_heads,
                                  h / 2, c.dim, 1.0, out.data(), &lse);
          lse_error = std::max(lse_error, std::abs(lse - got.lse[at]));
          for (int d = 0; d < c.dim; ++d) {
            const double difference = got.out[at * c.dim + d] - out[d];
            error += difference * difference;
            norm += out[d] * out[d];
          }
        }
      const double slack = 64 * 30625 * 0x1p-23;
      EXPECT_LE(lse_error, slack);
      EXPECT_LE(std::sqrt(error / norm), slack + 0x1p-7);
      for (double x : got.proxy_lse)
        EXPECT_TRUE(std::isfinite(x));
    }
}

// A captured call takes the selection of the replay, not of the capture.
TEST(Forward, CapturedGraph) {
  using T = __nv_bfloat16;
  for (bool dense : {false, true}) {
    ForwardCase c = make_case("graph", packed({400, 90}, 6));
    c.dense = dense;
    c.block_size = 32;
    const Inputs<T> x = make_inputs<T>(c);
    const auto ids = make_ids(c);
    ForwardRun<T> call(c, x, std::vector<int32_t>(ids.size(), -1));
    const auto& kernel = dense ? cuda::portable::warmup_forward : cuda::portable::sparse_forward;
    const size_t bytes = kernel.workspace_size(call.params, call.shapes);
    const DeviceArray<char> memory(static_cast<int64_t>(bytes));
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    kernel.run(call.params, call.shapes, {memory.data(), bytes}, stream);
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphLaunch(executable, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    if (!dense)
      CUDA_CHECK(cudaMemcpy(call.params.block_indices.data, ids.data(),
                            ids.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
    call.poison();
    CUDA_CHECK(cudaGraphLaunch(executable, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    expect_right(c, x, ids, call.results(c));
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

} // namespace
} // namespace thresher::test
