// Host side of the portable sparse forward: sizes, workspace, passes.
#include "cuda/portable/forward/forward.h"

#include "cuda/common/dtype.h"
#include "cuda/kernel.h"
#include "cuda/portable/forward/heads.h"

#include <algorithm>
#include <cmath>

namespace thresher::cuda::portable {
namespace forward {
namespace {

constexpr double kLog2e = 1.4426950408889634;
constexpr int64_t kPassBytes = int64_t{5} << 28; // 1.25 GiB: 4,096 tokens of 64 heads, D 128, K 16
constexpr int32_t kLeastWindow = 64;             // tokens

// Keys of a unit.
int main_keys(const Shapes& s) {
  return s.dim <= 128 && s.block_size > 64 ? 128 : 64;
}
int proxy_keys(const Shapes& s) {
  return s.proxy_dim <= 128 ? 128 : 64;
}

struct Plan {
  BlockIndex index;
  int32_t key_tiles = 1, proxy_key_tiles = 1; // units of a block
  int32_t windows_per_pass = 1, passes = 0;
  int32_t* tickets = nullptr;         // [2, passes]
  void* partial = nullptr;            // of one pass
  float2* statistics = nullptr;       // of one pass
  float2* proxy_statistics = nullptr; // of one pass; null: no proxy
};

Plan make_plan(const ForwardParams& params, const Shapes& s, const ForwardOptions& options,
               WorkspaceCarver& workspace) {
  Plan plan;
  plan.key_tiles = ceil_div(s.block_size, main_keys(s));
  const bool proxy = static_cast<bool>(params.proxy_lse);
  if (proxy)
    plan.proxy_key_tiles = ceil_div(s.block_size, proxy_keys(s));
  const int64_t main_rows = int64_t{s.q_heads} * s.top_k * plan.key_tiles; // of a token
  const int64_t proxy_rows = proxy ? int64_t{s.proxy_heads} * s.top_k * plan.proxy_key_tiles : 0;
  const int64_t token_bytes = main_rows * (2 * tile_dim(s.dim) + int64_t{sizeof(float2)}) +
                              proxy_rows * int64_t{sizeof(float2)};
  const int64_t pass_bytes = options.pass_bytes ? options.pass_bytes : kPassBytes;
  IndexOptions index_options;
  index_options.window_tokens = suggested_window(s);
  while (index_options.window_tokens > kLeastWindow &&
         index_options.window_tokens * token_bytes > pass_bytes)
    index_options.window_tokens /= 2;
  plan.index = carve_index(params.problem, s, index_options, workspace);
  plan.windows_per_pass = static_cast<int32_t>(std::clamp<int64_t>(
      pass_bytes / (token_bytes * plan.index.window_tokens), 1, std::max(plan.index.windows, 1)));
  plan.passes = ceil_div(plan.index.windows, plan.windows_per_pass);
  const int64_t tokens =
      std::min<int64_t>(int64_t{plan.windows_per_pass} * plan.index.window_tokens, s.tokens);
  plan.tickets = workspace.take<int32_t>(2 * plan.passes);
  plan.partial = workspace.take<uint16_t>(tokens * main_rows * tile_dim(s.dim));
  plan.statistics = workspace.take<float2>(tokens * main_rows);
  plan.proxy_statistics = workspace.take<float2>(tokens * proxy_rows);
  return plan;
}

template <class T, class F>
void with_main_kernel(const Shapes& s, F&& f) {
  with_dim<64, 128, 256>(tile_dim(s.dim), [&]<int kDim>() {
    if (main_keys(s) == 64)
      f.template operator()<PartialKernel<T, kDim, 64, true>>();
    else if constexpr (kDim <= 128)
      f.template operator()<PartialKernel<T, kDim, 128, true>>();
  });
}
template <class T, class F>
void with_proxy_kernel(const Shapes& s, F&& f) {
  with_dim<64, 128, 256>(tile_dim(s.proxy_dim), [&]<int kDim>() {
    f.template operator()<PartialKernel<T, kDim, kDim <= 128 ? 128 : 64, false>>();
  });
}

template <class T>
void run_passes(const ForwardParams& params, const Shapes& s, const Plan& plan,
                cudaStream_t stream) {
  const BlockIndex& index = plan.index;
  PartialParams<T> main = {};
  main.index = index;
  main.q_heads = s.q_heads;
  main.kv_heads = s.kv_heads;
  main.parts = most_parts(s.q_heads, s.kv_heads, s.proxy_heads);
  main.key_tiles = plan.key_tiles;
  main.dim = s.dim;
  main.score_scale = static_cast<float>(std::abs(params.problem.softmax_scale) * kLog2e);
  main.negate = params.problem.softmax_scale < 0;
  main.q = tensor_view<const T>(params.q);
  main.k = tensor_view<const T>(params.k);
  main.v = tensor_view<const T>(params.v);
  main.partial = static_cast<T*>(plan.partial);
  main.statistics = plan.statistics;

  PartialParams<T> proxy = main;
  proxy.q_heads = s.proxy_heads;
  proxy.kv_heads = s.proxy_kv_heads;
  proxy.parts = 1;
  proxy.key_tiles = plan.proxy_key_tiles;
  proxy.dim = s.proxy_dim;
  proxy.score_scale = static_cast<float>(std::abs(params.problem.proxy_scale) * kLog2e);
  proxy.negate = params.problem.proxy_scale < 0;
  proxy.q = tensor_view<const T>(params.q_proxy);
  proxy.k = tensor_view<const T>(params.k_proxy);
  proxy.v = {};
  proxy.partial = nullptr;
  proxy.statistics = plan.proxy_statistics;

  for (int32_t pass = 0; pass < plan.passes; ++pass) {
    const int32_t first_window = pass * plan.windows_per_pass;
    const int32_t last_window = std::min(first_window + plan.windows_per_pass, index.windows);
    const auto first_token = static_cast<int32_t>(int64_t{first_window} * index.window_tokens);
    for (PartialParams<T>* kernel : {&main, &proxy}) {
      kernel->first_segment = first_window * s.proxy_heads;
      kernel->last_segment = last_window * s.proxy_heads;
      kernel->first_token = first_token;
    }
    CombineParams merge = {};
    merge.index = index;
    merge.first_token = first_token;
    merge.tokens = static_cast<int32_t>(
        std::min<int64_t>(s.tokens, int64_t{last_window} * index.window_tokens) - first_token);

    main.ticket = plan.tickets + pass;
    with_main_kernel<T>(s, [&]<class Kernel>() { Kernel::run(main, stream); });
    merge.heads = s.q_heads;
    merge.group = s.group();
    merge.key_tiles = plan.key_tiles;
    merge.dim = s.dim;
    merge.padded_dim = tile_dim(s.dim);
    merge.statistics = plan.statistics;
    combine(merge, main.partial, tensor_view<T>(params.out), tensor_view<float>(params.lse, false),
            stream);

    if (!plan.proxy_statistics)
      continue;
    proxy.ticket = plan.tickets + plan.passes + pass;
    with_proxy_kernel<T>(s, [&]<class Kernel>() { Kernel::run(proxy, stream); });
    merge.heads = s.proxy_heads;
    merge.group = 1;
    merge.key_tiles = plan.proxy_key_tiles;
    merge.statistics = plan.proxy_statistics;
    combine_statistics(merge, tensor_view<float>(params.proxy_lse, false), stream);
  }
}

} // namespace

size_t forward_workspace_size(const ForwardParams& params, const Shapes& shapes,
                              const ForwardOptions& options) {
  WorkspaceCarver measure;
  make_plan(params, shapes, options, measure);
  return measure.bytes();
}

void run_forward(const ForwardParams& params, const Shapes& shapes, const Workspace& workspace,
                 const ForwardOptions& options, cudaStream_t stream) {
  WorkspaceCarver carver(workspace.data);
  const Plan plan = make_plan(params, shapes, options, carver);
  build_index(plan.index, params.problem, shapes, params.block_indices, stream);
  check(cudaMemsetAsync(plan.tickets, 0, 2 * plan.passes * sizeof(int32_t), stream),
        "clear forward tickets");
  with_dtype(shapes.dtype, [&]<class T>() { run_passes<T>(params, shapes, plan, stream); });
}

} // namespace forward

const Kernel<ForwardParams> sparse_forward = {
    "portable",
    [](const ForwardParams&, const Shapes&, const DeviceFacts&) { return std::string(); },
    [](const ForwardParams& params, const Shapes& shapes) {
      return forward::forward_workspace_size(params, shapes, {});
    },
    [](const ForwardParams& params, const Shapes& shapes, const Workspace& workspace,
       cudaStream_t stream) { forward::run_forward(params, shapes, workspace, {}, stream); }};

} // namespace thresher::cuda::portable
