// The Hopper selection beside its products alone: the same tiles, copies and order of products, but
// no maxima and no top-k. From 16K tokens on both run at what power allows, so their ratio, taken
// in turn in one process, says more than either's TFLOP/s.
//   gpu_select [part of a case's name] [tests/contract/data/packed_192k.json]
// prints a line of JSON a case; built by: cmake --build build/dev --target gpu_select
// TFLOP/s count 2 Dp for each (row, visible key).
#include "../tests/cuda/harness.h"

#include "cuda/common/workspace.h"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/select/kernel.cuh"
#include "cuda/sm90/select/select.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

using namespace thresher;
using namespace thresher::test;
using bf16 = __nv_bfloat16;
namespace sm90 = cuda::sm90;
namespace hopper = sm90::select;

namespace {

constexpr int kBlock = 128;

// --- the products alone -------------------------------------------------------------------------
template <int kDim>
using Config = hopper::Config<kDim, kBlock, 16>; // it keeps no lists

// The consumer without what comes after a product.
template <class T, class C>
class Products {
 public:
  __device__ Products(hopper::Shared<C>& shared, const hopper::Params&)
      : s_(shared), lane_(threadIdx.x & 31) {
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;
    query_ = sm90::shared_u32(s_.query) + group * C::kConsumerRows * 128;
  }
  __device__ __forceinline__ void run() {
    uint32_t parity = 0;
#pragma unroll 1
    while (true) {
      sm90::barrier_wait(s_.query_full, parity);
      parity ^= 1;
      const int stages = __shfl_sync(~0u, s_.unit.stages, 0);
      if (stages < 0)
        return;
      if (stages > 0)
        sweep(stages);
      __syncwarp();
      if (lane_ == 0)
        sm90::barrier_arrive(s_.query_empty);
    }
  }

 private:
  template <int kSub>
  __device__ __forceinline__ void issue(float (&score)[64], int stage) {
    const uint32_t query = query_ + kSub * 64 * 128, keys = sm90::shared_u32(s_.keys[stage]);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kDim / 16; ++k)
      sm90::products_ss<T, 0, 0>(
          score, sm90::shared_matrix(query + (k >> 2) * C::kQueryHalfBytes + (k & 3) * 32, 16),
          sm90::shared_matrix(keys + (k >> 2) * C::kKeyHalfBytes + (k & 3) * 32, 16), k > 0);
    sm90::wgmma_commit();
  }
  __device__ __forceinline__ void advance() {
    if (++stage_ == C::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }
  __device__ __forceinline__ void release(int stage) {
    if (lane_ == 0)
      sm90::barrier_arrive(s_.keys_empty[stage]);
  }

  __device__ __forceinline__ void sweep(int stages) {
    float low[64], high[64];
    sm90::barrier_wait(s_.keys_full[stage_], parity_);
    issue<0>(low, stage_);
    int number = 0;
#pragma unroll 1
    for (; number + 1 < stages; ++number) {
      const int stage = stage_;
      issue<1>(high, stage);
      sm90::wgmma_wait<1>();
      sm90::keep(low);
      advance();
      sm90::barrier_wait(s_.keys_full[stage_], parity_);
      issue<0>(low, stage_);
      sm90::wgmma_wait<1>();
      sm90::keep(high);
      release(stage);
    }
    if (number + 1 == stages) { // as in the selection's sweep
      issue<1>(high, stage_);
      sm90::wgmma_wait<0>();
      sm90::keep(low);
      sm90::keep(high);
      release(stage_);
      advance();
    } else {
      sm90::wgmma_wait<0>();
      sm90::keep(low);
    }
  }

  hopper::Shared<C>& s_;
  const int lane_;
  uint32_t query_;
  int stage_ = 0;
  uint32_t parity_ = 0;
};

template <int kDim>
void run_products(const SelectParams& params, const hopper::Params& kernel_params,
                  cudaStream_t stream) {
  using C = Config<kDim>;
  const cuda::portable::SelectArgs& args = kernel_params.args;
  cuda::portable::order_tiles(args, stream);
  cuda::launch("products", hopper::select_kernel<bf16, C, Products>,
               dim3(cuda::device_facts().sm_count), dim3(C::kThreads), sizeof(hopper::Shared<C>),
               stream, true, sm90::encode_map(params.q_proxy, args.tile_heads, args.tile_tokens),
               sm90::encode_map(params.k_proxy, 1, C::kKeys), kernel_params);
}

// --- cases --------------------------------------------------------------------------------------
enum class Data { kNormal, kRealLike, kRising, kEqual };

struct Case {
  std::string name;
  std::vector<int64_t> lengths;
  int heads = 4, key_heads = 1, dim = 128;
  Data data = Data::kNormal;
  int top_k = 16;
};

// Vectors whose direction drifts along the tokens, so that neighbours choose alike and prefer what
// is near. q and k drift together: the walk and its seed are the same.
std::vector<bf16> drifting_values(int64_t tokens, int heads, int dim, uint64_t seed) {
  constexpr double kStay = 0.998, kDrift = 0.8, kNoise = 0.6; // 1 / (1 - kStay) = 500 tokens
  const auto steps = random_values<float>(tokens * dim, 7);
  const auto noise = random_values<float>(tokens * heads * dim, seed);
  std::vector<double> walk(steps.begin(), steps.begin() + dim);
  std::vector<bf16> values(noise.size());
  for (int64_t i = 0; i < tokens * heads * dim; ++i) {
    const int64_t token = i / (heads * dim), d = i % dim;
    if (i % (heads * dim) < dim) // the token's first head
      walk[d] = kStay * walk[d] + std::sqrt(1 - kStay * kStay) * steps[token * dim + d];
    values[i] = from_double<bf16>(kDrift * walk[d] + kNoise * noise[i]);
  }
  return values;
}

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
  return x[x.size() / 2];
}

