// Arguments that no caller from Python can give, but one from C++ can: each is refused by name
// before anything is read or written.
#include <gtest/gtest.h>
#include <pthread.h>

#include "cpu_case.h"

namespace {

using namespace cpu_test;
using reference::Problem;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

Problem small() {
  Problem p;
  p.Hq = 4, p.Hkv = 2, p.Hp = 2, p.Hpk = 1, p.D = 8, p.Dp = 8, p.B = 8, p.K = 2;
  append_document(&p, 20);
  fill_random(&p, 1);
  return p;
}

template <class Params, class Size>
std::string refused_argument(const Params& params, Size size) {
  try {
    size(params, thresher::Device{});
  } catch (const thresher::Error& error) {
    return error.argument();
  }
  return "";
}

TEST(Check, MissingMemory) {
  Case c(small(), DType::kFloat32);
  using Backward = thresher::BackwardParams;
  struct Member {
    const char* name;
    thresher::Tensor Backward::* tensor;
  };
  for (const Member& m :
       {Member{"q", &Backward::q}, Member{"v", &Backward::v}, Member{"lse", &Backward::lse},
        Member{"out", &Backward::out}, Member{"proxy_lse", &Backward::proxy_lse},
        Member{"block_indices", &Backward::block_indices}}) {
    Backward b = c.backward_params(true);
    (b.*m.tensor).data = nullptr; // shape and strides stay
    EXPECT_EQ(refused_argument(b, thresher::sparse_backward_workspace_size), m.name);
  }
  thresher::SelectParams s = c.select_params();
  s.block_indices.data = nullptr;
  EXPECT_EQ(refused_argument(s, thresher::select_blocks_workspace_size), "block_indices");
}

TEST(Check, UnknownDtype) {
  Case c(small(), DType::kFloat32);
  for (int dtype : {4, 5, 77, -1}) {
    thresher::ForwardParams f = c.forward_params(false);
    for (thresher::Tensor* t : {&f.q, &f.k, &f.v, &f.q_proxy, &f.k_proxy, &f.out})
      t->dtype = static_cast<DType>(dtype);
    EXPECT_EQ(refused_argument(f, thresher::warmup_forward_workspace_size), "q") << dtype;
  }
}

TEST(Check, DataOffItsAlignment) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Case c(small(), dtype);
    thresher::ForwardParams f = c.forward_params(true);
    f.v.data = static_cast<char*>(f.v.data) + 1;
    EXPECT_EQ(refused_argument(f, thresher::sparse_forward_workspace_size), "v");
    f = c.forward_params(true);
    f.block_indices.data = static_cast<char*>(f.block_indices.data) + 2;
    EXPECT_EQ(refused_argument(f, thresher::sparse_forward_workspace_size), "block_indices");
  }
}

TEST(Check, StridesBeyondTheAddressSpace) {
  Case c(small(), DType::kFloat32);
  for (int64_t stride : {kHuge, -kHuge - 1, kHuge / 16, int64_t{1} << 60}) {
    thresher::ForwardParams f = c.forward_params(true);
    f.k.stride[0] = stride;
    EXPECT_EQ(refused_argument(f, thresher::sparse_forward_workspace_size), "k") << stride;
  }
  thresher::ForwardParams f = c.forward_params(true);
  f.k.shape[1] = f.v.shape[1] = 1; // a dimension of one element has no stride
  f.k.stride[1] = kHuge;
  EXPECT_EQ(refused_argument(f, thresher::sparse_forward_workspace_size), "");
}

TEST(Check, ResultsOnTopOfEachOther) {
  Case c(small(), DType::kFloat32);
  thresher::ForwardParams f = c.forward_params(true);
  f.out.stride[0] = 0;
  EXPECT_EQ(refused_argument(f, thresher::sparse_forward_workspace_size), "out");
  f = c.forward_params(true);
  f.lse.stride[1] = 0;
  EXPECT_EQ(refused_argument(f, thresher::sparse_forward_workspace_size), "lse");
  f = c.forward_params(true);
  f.k.stride[0] = 0; // an input may be expanded
  EXPECT_EQ(refused_argument(f, thresher::sparse_forward_workspace_size), "");
  f = c.forward_params(true); // and nothing lies on top of anything where there is nothing
  for (thresher::Tensor* t :
       {&f.q, &f.k, &f.v, &f.q_proxy, &f.k_proxy, &f.out, &f.lse, &f.proxy_lse})
    t->shape[0] = t->stride[1] = 0, t->data = nullptr;
  f.block_indices.shape[1] = f.block_indices.stride[0] = 0;
  f.problem.fragments = {};
  f.out.data = f.lse.data = &f;
  EXPECT_EQ(refused_argument(f, thresher::sparse_forward_workspace_size), "");
}

// Sizes that wrap around would give a small workspace and writes beyond it. The tensors are
// expanded, so that they need no memory.
TEST(Check, SizesThatWrapAround) {
  Case c(small(), DType::kFloat32);
  thresher::ForwardParams f = c.forward_params(true);
  f.problem.top_k_blocks = std::numeric_limits<int32_t>::max();
  f.block_indices.shape[2] = f.problem.top_k_blocks;
  f.block_indices.stride[0] = f.block_indices.stride[1] = 0;
  EXPECT_EQ(refused_argument(f, thresher::sparse_forward_workspace_size), "top_k_blocks");
  f.problem.fragments = {};
  for (thresher::Tensor* t : {&f.q, &f.k, &f.v, &f.out})
    t->shape[2] = 65535;
  for (thresher::Tensor* t : {&f.q, &f.out})
    t->shape[1] = 65534;
  f.lse.shape[1] = 65534;
  EXPECT_NE(refused_argument(f, thresher::sparse_forward_workspace_size), "");
}

// top_k far beyond the number of blocks: nothing of its size may lie on the stack, here one of 512
// KiB.
TEST(Check, VeryLargeTopK) {
  Problem p = small();
  p.Hq = 2, p.Hkv = p.Hp = 1, p.D = p.Dp = 1;
  fill_random(&p, 1);
  Case c(p, DType::kFloat64);
  const int32_t top_k = 100000;
  std::vector<int32_t> row(static_cast<size_t>(top_k), -1);
  row.back() = 0;
  thresher::ForwardParams f = c.forward_params(true);
  f.problem.top_k_blocks = top_k;
  f.block_indices.data = row.data();
  f.block_indices.shape[2] = top_k;
  f.block_indices.stride[0] = f.block_indices.stride[1] = 0;
  auto call = [](void* params) -> void* {
    const auto& forward = *static_cast<thresher::ForwardParams*>(params);
    const size_t bytes = thresher::sparse_forward_workspace_size(forward, {});
    std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(256, bytes), &std::free);
    thresher::sparse_forward(forward, {memory.get(), bytes}, {});
    return nullptr;
  };
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 512 << 10);
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, &attributes, call, &f), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  for (double x : c.lse.values())
    EXPECT_TRUE(std::isfinite(x));
}

} // namespace
