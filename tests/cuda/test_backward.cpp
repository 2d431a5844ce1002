// Portable backward, sparse and warm-up, the KL rows alone, and the Hopper backward, against loops
// over doubles.
#include "backward_case.h"

#include "cuda/sm90/common/support.h"

namespace thresher::test {
namespace {

using bf16 = __nv_bfloat16;
using fp16 = __half;

bool same(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) {
    return (x == y && std::signbit(x) == std::signbit(y)) || (std::isnan(x) && std::isnan(y));
  });
}

void expect_same(const Gradients& first, const Gradients& second) {
  EXPECT_TRUE(same(first.dq, second.dq)) << "dq differs from run to run";
  EXPECT_TRUE(same(first.dk, second.dk)) << "dk differs from run to run";
  EXPECT_TRUE(same(first.dv, second.dv)) << "dv differs from run to run";
  EXPECT_TRUE(same(first.dq_proxy, second.dq_proxy)) << "dq_proxy differs from run to run";
  EXPECT_TRUE(same(first.dk_proxy, second.dk_proxy)) << "dk_proxy differs from run to run";
  EXPECT_TRUE(same(first.kl, second.kl)) << "kl differs from run to run";
}

// Once as usual and twice deterministically.
template <class T>
void check(BackwardCase c, const BackwardInputs<T>& in, const Sums& reference) {
  for (bool deterministic : {false, true}) {
    c.deterministic = deterministic;
    SCOPED_TRACE(c.name + (c.dense ? " dense" : "") + (c.deterministic ? " deterministic" : "") +
                 (std::is_same_v<T, fp16> ? " fp16" : ""));
    BackwardRun<T> call(c, in);
    if (const std::string reason = call.refuses();
        deterministic && reason == cuda::sm90::kUnproven) {
      std::printf("not tried: deterministic variant %s\n", reason.c_str());
      continue;
    }
    ASSERT_EQ(call.refuses(), "");
    call.run();
    const Gradients first = call.results();
    expect_right<T>(c, reference, first);
    if (!deterministic)
      continue;
    call.poison();
    call.run();
    expect_same(first, call.results());
  }
}
template <class T>
void check(const BackwardCase& c, const Change<T>& change = nullptr,
           const ChangeUpstream<T>& upstream = nullptr) {
  const BackwardInputs<T> in = make_backward_inputs<T>(c, change, upstream);
  check<T>(c, in, BackwardReference<T>(c, in).sums());
}

// Sparse and dense, bf16 and fp16.
void check_all(BackwardCase c) {
  for (bool dense : {false, true}) {
    c.dense = dense;
    check<bf16>(c);
    check<fp16>(c);
  }
}

BackwardCase make_case(std::string name, Batch batch) {
  BackwardCase c;
  c.name = std::move(name);
  c.batch = std::move(batch);
  return c;
}
void set_heads(BackwardCase& c, int q, int kv, int proxy, int proxy_kv) {
  c.q_heads = q;
  c.kv_heads = kv;
  c.proxy_heads = proxy;
  c.proxy_kv_heads = proxy_kv;
}

const std::vector<int64_t> kLengths = {5, 0, 129, 1, 500, 128, 127, 0, 300, 2};