void measure(const Case& c) {
  const Batch batch = packed(c.lengths);
  const DeviceBatch device_batch(batch);
  SelectParams params;
  Shapes shapes;
  device_batch.describe(params.problem, shapes);
  shapes.proxy_heads = shapes.kv_heads = c.heads;
  shapes.proxy_kv_heads = c.key_heads;
  shapes.proxy_dim = c.dim;
  shapes.block_size = params.problem.block_size = kBlock;
  shapes.top_k = params.problem.top_k_blocks = c.top_k;
  shapes.dtype = DType::kBFloat16;
  params.problem.local_blocks = 1;
  params.problem.proxy_scale = 1;
  auto q_values = random_values<bf16>(batch.tokens * c.heads * c.dim, 1);
  auto k_values = random_values<bf16>(batch.keys * c.key_heads * c.dim, 2);
  if (c.data == Data::kRealLike) {
    q_values = drifting_values(batch.tokens, c.heads, c.dim, 1);
    k_values = drifting_values(batch.keys, c.key_heads, c.dim, 2);
  }
  if (c.data == Data::kEqual)
    std::fill(k_values.begin(), k_values.end(), from_double<bf16>(0.5));
  if (c.data == Data::kRising) { // block b's keys hold b in two digits, so that bf16 is exact
    std::fill(q_values.begin(), q_values.end(), from_double<bf16>(1));
    const int64_t row = int64_t{c.key_heads} * c.dim;
    for (int64_t i = 0; i < batch.keys * row; ++i) {
      const int64_t block = i / row / kBlock;
      const int64_t digit = i % c.dim == 0 ? block % 256 : i % c.dim == 1 ? block / 256 * 256 : 0;
      k_values[static_cast<size_t>(i)] = from_double<bf16>(static_cast<double>(digit));
    }
  }
  const DeviceArray<bf16> q(q_values), k(k_values);
  const DeviceArray<int32_t> ids(int64_t{c.heads} * batch.tokens * c.top_k);
  params.q_proxy = tensor_of(q, batch.tokens, c.heads, c.dim);
  params.k_proxy = tensor_of(k, batch.keys, c.key_heads, c.dim);
  params.block_indices = tensor_of(ids, c.heads, batch.tokens, c.top_k);
  double flops = 0;
  for (const int64_t length : c.lengths)
    flops += static_cast<double>(length) * (length + 1) * c.heads * c.dim;

  const size_t bytes = sm90::select_workspace_size(params, shapes, 0);
  const DeviceArray<char> workspace(static_cast<int64_t>(bytes));
  hopper::Params alone = {};
  alone.args = cuda::portable::select_args(params, shapes);
  cuda::portable::choose_tiles(alone.args, Config<128>::kRows);
  const DeviceArray<int32_t> tiles(alone.args.tile_slots), counters(2);
  alone.args.tiles = tiles.data();
  alone.args.counters = counters.data();

  const int count = std::clamp(static_cast<int>(2e13 / flops), 1, 50); // some 30 ms
  const std::pair<cudaGraphExec_t, const char*> graphs[] = {
      {make_graph(count,
                  [&](cudaStream_t stream) {
                    sm90::run_select(params, shapes, {workspace.data(), bytes}, 0, stream);
                  }),
       "select"},
      {make_graph(count,
                  [&](cudaStream_t stream) {
                    if (c.dim == 64)
                      run_products<64>(params, alone, stream);
                    else
                      run_products<128>(params, alone, stream);
                  }),
       "products"}};
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  std::vector<double> times[2], ratios;
  const int rounds = flops > 1e14 ? 2 : 7;
  for (int round = -1; round < rounds; ++round) { // the first is a warm-up
    double ms[2];
    for (int i = 0; i < 2; ++i) {
      CUDA_CHECK(cudaEventRecord(begin));
      CUDA_CHECK(cudaGraphLaunch(graphs[i].first, nullptr));
      CUDA_CHECK(cudaEventRecord(end));
      CUDA_CHECK(cudaEventSynchronize(end));
      float elapsed = 0;
      CUDA_CHECK(cudaEventElapsedTime(&elapsed, begin, end));
      ms[i] = elapsed / count;
      if (round >= 0)
        times[i].push_back(ms[i]);
    }
    if (round >= 0)
      ratios.push_back(ms[1] / ms[0]);
  }
  std::printf("{\"case\": \"%s\", \"tokens\": %lld, \"heads\": \"%d/%d\", \"dim\": %d, "
              "\"top_k\": %d",
              c.name.c_str(), static_cast<long long>(batch.tokens), c.heads, c.key_heads, c.dim,
              c.top_k);
  for (int i = 0; i < 2; ++i)
    std::printf(", \"%s_ms\": %.4f, \"%s_tflops\": %.0f", graphs[i].second, median(times[i]),
                graphs[i].second, flops / median(times[i]) * 1e-9);
  std::printf(", \"of_products\": %.3f, \"workspace_mib\": %.1f}\n", median(ratios),
              bytes / 1048576.0);
  std::fflush(stdout);
  for (const auto& graph : graphs)
    CUDA_CHECK(cudaGraphExecDestroy(graph.first));
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
}

