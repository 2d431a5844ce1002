// The Hopper kernel of the KL rows against loops over doubles, on every shape that it takes, and
// what it refuses. The portable kernel's tests are those of the backward.
#include "backward_case.h"

#if THRESHER_CUDA_SM90

namespace thresher::test {
namespace {

using bf16 = __nv_bfloat16;
using fp16 = __half;

// q, kv, proxy, proxy key heads; 16, 8 and 4 main heads a proxy head.
constexpr std::array<int, 4> kHeads[] = {{64, 4, 4, 1}, {16, 1, 1, 1}, {32, 1, 2, 2},
                                         {32, 4, 4, 2}, {8, 1, 1, 1},  {16, 2, 4, 1},
                                         {4, 1, 1, 1},  {12, 1, 3, 1}, {24, 2, 6, 3}};
const std::vector<int64_t> kLengths = {5, 0, 129, 1, 700, 128, 127, 0, 333, 2};

BackwardCase make_case(std::string name, Batch batch, std::array<int, 4> heads = {16, 2, 4, 1}) {
  BackwardCase c;
  c.name = std::move(name);
  c.batch = std::move(batch);
  c.q_heads = heads[0];
  c.kv_heads = heads[1];
  c.proxy_heads = heads[2];
  c.proxy_kv_heads = heads[3];
  c.top_k = 3;
  c.kl_alone = true;
  c.kl_kernel = &cuda::sm90::proxy_kl;
  return c;
}

class Kl : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::device_facts().major != 9)
      GTEST_SKIP() << "needs compute capability 9.0";
  }
};

// Right, and the same bits once more.
template <class T>
void check(const BackwardCase& c, const Change<T>& change = nullptr) {
  SCOPED_TRACE(c.name + (std::is_same_v<T, fp16> ? " fp16" : ""));
  const BackwardInputs<T> in = make_backward_inputs<T>(c, change);
  BackwardRun<T> call(c, in);
  ASSERT_EQ(cuda::sm90::proxy_kl.refuses(call.kl_params, call.shapes, cuda::device_facts()), "");
  call.run();
  const Gradients first = call.results();
  expect_right<T>(c, in, first);
  call.poison();
  call.run();
  const std::vector<double> again = call.results().kl;
  ASSERT_EQ(first.kl.size(), again.size());
  for (size_t i = 0; i < again.size(); ++i)
    ASSERT_TRUE(first.kl[i] == again[i] || (std::isnan(first.kl[i]) && std::isnan(again[i])))
        << "row " << i << " differs from run to run";
}
void check_both(const BackwardCase& c) {
  check<bf16>(c);
  check<fp16>(c);
}