TEST(Backward, OneBlock) { // the least that can be wrong
  BackwardCase c = make_case("one block", packed({64}));
  set_heads(c, 1, 1, 1, 1);
  check_all(c);
}
TEST(Backward, OneToken) {
  check_all(make_case("one token", packed({1})));
}
TEST(Backward, OddDocumentsAndPadding) {
  check_all(make_case("odd", packed(kLengths, 13)));
}
TEST(Backward, OnlyPaddingAndEmptyDocuments) {
  check_all(make_case("nothing", packed({0, 0}, 9)));
}
TEST(Backward, HeadRatios) {
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
    BackwardCase c = make_case("heads " + std::to_string(q) + "/" + std::to_string(kv) + "/" +
                                   std::to_string(proxy) + "/" + std::to_string(proxy_kv),
                               packed({150, 3, 77}, 5));
    set_heads(c, q, kv, proxy, proxy_kv);
    c.dim = c.proxy_dim = 64;
    c.block_size = 32;
    check_all(c);
  }
}
TEST(Backward, HeadDimensions) {
  for (int dim : {8, 48, 64, 72, 96, 128, 136, 192, 200, 256}) {
    BackwardCase c = make_case("dim " + std::to_string(dim), packed({200, 70}, 3));
    c.dim = dim;
    c.proxy_dim = dim == 64 ? 256 : dim == 256 ? 64 : dim;
    c.block_size = 64;
    check_all(c);
  }
}
TEST(Backward, BlockSizes) {
  for (int block_size : {32, 64, 128, 256})
    for (int dim : {64, 128, 256}) {
      BackwardCase c =
          make_case("block " + std::to_string(block_size) + " dim " + std::to_string(dim),
                    packed({700, 60, 257}, 3));
      set_heads(c, 2, 2, 2, 1);
      c.block_size = block_size;
      c.dim = c.proxy_dim = dim;
      c.top_k = 2;
      check<bf16>(c);
      check<fp16>(c);
    }
}
TEST(Backward, EveryTopK) {
  for (int top_k : {1, 2, 15, 33, 64, 128})
    for (Ids ids : {Ids::kRandom, Ids::kHoles}) {
      BackwardCase c = make_case("top_k " + std::to_string(top_k), packed({900, 40}));
      c.top_k = top_k;
      c.ids = ids;
      c.block_size = 32;
      c.dim = c.proxy_dim = 64;
      check<bf16>(c);
    }
}
// A single slot whose block is more than one unit of work.
TEST(Backward, OneSlotOfManyKeys) {
  BackwardCase c = make_case("one slot", packed({600}));
  c.top_k = 1;
  c.block_size = 256;
  check<bf16>(c);
  check<fp16>(c);
}
TEST(Backward, IdsFromOutside) {
  for (Ids ids : {Ids::kHoles, Ids::kAll, Ids::kSame, Ids::kNone}) {
    BackwardCase c = make_case("ids " + std::to_string(static_cast<int>(ids)), packed(kLengths, 9));
    c.ids = ids;
    c.block_size = 32;
    c.top_k = 40; // more than there are blocks
    check<bf16>(c);
  }
}
TEST(Backward, Layouts) {
  for (Layout layout : {Layout::kHeadMajor, Layout::kBatchedHeads}) {
    BackwardCase c = make_case("layout", rows(3, 190));
    c.layout = layout;
    c.dim = 72;
    check_all(c);
  }
  BackwardCase c = make_case("strides and documents", packed(kLengths, 4));
  c.layout = Layout::kHeadMajor;
  check_all(c);
}
TEST(Backward, FragmentsWithSharedKeys) {
  for (int rank : {0, 2}) {
    BackwardCase c =
        make_case("context parallel", context_parallel({300, 64, 0, 133, 200, 7}, 3, rank));
    check_all(c);
  }
}
TEST(Backward, QueriesWithoutKeys) {
  Batch batch;
  batch.q_begin = {0, 76, 110, 256};
  batch.k_begin = {0, 1, 2};
  batch.k_len = {1, 1, 1};
  batch.tokens = 256;
  batch.keys = 3;
  check_all(make_case("one key each", batch));
  batch.q_begin = {0, 0, 208, 424, 424};
  batch.k_begin = {0, 238, 538, 878};
  batch.k_len = {238, 300, 340, 200};
  batch.tokens = 430;
  batch.keys = 1078;
  check_all(make_case("unused keys", batch));
}
TEST(Backward, Scales) {
  for (double scale : {-0.125, 1e-30, 1.0}) {
    BackwardCase c = make_case("scale " + std::to_string(scale), packed({200, 20}));
    c.scale = c.proxy_scale = scale;
    check_all(c);
  }
}

