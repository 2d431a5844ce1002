// Offsets beyond 2^31 elements in every tensor, and sizes at and beyond the limits. Tensors lie in
// address space that is reserved but never touched except for the rows in use: a few megabytes of
// memory hold views that span hundreds of gigabytes.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <functional>
#include <list>

#include "cpu_case.h"

namespace {

using namespace cpu_test;
using reference::Problem;
using thresher::Device;
using thresher::Error;
using thresher::ErrorCode;
using thresher::Tensor;
using thresher::Workspace;

constexpr int64_t kTwoTo31 = int64_t{1} << 31;
constexpr int64_t kBeyond = kTwoTo31 + (int64_t{1} << 27); // elements

// Zeros without memory behind them.
class Reserved {
 public:
  explicit Reserved(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED)
      throw std::runtime_error("this machine reserves no " + std::to_string(bytes) + " bytes");
  }
  ~Reserved() { munmap(data_, bytes_); }
  Reserved(const Reserved&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

// visit(address) for every element in the order of its indices.
template <class Visit>
void for_each_element(const Tensor& t, Visit&& visit) {
  int64_t n[4] = {1, 1, 1, 1}, step[4] = {};
  const int first = 4 - t.rank;
  for (int axis = first; axis < 4; ++axis) {
    n[axis] = t.shape[axis - first];
    step[axis] = t.stride[axis - first] * static_cast<int64_t>(thresher::element_size(t.dtype));
  }
  for (int64_t i = 0; i < n[0]; ++i)
    for (int64_t j = 0; j < n[1]; ++j)
      for (int64_t k = 0; k < n[2]; ++k)
        for (int64_t l = 0; l < n[3]; ++l)
          visit(static_cast<char*>(t.data) + i * step[0] + j * step[1] + k * step[2] + l * step[3]);
}

// The elements of a tensor as bytes, in the order of its indices.
std::vector<char> elements(const Tensor& t) {
  std::vector<char> bytes;
  for_each_element(t, [&](const char* at) {
    bytes.insert(bytes.end(), at, at + thresher::element_size(t.dtype));
  });
  return bytes;
}

// Copies of tensors whose last index along `axis` lies beyond 2^31 elements, forwards (sign 1) or
// backwards (-1); the other axes are dense.
class FarAway {
 public:
  Tensor operator()(const Tensor& t, int axis, int sign = 1) {
    Tensor far = t;
    int64_t inner = 1;
    for (int d = t.rank - 1; d >= 0; --d)
      if (d != axis) {
        far.stride[d] = inner;
        inner *= t.shape[d];
      }
    const int64_t step = kBeyond / (t.shape[axis] - 1) + 1;
    EXPECT_GT(step, inner);
    far.stride[axis] = sign * step;
    const int64_t size = static_cast<int64_t>(thresher::element_size(t.dtype));
    const int64_t last = (t.shape[axis] - 1) * step;
    const Reserved& memory = memory_.emplace_back((last + inner) * size);
    far.data = memory.data() + (sign < 0 ? last * size : 0);
    const std::vector<char> bytes = elements(t);
    const char* from = bytes.data();
    for_each_element(far, [&](char* at) {
      std::memcpy(at, from, static_cast<size_t>(size));
      from += size;
    });
    return far;
  }

 private:
  std::list<Reserved> memory_;
};

Problem make(std::vector<int64_t> documents, int64_t padding = 3) {
  Problem p;
  p.Hq = 4, p.Hkv = 2, p.Hp = 2, p.Hpk = 2, p.D = 16, p.Dp = 8, p.B = 16, p.K = 3;
  for (int64_t length : documents)
    append_document(&p, length);
  p.T += padding;
  p.Tk += padding;
  fill_random(&p, 5);
  return p;
}

template <class Params>
std::vector<Tensor*> tensors_of(Params& p);
template <>
std::vector<Tensor*> tensors_of(thresher::SelectParams& p) {
  return {&p.q_proxy, &p.k_proxy, &p.block_indices};
}
template <>
std::vector<Tensor*> tensors_of(thresher::ForwardParams& p) {
  return {&p.q, &p.k, &p.v, &p.q_proxy, &p.k_proxy, &p.block_indices, &p.out, &p.lse, &p.proxy_lse};
}
template <>
std::vector<Tensor*> tensors_of(thresher::BackwardParams& p) {
  return {&p.q,   &p.k,         &p.v,    &p.q_proxy,  &p.k_proxy, &p.block_indices,
          &p.out, &p.lse,       &p.dout, &p.dkl,      &p.dq,      &p.dk,
          &p.dv,  &p.proxy_lse, &p.kl,   &p.dq_proxy, &p.dk_proxy};
}
template <>
std::vector<Tensor*> tensors_of(thresher::KlParams& p) {
  return {&p.q, &p.k, &p.q_proxy, &p.k_proxy, &p.block_indices, &p.lse, &p.proxy_lse, &p.kl};
}

// Runs with dense tensors, then with all of them changed by `view`: the same bytes in every one.
template <class Params, class View, class Size, class Run>
void expect_same(Params params, View&& view, Size size, Run run) {
  Params changed = params;
  for (Tensor* t : tensors_of(changed))
    if (*t)
      *t = view(*t, t == &changed.block_indices);
  Case::call(params, size, run);
  Case::call(changed, size, run);
  const std::vector<Tensor*> dense = tensors_of(params), far = tensors_of(changed);
  for (size_t i = 0; i < dense.size(); ++i)
    if (*dense[i]) {
      EXPECT_TRUE(elements(*dense[i]) == elements(*far[i])) << "tensor " << i;
    }
}

template <class View>
void expect_same_steps(Case& c, bool sparse, View&& view) {
  // Fresh views for every call, so that what a call must write is not there already.
  auto expect = [&](auto params, auto size, auto run) {
    if (c.problem.fragments.count == 0)
      params.problem.fragments = {};
    expect_same(params, view, size, run);
  };
  expect(c.select_params(), thresher::select_blocks_workspace_size, thresher::select_blocks);
  if (sparse)
    expect(c.forward_params(true), thresher::sparse_forward_workspace_size,
           thresher::sparse_forward);
  else
    expect(c.forward_params(false), thresher::warmup_forward_workspace_size,
           thresher::warmup_forward);
  expect(c.kl_params(sparse), thresher::proxy_kl_workspace_size, thresher::proxy_kl);
  c.kl.poison();
  if (sparse)
    expect(c.backward_params(true), thresher::sparse_backward_workspace_size,
           thresher::sparse_backward);
  else
    expect(c.backward_params(false), thresher::warmup_backward_workspace_size,
           thresher::warmup_backward);
}

// --- offsets ------------------------------------------------------------------------------------
class FarStrides : public testing::TestWithParam<std::tuple<bool, DType, int, int>> {};
std::string name_of_far(const testing::TestParamInfo<FarStrides::ParamType>& test) {
  const auto& [sparse, dtype, axis, sign] = test.param;
  return std::string(sparse ? "sparse_" : "warmup_") + dtype_name(dtype) +
         (axis ? "_heads" : "_tokens") + (sign < 0 ? "_backwards" : "");
}
INSTANTIATE_TEST_SUITE_P(All, FarStrides,
                         testing::Combine(testing::Bool(),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(0, 1), testing::Values(1, -1)),
                         name_of_far);

TEST_P(FarStrides, EveryTensorOfEveryOperation) {
  const int axis = std::get<2>(GetParam()), sign = std::get<3>(GetParam());
  Case c(make({40, 0, 23}), std::get<1>(GetParam()));
  FarAway far;
  expect_same_steps(c, std::get<0>(GetParam()), [&](const Tensor& t, bool indices) {
    return far(t, indices ? 1 - axis : axis, sign); // block_indices are [Hp, T, K]
  });
}

class FarBatches : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(All, FarBatches, testing::Bool(),
                         [](const auto& test) { return test.param ? "sparse" : "warmup"; });

TEST_P(FarBatches, BatchStrideOfEveryTensor) {
  Case c(make({40, 40, 40}, 0), DType::kFloat32);
  c.problem.fragments = {};
  // The dense call is batched too: [N, S, heads, dim], and [N, Hp, S, K] for the ids.
  auto batched = [](Tensor t, bool indices) {
    Tensor b = t;
    b.rank = t.rank + 1;
    const int tokens = indices ? 1 : 0;
    for (int d = t.rank - 1; d >= 0; --d) {
      b.shape[d + 1] = d == tokens ? 40 : t.shape[d];
      b.stride[d + 1] = t.stride[d];
    }
    b.shape[0] = 3;
    b.stride[0] = 40 * t.stride[tokens];
    return b;
  };
  FarAway far;
  // Both calls see four axes: the dense tensors of the case are replaced first.
  auto expect = [&](auto params, auto size, auto run) {
    for (Tensor* t : tensors_of(params))
      if (*t)
        *t = batched(*t, t == &params.block_indices);
    expect_same(params, [&](const Tensor& t, bool) { return far(t, 0); }, size, run);
  };
  expect(c.select_params(), thresher::select_blocks_workspace_size, thresher::select_blocks);
  if (GetParam()) {
    expect(c.forward_params(true), thresher::sparse_forward_workspace_size,
           thresher::sparse_forward);
    expect(c.backward_params(true), thresher::sparse_backward_workspace_size,
           thresher::sparse_backward);
  } else {
    expect(c.forward_params(false), thresher::warmup_forward_workspace_size,
           thresher::warmup_forward);
    expect(c.backward_params(false), thresher::warmup_backward_workspace_size,
           thresher::warmup_backward);
  }
}

// Like Case::call with a workspace that is reserved only: 2^31 keys have 2^27 counters.
template <class Params, class Size, class Run>
void call_reserved(const Params& params, Size size, Run run) {
  const size_t bytes = size(params, Device{});
  const Reserved memory(static_cast<int64_t>(bytes) + 1);
  run(params, Workspace{memory.data(), bytes}, Device{});
}

TEST(Huge, LastKeyRowsOfTwoTo31) {
  // The same document with its keys in the first rows of a small tensor and in the last rows of one
  // with 2^31 - 1 rows: row numbers, and offsets of tens of gigabytes.
  constexpr int64_t kKeys = kTwoTo31 - 1;
  for (bool sparse : {true, false}) {
    Case c(make({150}, 0), DType::kFloat32);
    c.select();
    c.forward(sparse);
    c.proxy_kl(sparse);
    const std::vector<double> out = c.out.values(), lse = c.lse.values(), kl = c.kl.values();
    const std::vector<int32_t> ids = c.ids;
    const int32_t k_begin = static_cast<int32_t>(kKeys - 150);
    std::list<Reserved> memory;
    auto at_the_end = [&](Tensor t) {
      const int64_t row = t.shape[1] * t.shape[2],
                    size = static_cast<int64_t>(thresher::element_size(t.dtype));
      const Reserved& store = memory.emplace_back(kKeys * row * size);
      const std::vector<char> bytes = elements(t);
      std::memcpy(store.data() + k_begin * row * size, bytes.data(), bytes.size());
      t.data = store.data();
      t.shape[0] = kKeys;
      t.stride[0] = row, t.stride[1] = t.shape[2];
      return t;
    };
    const Tensor k = at_the_end(c.k.tensor()), v = at_the_end(c.v.tensor());
    const Tensor k_proxy = at_the_end(c.k_proxy.tensor());
    c.problem.fragments.k_begin = &k_begin;
    for (Array* a : {&c.out, &c.lse, &c.proxy_lse, &c.kl})
      a->poison();
    std::fill(c.ids.begin(), c.ids.end(), -9);
    thresher::SelectParams select = c.select_params();
    select.k_proxy = k_proxy;
    call_reserved(select, thresher::select_blocks_workspace_size, thresher::select_blocks);
    EXPECT_EQ(ids, c.ids);
    thresher::ForwardParams forward = c.forward_params(sparse);
    forward.k = k, forward.v = v, forward.k_proxy = k_proxy;
    if (sparse)
      call_reserved(forward, thresher::sparse_forward_workspace_size, thresher::sparse_forward);
    else
      call_reserved(forward, thresher::warmup_forward_workspace_size, thresher::warmup_forward);
    thresher::KlParams rows = c.kl_params(sparse);
    rows.k = k, rows.k_proxy = k_proxy;
    call_reserved(rows, thresher::proxy_kl_workspace_size, thresher::proxy_kl);
    EXPECT_EQ(out, c.out.values());
    EXPECT_EQ(lse, c.lse.values());
    EXPECT_EQ(kl, c.kl.values());
  }
}

// --- errors -------------------------------------------------------------------------------------
// Every operation of a case: asks for its size, runs with a workspace.
struct Operation {
  std::string name;
  std::function<size_t()> size;
  std::function<void(const Workspace&)> run;
};

// edit(params): changes what the tests want to see refused.
template <class Edit>
std::vector<Operation> operations(Case& c, Edit&& edit, const Device& device = {}) {
  std::vector<Operation> list;
  auto add = [&](const char* name, auto params, auto size, auto run) {
    edit(params);
    list.push_back({name, [=] { return size(params, device); },
                    [=](const Workspace& w) { run(params, w, device); }});
  };
  add("select_blocks", c.select_params(), thresher::select_blocks_workspace_size,
      thresher::select_blocks);
  add("sparse_forward", c.forward_params(true), thresher::sparse_forward_workspace_size,
      thresher::sparse_forward);
  add("sparse_backward", c.backward_params(true), thresher::sparse_backward_workspace_size,
      thresher::sparse_backward);
  add("warmup_forward", c.forward_params(false), thresher::warmup_forward_workspace_size,
      thresher::warmup_forward);
  add("warmup_backward", c.backward_params(false), thresher::warmup_backward_workspace_size,
      thresher::warmup_backward);
  add("proxy_kl", c.kl_params(true), thresher::proxy_kl_workspace_size, thresher::proxy_kl);
  add("check_block_indices", c.forward_params(true), thresher::check_block_indices_workspace_size,
      thresher::check_block_indices);
  return list;
}
auto nothing = [](auto&) {};

// Both the size and the run throw this; returns the text.
std::string expect_error(const std::function<void()>& call, ErrorCode code,
                         const std::vector<std::string>& arguments) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    EXPECT_NE(std::find(arguments.begin(), arguments.end(), error.argument()), arguments.end())
        << error.what();
    EXPECT_EQ(std::string(error.what()).rfind(error.argument() + ": ", 0), 0U) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}
void expect_refused(const Operation& op, ErrorCode code, const std::vector<std::string>& arguments,
                    const std::string& text) {
  SCOPED_TRACE(op.name);
  for (const std::string& what : {expect_error([&] { op.size(); }, code, arguments),
                                  expect_error([&] { op.run({}); }, code, arguments)})
    EXPECT_NE(what.find(text), std::string::npos) << what;
}

TEST(Huge, TokenCountsBeyondTheLimitAreRefused) {
  Case c(make({40}, 0), DType::kFloat32);
  for (int64_t tokens : {kTwoTo31, kTwoTo31 * 4, int64_t{1} << 40})
    for (const Operation& op : operations(c, [&](auto& params) {
           // Stride 0: no memory for the rows, and none could hold the results.
           for (Tensor* t : tensors_of(params))
             if (*t) {
               const int axis = t == &params.block_indices ? 1 : 0;
               t->shape[axis] = tokens;
               t->stride[axis] = 0;
             }
         }))
      expect_refused(op, ErrorCode::kInvalidValue, {"q", "q_proxy"}, "2147483647 tokens");
}

TEST(Huge, LargestTokenCountHasAWorkspaceSize) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Case c(make({40}, 0), dtype);
    c.problem.fragments = {};
    for (const Operation& op : operations(c, [&](auto& params) {
           params.problem.fragments = {};
           for (Tensor* t : tensors_of(params))
             if (*t)
               t->shape[t == &params.block_indices ? 1 : 0] = kTwoTo31 - 1;
         })) {
      const size_t bytes = op.size();
      EXPECT_GT(bytes, 0U) << op.name;
      EXPECT_LT(bytes, size_t{1} << 45) << op.name;
      // Nobody has it: an error before anything is touched.
      expect_error([&] { op.run({}); }, ErrorCode::kOutOfMemory, {"workspace"});
    }
  }
}