TEST_F(Kl, OneBlock) { // the least that can be wrong
  check_both(make_case("one block", packed({64}), {16, 1, 1, 1}));
}
TEST_F(Kl, OneToken) {
  for (auto heads : kHeads)
    check<bf16>(make_case("one token", packed({1}), heads));
}
TEST_F(Kl, HeadRatiosAndDimensions) {
  for (auto heads : kHeads)
    for (int proxy_dim : {64, 128}) {
      BackwardCase c =
          make_case("heads " + std::to_string(heads[0]) + "/" + std::to_string(heads[1]) + "/" +
                        std::to_string(heads[2]) + "/" + std::to_string(heads[3]) + " proxy dim " +
                        std::to_string(proxy_dim),
                    packed(kLengths, 13), heads);
      c.proxy_dim = proxy_dim;
      check_both(c);
    }
}
TEST_F(Kl, OnlyPaddingAndEmptyDocuments) {
  check_both(make_case("nothing", packed({0, 0}, 9)));
}
TEST_F(Kl, IdsFromOutside) {
  for (Ids ids : {Ids::kHoles, Ids::kAll, Ids::kSame, Ids::kNone})
    for (int top_k : {1, 20}) { // 20: more than there are blocks
      BackwardCase c =
          make_case("ids " + std::to_string(static_cast<int>(ids)), packed(kLengths, 9));
      c.ids = ids;
      c.top_k = top_k;
      check<bf16>(c);
    }
}
TEST_F(Kl, Layouts) {
  for (Layout layout : {Layout::kHeadMajor, Layout::kBatchedHeads}) {
    BackwardCase c = make_case("layout", rows(3, 450));
    c.layout = layout;
    check_both(c);
  }
  BackwardCase c = make_case("strides and documents", packed(kLengths, 4), {64, 4, 4, 1});
  c.layout = Layout::kHeadMajor;
  check_both(c);
}
TEST_F(Kl, FragmentsWithSharedKeys) {
  for (int rank : {0, 2})
    check_both(make_case("context parallel", context_parallel({700, 64, 0, 333, 200, 7}, 3, rank)));
}
TEST_F(Kl, QueriesWithoutKeys) {
  Batch batch;
  batch.q_begin = {0, 0, 208, 424, 424};
  batch.k_begin = {0, 238, 538, 878};
  batch.k_len = {238, 150, 340, 200};
  batch.tokens = 430;
  batch.keys = 1078;
  check_both(make_case("unused keys", batch));
}
TEST_F(Kl, Scales) {
  for (double scale : {-0.125, 1e-30, 1.0}) {
    BackwardCase c = make_case("scale " + std::to_string(scale), packed({200, 20}));
    c.scale = c.proxy_scale = scale;
    check_both(c);
  }
}
// One list of all tokens, in several passes over windows.
TEST_F(Kl, EveryTokenSelectsTheSameBlock) {
  BackwardCase c = make_case("same", packed({20'000}));
  c.ids = Ids::kSame;
  c.top_k = 128; // 16 KB of partial sums a token
  check<bf16>(c);
}
TEST_F(Kl, ManyShortDocuments) {
  std::vector<int64_t> lengths(2'000, 7);
  lengths.insert(lengths.begin() + 1'000, 1'500);
  check<bf16>(make_case("short", packed(lengths), {64, 4, 4, 1}));
}

// What one token sees stays with it: earlier tokens of the block, rows of the same tile.
TEST_F(Kl, NotFiniteInputs) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (auto heads : {std::array{16, 1, 1, 1}, std::array{16, 2, 4, 1}})
    for (double value : {nan, double(INFINITY), -double(INFINITY)})
      for (auto member :
           {&Inputs<bf16>::q, &Inputs<bf16>::k, &Inputs<bf16>::q_proxy, &Inputs<bf16>::k_proxy})
        check<bf16>(make_case("not finite", packed({300, 500}), heads), [&](Inputs<bf16>& x) {
          const size_t token = (x.*member).size() / 800;
          for (size_t t : {size_t{130}, size_t{299}, size_t{301}, size_t{790}})
            (x.*member)[t * token + token / 3] = from_double<bf16>(value);
        });
}
TEST_F(Kl, LargeLogits) { // known to 30,000 * eps only: finite is what counts
  for (double sign : {1.0, -1.0}) {
    BackwardCase c = make_case("large", packed({290, 140}));
    c.scale = c.proxy_scale = 1;
    const auto in = make_backward_inputs<bf16>(c, [&](Inputs<bf16>& x) {
      const auto shift = [](std::vector<bf16>& values, double first) {
        for (size_t i = 0; i < values.size(); ++i)
          values[i] = from_double<bf16>(i % 128 == 0 ? first : 0.25 * to_double(values[i]));
      };
      shift(x.q, sign * 175);
      shift(x.k, 175);
      shift(x.q_proxy, sign * 175);
      shift(x.k_proxy, 175);
    });
    BackwardRun<bf16> call(c, in);
    call.run();
    for (double x : call.results().kl)
      EXPECT_TRUE(std::isfinite(x));
  }
}
TEST_F(Kl, AllZero) {
  check<bf16>(make_case("zeros", packed({300, 60})), [](Inputs<bf16>& x) {
    for (auto* values : {&x.q, &x.k, &x.q_proxy, &x.k_proxy})
      std::fill(values->begin(), values->end(), from_double<bf16>(0));
  });
}

// A captured call takes the LSE of the replay, not of the capture.
TEST_F(Kl, CapturedGraph) {
  const BackwardCase c = make_case("graph", packed({400, 90}, 6));
  const auto in = make_backward_inputs<bf16>(c);
  BackwardInputs<bf16> before = in;
  std::fill(before.proxy_lse.begin(), before.proxy_lse.end(), 0.f);
  BackwardRun<bf16> call(c, before);
  const DeviceArray<char> memory(static_cast<int64_t>(call.workspace_size()));
  const cudaGraphExec_t graph = make_graph(
      1, [&](cudaStream_t stream) { call.enqueue({memory.data(), memory.bytes()}, stream); });
  CUDA_CHECK(cudaGraphLaunch(graph, nullptr));
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaMemcpy(call.params.proxy_lse.data, in.proxy_lse.data(),
                        in.proxy_lse.size() * sizeof(float), cudaMemcpyHostToDevice));
  call.poison();
  CUDA_CHECK(cudaGraphLaunch(graph, nullptr));
  CUDA_CHECK(cudaDeviceSynchronize());
  expect_right(c, in, call.results());
  CUDA_CHECK(cudaGraphExecDestroy(graph));
}

TEST(KlDispatch, TakesAndRefuses) {
  const cuda::DeviceFacts hopper = {.sm_count = 132, .major = 9};
  KlParams p;
  Shapes s;
  for (Tensor* tensor : {&p.q, &p.k, &p.q_proxy, &p.k_proxy, &p.block_indices})
    tensor->data = reinterpret_cast<void*>(256);
  s.tokens = s.keys = 1'000;
  s.dim = s.proxy_dim = s.block_size = 128;
  const auto reason = [&](std::array<int, 4> heads) {
    s.q_heads = heads[0];
    s.kv_heads = heads[1];
    s.proxy_heads = heads[2];
    s.proxy_kv_heads = heads[3];
    return cuda::sm90::proxy_kl.refuses(p, s, hopper);
  };
  const auto expect_reason = [&](const char* part) {
    EXPECT_NE(reason({64, 4, 4, 1}).find(part), std::string::npos) << reason({64, 4, 4, 1});
  };
  for (auto heads : kHeads)
    EXPECT_EQ(reason(heads), "");
  EXPECT_NE(reason({16, 4, 2, 1}).find("on one kv head"), std::string::npos);
  EXPECT_NE(reason({12, 4, 6, 2}).find("4, 8 or 16"), std::string::npos);
  s.proxy_dim = 96;
  expect_reason("proxy head dimension");
  s.proxy_dim = 64;
  EXPECT_EQ(reason({64, 4, 4, 1}), "");
  s.dim = 64;
  expect_reason("head dimension 128");
  s.dim = 128;
  s.keys = 0;
  expect_reason("needs a key");
  s.keys = 1'000;
  p.block_indices.data = nullptr;
  expect_reason("all visible keys");
}

} // namespace
} // namespace thresher::test

#endif