// --- what is asked for
// ------------------------------------------------------------------------------
TEST(Backward, WithoutProxy) {
  BackwardCase c = make_case("no proxy", packed({300}));
  c.proxy = c.kl = false;
  check_all(c);
}
TEST(Backward, PartialGradients) {
  for (bool dense : {false, true}) {
    BackwardCase c = make_case("", packed({90, 40}, 3));
    c.dense = dense;
    c.dim = c.proxy_dim = 64;
    c.block_size = 32;
    const auto in = make_backward_inputs<bf16>(c);
    const BackwardReference<bf16> reference(c, in);
    for (int wanted = 1; wanted < 64; ++wanted) {
      c.name = "gradients " + std::to_string(wanted);
      c.dq = wanted & 1;
      c.dk = wanted & 2;
      c.dv = wanted & 4;
      c.dq_proxy = wanted & 8;
      c.dk_proxy = wanted & 16;
      c.kl = wanted & 32;
      check<bf16>(c, in, reference.sums());
    }
  }
}
TEST(Backward, KlAlone) {
  for (int top_k : {1, 4}) {
    BackwardCase c = make_case("kl alone", packed(kLengths, 6));
    set_heads(c, 8, 2, 4, 2);
    c.top_k = top_k;
    c.kl_alone = true;
    check_all(c);
  }
}
// As a mean over a million rows gives it: fp16 alone could not hold dS.
TEST(Backward, TinyUpstream) {
  BackwardCase c = make_case("tiny", packed({300, 100}));
  c.dkl_size = 1e-4;
  check_all(c);
}
TEST(Backward, HugeUpstream) {
  BackwardCase c = make_case("huge", packed({300, 100}));
  c.dkl_size = 1e3;
  check_all(c);
}

// --- many passes, long lists
// ------------------------------------------------------------------------
TEST(Backward, ManyPasses) {
  BackwardCase c = make_case("passes of dQ's places", packed({150, 50}, 7));
  set_heads(c, 64, 4, 4, 1);
  c.dim = c.proxy_dim = 64;
  c.block_size = 256;
  c.top_k = 128;
  check<bf16>(c);
  c = make_case("passes of the teacher", packed({200, 60}, 7));
  set_heads(c, 64, 64, 1, 1); // a teacher for every head
  c.dim = c.proxy_dim = 64;
  c.block_size = 256;
  c.top_k = 128;
  check<bf16>(c);
}
TEST(Backward, EveryTokenSelectsTheSameBlock) {
  BackwardCase c = make_case("same block", packed({3000}));
  c.ids = Ids::kSame;
  c.top_k = 2;
  check<bf16>(c);
}
TEST(Backward, ManyShortDocuments) {
  std::vector<int64_t> lengths(300, 7);
  lengths.insert(lengths.begin() + 100, 700);
  {
    BackwardCase c = make_case("short", packed(lengths));
    c.dim = c.proxy_dim = 64;
    check_all(c);
  }
}
TEST(Backward, LongerBatch) {
  BackwardCase c = make_case("long", packed({2500, 300}, 17));
  set_heads(c, 8, 2, 4, 1);
  c.dim = c.proxy_dim = 64;
  c.top_k = 8;
  c.block_size = 64;
  check<bf16>(c);
  check<fp16>(c);
}