// Every "name": [boundaries] of the file.
std::vector<Case> read_packings(const char* path) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<Case> cases;
  for (size_t at = 0; (at = text.find("\":[", at)) != std::string::npos;) {
    const size_t name = text.rfind('"', at - 1) + 1;
    Case c = {"192K " + text.substr(name, at - name), {}};
    at += 3;
    long long last = std::strtoll(text.c_str() + at, nullptr, 10);
    const size_t close = text.find(']', at);
    while ((at = text.find(',', at)) < close) {
      const long long next = std::strtoll(text.c_str() + ++at, nullptr, 10);
      c.lengths.push_back(next - last);
      last = next;
    }
    at = close;
    cases.push_back(c);
  }
  return cases;
}

} // namespace

int main(int count, char** arguments) {
  constexpr int64_t kK = 1024;
  std::vector<Case> cases;
  for (const int64_t thousands : {4, 8, 16, 32, 128})
    cases.push_back({"4/1 " + std::to_string(thousands) + "K", {thousands * kK}});
  cases.push_back({"1/1 128K", {128 * kK}, 1, 1});
  cases.push_back({"8/2 128K", {128 * kK}, 8, 2});
  cases.push_back({"4/1 128K Dp 64", {128 * kK}, 4, 1, 64});
  cases.push_back({"real-like 32K", {32 * kK}, 4, 1, 128, Data::kRealLike});
  cases.push_back({"real-like 128K", {128 * kK}, 4, 1, 128, Data::kRealLike});
  for (const int top_k : {16, 32, 64}) {
    const std::string places = " K " + std::to_string(top_k);
    if (top_k > 16)
      cases.push_back({"4/1 32K" + places, {32 * kK}, 4, 1, 128, Data::kNormal, top_k});
    cases.push_back({"rising 32K" + places, {32 * kK}, 4, 1, 128, Data::kRising, top_k});
    cases.push_back({"equal 32K" + places, {32 * kK}, 4, 1, 128, Data::kEqual, top_k});
  }
  if (count > 2)
    for (Case& c : read_packings(arguments[2]))
      cases.push_back(std::move(c));
  cases.push_back({"4/1 1M", {kK * kK}});
  for (const Case& c : cases)
    if (count < 2 || c.name.find(arguments[1]) != std::string::npos)
      measure(c);
}