TEST(Huge, SizesThatWrapAreRefused) {
  // The fp32 accumulators of dk and dv: 2^31 keys of 2^15 heads of 2^13 numbers, 2^61 bytes each.
  Case c(make({40}, 0), DType::kBFloat16);
  thresher::BackwardParams p = c.backward_params(true);
  p.problem.fragments = {};
  p.dkl = p.kl = p.dq = p.dq_proxy = p.dk_proxy = {};
  for (Tensor* t : tensors_of(p))
    if (*t) {
      const bool ids = t == &p.block_indices;
      t->shape[ids ? 1 : 0] = kTwoTo31 - 1;
      if (!ids)
        t->shape[1] = 1 << 15;
      else
        t->shape[0] = 1;
      if (t->rank == 3 && !ids)
        t->shape[2] = 1 << 13;
      t->stride[0] = t->stride[1] = t == &p.dk || t == &p.dv ? 1 : 0; // results may not repeat
    }
  const std::string text =
      expect_error([&] { thresher::sparse_backward_workspace_size(p, Device{}); },
                   ErrorCode::kOutOfMemory, {"workspace"});
  EXPECT_NE(text.find("64-bit"), std::string::npos) << text;
}

TEST(Huge, MoreSlotsThanTheCpuCountsAreRefused) {
  Case c(make({40}, 0), DType::kFloat32);
  const auto edit = [](auto& params) {
    params.problem.top_k_blocks = 1 << 30;
    params.block_indices.shape[2] = 1 << 30;
    params.block_indices.stride[0] = params.block_indices.stride[1] = 0;
  };
  thresher::ForwardParams forward = c.forward_params(true);
  edit(forward);
  expect_error([&] { thresher::sparse_forward_workspace_size(forward, Device{}); },
               ErrorCode::kNotSupported, {"top_k_blocks"});
  thresher::BackwardParams backward = c.backward_params(true);
  edit(backward);
  expect_error([&] { thresher::sparse_backward_workspace_size(backward, Device{}); },
               ErrorCode::kNotSupported, {"top_k_blocks"});
}