// --- not finite
// -------------------------------------------------------------------------------------
TEST(Backward, NotFiniteInputs) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (double value : {nan, double(INFINITY), -double(INFINITY)})
    for (auto member : {&Inputs<bf16>::q, &Inputs<bf16>::k, &Inputs<bf16>::v,
                        &Inputs<bf16>::q_proxy, &Inputs<bf16>::k_proxy})
      for (int heads : {4, 6}) // with 6 some rows of a tile stand for nothing
        for (bool dense : {false, true}) {
          BackwardCase c = make_case("not finite", packed({100, 130}));
          set_heads(c, heads, 2, 2, 1);
          c.dense = dense;
          c.block_size = 32;
          c.dim = c.proxy_dim = 64;
          check<bf16>(c, [&](Inputs<bf16>& x) {
            const size_t token = (x.*member).size() / 230;
            // In the middle of a block that later tokens of the document choose, and in its last.
            for (size_t t : {size_t{40}, size_t{99}, size_t{215}})
              (x.*member)[t * token + token / 3] = from_double<bf16>(value);
          });
        }
}
// A value that no token reads spoils nothing.
TEST(Backward, NotFiniteAndUnread) {
  BackwardCase c = make_case("unread", packed({400}));
  set_heads(c, 6, 2, 2, 1);
  c.ids = Ids::kSame; // block 0
  c.block_size = 64;
  for (auto member : {&Inputs<bf16>::k, &Inputs<bf16>::v, &Inputs<bf16>::k_proxy})
    check<bf16>(c, [&](Inputs<bf16>& x) {
      const size_t token = (x.*member).size() / 400;
      for (size_t t = 64; t < 400; ++t)
        (x.*member)[t * token + 1] = from_double<bf16>(NAN);
    });
  // Behind the last query: keys of the last block that nobody sees.
  Batch batch;
  batch.q_begin = {0, 21};
  batch.k_begin = {0};
  batch.k_len = {21};
  batch.tokens = 21;
  batch.keys = 64;
  c.batch = batch;
  for (bool dense : {false, true}) {
    c.dense = dense;
    check<bf16>(c, [&](Inputs<bf16>& x) {
      for (auto member : {&Inputs<bf16>::k, &Inputs<bf16>::v, &Inputs<bf16>::k_proxy}) {
        const size_t token = (x.*member).size() / 64;
        std::fill((x.*member).begin() + 21 * token, (x.*member).end(), from_double<bf16>(NAN));
      }
    });
  }
}
TEST(Backward, NotFiniteUpstream) {
  for (double value : {std::numeric_limits<double>::quiet_NaN(), double(INFINITY)})
    for (bool of_kl : {false, true})
      for (bool dense : {false, true}) {
        BackwardCase c = make_case("upstream", packed({100, 130}));
        c.dense = dense;
        c.block_size = 64;
        const auto change = [&](auto& in) {
          if (of_kl)
            in.dkl[110 * c.proxy_heads + 1] = static_cast<float>(value);
          else
            in.dout[(110 * c.q_heads + 1) * c.dim + 5] =
                from_double<typename std::decay_t<decltype(in.dout)>::value_type>(value);
        };
        check<bf16>(c, nullptr, change);
        check<fp16>(c, nullptr, change);
      }
}
// Logits of +-30,000 are known to 30,000 * eps only, and one key takes all: finite is what counts.
TEST(Backward, LargeLogits) {
  for (double sign : {1.0, -1.0})
    for (bool dense : {false, true}) {
      BackwardCase c = make_case("large", packed({290, 140}));
      c.dense = dense;
      c.block_size = 32;
      c.scale = c.proxy_scale = 1;
      const auto in = make_backward_inputs<bf16>(c, [&](Inputs<bf16>& x) {
        const auto shift = [](std::vector<bf16>& values, int dim, double first) {
          for (size_t i = 0; i < values.size(); ++i)
            values[i] = from_double<bf16>(i % dim == 0 ? first : 0.25 * to_double(values[i]));
        };
        shift(x.q, c.dim, sign * 175);
        shift(x.k, c.dim, 175);
        shift(x.q_proxy, c.proxy_dim, sign * 175);
        shift(x.k_proxy, c.proxy_dim, 175);
      });
      BackwardRun<bf16> call(c, in);
      call.run();
      const Gradients got = call.results();
      for (const auto* values : {&got.dq, &got.dk, &got.dv, &got.dq_proxy, &got.dk_proxy, &got.kl})
        EXPECT_TRUE(
            std::all_of(values->begin(), values->end(), [](double x) { return std::isfinite(x); }));
    }
}
TEST(Backward, AllZero) {
  BackwardCase c = make_case("zeros", packed({200, 60}));
  c.block_size = 32;
  for (bool dense : {false, true}) {
    c.dense = dense;
    check<bf16>(c, [](Inputs<bf16>& x) {
      for (auto* values : {&x.q, &x.k, &x.q_proxy, &x.k_proxy})
        std::fill(values->begin(), values->end(), from_double<bf16>(0));
    });
  }
}

