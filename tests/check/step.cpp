// One step of every operation through the installed API, small, with results and workspaces left as
// malloc gives them: under valgrind a value that depends on them shows. Every result is looked at.
#include <thresher/msa.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <vector>

namespace {

using thresher::DType;
using thresher::Tensor;

constexpr int64_t kTokens = 150, kPadding = 3, kTopK = 2;
constexpr int32_t kDocuments[] = {0, 70, 70, 71, 147};

size_t size_of(DType dtype) {
  if (dtype == DType::kFloat64)
    return 8;
  return dtype == DType::kFloat32 || dtype == DType::kInt32 ? 4 : 2;
}

class Memory {
 public:
  Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t;
    t.dtype = dtype;
    int64_t count = 1;
    for (int64_t size : shape) {
      t.shape[t.rank++] = size;
      count *= size;
    }
    for (int64_t axis = t.rank - 1, stride = 1; axis >= 0; stride *= t.shape[axis--])
      t.stride[axis] = stride;
    t.data = std::malloc(static_cast<size_t>(count) * size_of(dtype));
    blocks_.emplace_back(t.data, &std::free);
    return t;
  }

 private:
  std::vector<std::unique_ptr<void, void (*)(void*)>> blocks_;
};

int64_t count_of(const Tensor& t) {
  int64_t count = 1;
  for (int axis = 0; axis < t.rank; ++axis)
    count *= t.shape[axis];
  return count;
}

// Values of about 1 in size: the upper bits of a float are a bfloat16, and as an fp16 also small.
Tensor random(Memory& memory, DType dtype, std::initializer_list<int64_t> shape) {
  Tensor t = memory.tensor(dtype, shape);
  for (int64_t i = 0; i < count_of(t); ++i) {
    const float f = static_cast<float>(std::rand() % 15 - 7) / 4;
    if (dtype == DType::kFloat64)
      static_cast<double*>(t.data)[i] = static_cast<double>(f);
    else if (dtype == DType::kFloat32)
      static_cast<float*>(t.data)[i] = f;
    else
      static_cast<uint16_t*>(t.data)[i] = reinterpret_cast<const uint16_t*>(&f)[1]; // little-endian
  }
  return t;
}

// Branches on every element, so that valgrind reports those that nobody wrote. Returns a checksum.
int64_t look_at(const Tensor& t) {
  int64_t sum = 0;
  const auto* bytes = static_cast<const unsigned char*>(t.data);
  for (size_t i = 0; i < static_cast<size_t>(count_of(t)) * size_of(t.dtype); ++i)
    if (bytes[i] != 0)
      sum += bytes[i];
  return sum;
}

template <class Params>
void call(const Params& params, size_t (*size)(const Params&, const thresher::Device&),
          void (*run)(const Params&, const thresher::Workspace&, const thresher::Device&)) {
  const size_t bytes = size(params, {});
  const std::unique_ptr<void, void (*)(void*)> memory(
      std::aligned_alloc(256, (bytes + 255) / 256 * 256), &std::free);
  run(params, {memory.get(), bytes}, {});
}

int64_t step(DType dtype, bool sparse) {
  using namespace thresher;
  Memory m;
  const DType acc = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Problem problem;
  problem.fragments = {4, kDocuments, nullptr, nullptr};
  problem.block_size = 16;
  problem.top_k_blocks = kTopK;
  problem.softmax_scale = problem.proxy_scale = 0.25;
  BackwardParams b;
  b.problem = problem;
  b.q = random(m, dtype, {kTokens, 4, 12});
  b.k = random(m, dtype, {kTokens, 2, 12});
  b.v = random(m, dtype, {kTokens, 2, 12});
  b.q_proxy = random(m, dtype, {kTokens, 2, 9});
  b.k_proxy = random(m, dtype, {kTokens, 1, 9});
  b.dout = random(m, dtype, {kTokens, 4, 12});
  b.dkl = random(m, acc, {kTokens, 2});
  b.out = m.tensor(dtype, {kTokens, 4, 12});
  b.lse = m.tensor(acc, {kTokens, 4});
  b.proxy_lse = m.tensor(acc, {kTokens, 2});
  b.kl = m.tensor(acc, {kTokens, 2});
  b.dq = m.tensor(dtype, {kTokens, 4, 12});
  b.dk = m.tensor(dtype, {kTokens, 2, 12});
  b.dv = m.tensor(dtype, {kTokens, 2, 12});
  b.dq_proxy = m.tensor(dtype, {kTokens, 2, 9});
  b.dk_proxy = m.tensor(dtype, {kTokens, 1, 9});
  if (sparse) {
    b.block_indices = m.tensor(DType::kInt32, {2, kTokens, kTopK});
    call(SelectParams{problem, b.q_proxy, b.k_proxy, b.block_indices}, select_blocks_workspace_size,
         select_blocks);
  }
  const ForwardParams f{problem,         b.q,   b.k,   b.v,        b.q_proxy, b.k_proxy,
                        b.block_indices, b.out, b.lse, b.proxy_lse};
  KlParams k{problem,   b.q,         b.k,
             b.q_proxy, b.k_proxy,   b.block_indices,
             b.lse,     b.proxy_lse, m.tensor(acc, {kTokens, 2})};
  if (sparse) {
    call(f, check_block_indices_workspace_size, check_block_indices);
    call(f, sparse_forward_workspace_size, sparse_forward);
    call(b, sparse_backward_workspace_size, sparse_backward);
  } else {
    call(f, warmup_forward_workspace_size, warmup_forward);
    call(b, warmup_backward_workspace_size, warmup_backward);
  }
  call(k, proxy_kl_workspace_size, proxy_kl);
  int64_t sum = sparse ? look_at(b.block_indices) : 0;
  for (const Tensor* t :
       {&b.out, &b.lse, &b.proxy_lse, &b.kl, &b.dq, &b.dk, &b.dv, &b.dq_proxy, &b.dk_proxy, &k.kl})
    sum += look_at(*t);
  return sum;
}

} // namespace

int main() {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16})
    for (bool sparse : {true, false})
      std::printf("dtype %d %s: checksum %ld\n", static_cast<int>(dtype),
                  sparse ? "sparse" : "warm-up", static_cast<long>(step(dtype, sparse)));
  std::printf("%s\n", thresher::info_json().c_str());
}