TEST(Huge, StridesThatLeave64BitsAreRefused) {
  Case c(make({40}, 0), DType::kFloat32);
  const int64_t most = std::numeric_limits<int64_t>::max();
  for (int64_t stride : {most, most / 2, most / 8, -most, -most / 8})
    for (int axis : {0, 1}) {
      // Each tensor in turn: 17 are the most that an operation has.
      for (size_t which = 0; which < 17; ++which)
        for (const Operation& op : operations(c, [&](auto& params) {
               const std::vector<Tensor*> all = tensors_of(params);
               if (which < all.size() && *all[which])
                 all[which]->stride[axis] = stride;
             })) {
          // check_block_indices uses q, k and block_indices alone.
          const Workspace none;
          try {
            op.run(none);
            ADD_FAILURE() << op.name;
          } catch (const Error& error) {
            const std::string text = error.what();
            const bool untouched = error.code() == ErrorCode::kOutOfMemory;
            EXPECT_TRUE(untouched || text.find("64-bit address space") != std::string::npos)
                << op.name << ": " << text;
            EXPECT_FALSE(which == 0 && untouched) << op.name << ": " << text;
          }
        }
    }
}

TEST(Errors, MissingMemoryIsNamed) {
  Case c(make({40}, 0), DType::kFloat32);
  for (const Operation& op : operations(c, [](auto& p) { tensors_of(p)[0]->data = nullptr; }))
    expect_refused(op, ErrorCode::kInvalidValue, {"q", "q_proxy"}, "data is null");
}