// A captured call takes the upstream gradients of the replay, not of the capture.
TEST(Backward, CapturedGraph) {
  for (bool dense : {false, true}) {
    BackwardCase c = make_case("graph", packed({400, 90}, 6));
    c.dense = dense;
    c.block_size = 32;
    const auto in = make_backward_inputs<bf16>(c);
    BackwardInputs<bf16> before = in;
    std::fill(before.dkl.begin(), before.dkl.end(), 0.f);
    BackwardRun<bf16> call(c, before);
    const DeviceArray<char> memory(static_cast<int64_t>(call.workspace_size()));
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    call.enqueue({memory.data(), memory.bytes()}, stream);
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphLaunch(executable, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaMemcpy(call.params.dkl.data, in.dkl.data(), in.dkl.size() * sizeof(float),
                          cudaMemcpyHostToDevice));
    call.poison();
    CUDA_CHECK(cudaGraphLaunch(executable, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    expect_right(c, in, call.results());
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

// --- Hopper: D = B = 128, 4, 8 or 16 main heads on one (proxy head, kv head)
// ----------------------------------------------------------------------------
class HopperBackward : public testing::Test {
  void SetUp() override {
#if THRESHER_CUDA_SM90
    if (cuda::device_facts().major == 9)
      return;
#endif
    GTEST_SKIP() << "needs compute capability 9.0";
  }
};

BackwardCase hopper_case(std::string name, Batch batch) {
  BackwardCase c = make_case(std::move(name), std::move(batch));
  c.hopper = true;
  set_heads(c, 16, 2, 4, 1);
  return c;
}
void check_types(const BackwardCase& c) {
  check<bf16>(c);
  check<fp16>(c);
}

TEST_F(HopperBackward, HeadRatios) {
  for (auto [q, kv, proxy, proxy_kv] : {std::array{16, 2, 4, 1}, // 4 heads, kv heads shared
                                        {32, 4, 4, 2},           // 8
                                        {64, 4, 4, 1},           // 16
                                        {16, 4, 2, 1},           // a proxy head of several kv heads
                                        {32, 4, 1, 1},
                                        {16, 1, 4, 4},
                                        {24, 3, 6, 2},
                                        {4, 1, 1, 1}})
    for (int proxy_dim : {64, 128}) {
      BackwardCase c = hopper_case("heads " + std::to_string(q) + "/" + std::to_string(kv) + "/" +
                                       std::to_string(proxy) + "/" + std::to_string(proxy_kv),
                                   packed({280, 0, 1, 129}, 5));
      set_heads(c, q, kv, proxy, proxy_kv);
      c.proxy_dim = proxy_dim;
      c.top_k = 2;
      check<bf16>(c);
      if (q == 16)
        check<fp16>(c);
    }
}
TEST_F(HopperBackward, OddDocuments) {
  check_types(hopper_case("odd", packed(kLengths, 13)));
  check_types(hopper_case("one token", packed({1})));
  check_types(hopper_case("nothing", packed({0, 0}, 9)));
  check_types(hopper_case("rows", rows(3, 190)));
  std::vector<int64_t> lengths(300, 7);
  lengths.insert(lengths.begin() + 100, 700);
  check_types(hopper_case("short", packed(lengths)));
  for (int rank : {0, 2})
    check_types(
        hopper_case("context parallel", context_parallel({300, 64, 0, 133, 200, 7}, 3, rank)));
}
// Many items of one block, within a window, from window to window and from head to head.
TEST_F(HopperBackward, EveryTokenSelectsTheSameBlock) {
  for (auto [q, kv, proxy, proxy_kv] : {std::array{8, 1, 2, 1}, {8, 2, 1, 1}, {8, 1, 1, 1}}) {
    BackwardCase c = hopper_case("same block", packed({2300, 400}));
    set_heads(c, q, kv, proxy, proxy_kv);
    c.ids = Ids::kSame;
    c.top_k = 2;
    check<bf16>(c);
  }
}
// Partial results of more slots than are added at a time.
TEST_F(HopperBackward, ManySlots) {
  BackwardCase c = hopper_case("slots", packed({2300, 70}));
  set_heads(c, 4, 1, 1, 1);
  c.ids = Ids::kAll;
  c.top_k = 24;
  check<bf16>(c);
  for (Ids ids : {Ids::kHoles, Ids::kNone}) {
    c = hopper_case("ids " + std::to_string(static_cast<int>(ids)), packed(kLengths, 9));
    c.ids = ids;
    c.top_k = 40; // more than there are blocks
    check<bf16>(c);
  }
}
// The places of 64 heads x 128 slots leave room for windows of 512 tokens.
TEST_F(HopperBackward, ManyPasses) {
  BackwardCase c = hopper_case("passes", packed({530, 150}, 7));
  set_heads(c, 64, 4, 4, 1);
  c.top_k = 128;
  check<bf16>(c);
}
TEST_F(HopperBackward, PartialGradients) {
  BackwardCase c = hopper_case("", packed({200, 40}, 3));
  const auto in = make_backward_inputs<bf16>(c);
  const BackwardReference<bf16> reference(c, in);
  for (int wanted = 1; wanted < 64; ++wanted) {
    c.name = "gradients " + std::to_string(wanted);
    c.dq = wanted & 1;
    c.dk = wanted & 2;
    c.dv = wanted & 4;
    c.dq_proxy = wanted & 8;
    c.dk_proxy = wanted & 16;
    c.kl = wanted & 32;
    if (c.main()) // the others are the portable kernels'
      check<bf16>(c, in, reference.sums());
  }
  c = hopper_case("no proxy", packed({300}));
  c.proxy = c.kl = false;
  check_types(c);
}
// The portable kernels do it again, if deterministic with an index of their own.
TEST_F(HopperBackward, NotFinite) {
  for (double value : {std::numeric_limits<double>::quiet_NaN(), double(INFINITY)}) {
    for (auto member : {&Inputs<bf16>::q, &Inputs<bf16>::k, &Inputs<bf16>::v,
                        &Inputs<bf16>::q_proxy, &Inputs<bf16>::k_proxy})
      check<bf16>(hopper_case("not finite", packed({300, 330})), [&](Inputs<bf16>& x) {
        const size_t token = (x.*member).size() / 630;
        for (size_t t : {size_t{140}, size_t{299}, size_t{515}})
          (x.*member)[t * token + token / 3] = from_double<bf16>(value);
      });
    BackwardCase c = hopper_case("upstream", packed({300, 330}));
    check<bf16>(c, nullptr, [&](BackwardInputs<bf16>& in) {
      in.dout[(310 * c.q_heads + 1) * c.dim + 5] = from_double<bf16>(value);
    });
  }
}
// Calls that share the GPU: none may wait for a CTA that finds no room.
TEST_F(HopperBackward, SeveralStreams) {
  constexpr int kStreams = 4, kRepeats = 8;
  BackwardCase c = hopper_case("streams", packed({4000}));
  set_heads(c, 8, 1, 2, 1);
  c.ids = Ids::kSame;
  c.top_k = 2;
  c.deterministic = true;
  const auto in = make_backward_inputs<bf16>(c);
  BackwardRun<bf16> alone(c, in);
  alone.run();
  const Gradients truth = alone.results();
  std::vector<std::unique_ptr<BackwardRun<bf16>>> calls;
  std::vector<std::unique_ptr<DeviceArray<char>>> memory;
  std::vector<cudaStream_t> streams(kStreams);
  for (cudaStream_t& stream : streams) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    calls.push_back(std::make_unique<BackwardRun<bf16>>(c, in));
    memory.push_back(
        std::make_unique<DeviceArray<char>>(static_cast<int64_t>(calls.back()->workspace_size())));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  for (int repeat = 0; repeat < kRepeats; ++repeat)
    for (int i = 0; i < kStreams; ++i)
      calls[i]->enqueue({memory[i]->data(), memory[i]->bytes()}, streams[i]);
  CUDA_CHECK(cudaDeviceSynchronize());
  for (int i = 0; i < kStreams; ++i) {
    expect_same(truth, calls[i]->results());
    cudaStreamDestroy(streams[i]);
  }
}
// Turns are cleared by the graph itself, not only by the call that was captured.
TEST_F(HopperBackward, CapturedGraph) {
  for (bool deterministic : {false, true}) {
    BackwardCase c = hopper_case("graph", packed({700, 90}, 6));
    c.deterministic = deterministic;
    const auto in = make_backward_inputs<bf16>(c);
    BackwardRun<bf16> call(c, in);
    const DeviceArray<char> memory(static_cast<int64_t>(call.workspace_size()));
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    call.enqueue({memory.data(), memory.bytes()}, stream);
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int replay = 0; replay < 3; ++replay) {
      call.poison();
      CUDA_CHECK(cudaGraphLaunch(executable, stream));
      CUDA_CHECK(cudaStreamSynchronize(stream));
      expect_right(c, in, call.results());
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

} // namespace
} // namespace thresher::test