TEST(Errors, WorkspaceThatCouldNotBeHadOrIsTooSmall) {
  Case c(make({40, 23}), DType::kFloat32);
  c.select();
  for (const Operation& op : operations(c, nothing)) {
    SCOPED_TRACE(op.name);
    const size_t bytes = op.size();
    const Reserved memory(static_cast<int64_t>(bytes) + 512);
    auto refused = [&](const Workspace& w, ErrorCode code) {
      return expect_error([&] { op.run(w); }, code, {"workspace"});
    };
    for (const std::string& text :
         {refused({}, ErrorCode::kOutOfMemory), refused({nullptr, bytes}, ErrorCode::kOutOfMemory),
          refused({memory.data(), bytes - 1}, ErrorCode::kOutOfMemory)})
      EXPECT_NE(text.find(std::to_string(bytes)), std::string::npos) << text;
    refused({memory.data() + 16, bytes}, ErrorCode::kInvalidValue);
  }
  for (const Array* a : {&c.out, &c.lse, &c.kl, &c.dq, &c.dk, &c.dk_proxy})
    EXPECT_TRUE(std::isnan(a->values()[0])) << "written before the check";
}

TEST(Errors, CodeAndArgumentSayWhatIsWrong) {
  Case c(make({40}, 0), DType::kFloat32);
  for (const Operation& op :
       operations(c, [](auto& p) { tensors_of(p)[1]->dtype = DType::kFloat16; }))
    expect_refused(op, ErrorCode::kInvalidType, {"k", "k_proxy"}, "float16");
  for (const Operation& op : operations(c, [](auto& p) { p.problem.block_size = 0; }))
    expect_refused(op, ErrorCode::kInvalidValue, {"block_size"}, "0");
  for (const Operation& op : operations(c, nothing, Device{.index = -1}))
    expect_refused(op, ErrorCode::kInvalidValue, {"device"}, "-1");
  Device unknown;
  unknown.type = static_cast<thresher::DeviceType>(7);
  for (const Operation& op : operations(c, nothing, unknown))
    expect_refused(op, ErrorCode::kInvalidType, {"device"}, "CPU");
}

} // namespace
