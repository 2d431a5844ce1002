// Host side of the sparse forward: index, proxy LSE, then main kernel and combine pass by pass.
#include "cuda/common/launch.h"
#include "cuda/kernel.h"
#include "cuda/portable/forward/forward.h"
#include "cuda/sm90/common/support.h"
#include "cuda/sm90/common/taint.cuh"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/forward/combine.cuh"
#include "cuda/sm90/forward/kernel.cuh"

namespace thresher::cuda::sm90 {

namespace {

using namespace forward;

constexpr double kLog2e = 1.4426950408889634;

struct Plan {
  BlockIndex index;
  int parts = 1; // kv heads of a proxy head
  int windows_per_pass = 1;
  int passes = 0;
  int32_t* next_item;       // [passes] of the main kernel, of the proxy's, of the way out
  int32_t* gate;            // [1] an input is not finite
  void* partial;            // of one pass
  float2* statistics;       // of one pass
  float2* proxy_statistics; // of one pass; null: no proxy
};

constexpr int64_t kPassBytes = int64_t(5) << 28; // 1.25 GiB: 4,096 tokens of M3

Plan make_plan(const ForwardParams& params, const Shapes& s, WorkspaceCarver& workspace) {
  Plan plan;
  plan.parts = std::max(1, s.kv_heads / s.proxy_heads);
  IndexOptions options = index_options(s, Config::kRows);
  const int64_t bytes_per_token =
      static_cast<int64_t>(s.q_heads) * s.top_k * (2 * Config::kDim + sizeof(float2));
  while (options.window_tokens > 256 && options.window_tokens * bytes_per_token > kPassBytes)
    options.window_tokens /= 2;
  plan.index = carve_index(params.problem, s, options, workspace);
  plan.windows_per_pass = static_cast<int>(
      std::clamp<int64_t>(kPassBytes / (bytes_per_token * plan.index.window_tokens), 1,
                          std::max<int64_t>(plan.index.windows, 1)));
  plan.passes = ceil_div(plan.index.windows, plan.windows_per_pass);
  const int64_t tokens = std::min<int64_t>(
      static_cast<int64_t>(plan.windows_per_pass) * plan.index.window_tokens, s.tokens);
  const int64_t rows = tokens * s.q_heads * s.top_k;
  plan.next_item = workspace.take<int32_t>(3 * plan.passes + 1);
  plan.gate = plan.next_item ? plan.next_item + 3 * plan.passes : nullptr;
  plan.partial = workspace.take<uint16_t>(rows * Config::kDim);
  plan.statistics = workspace.take<float2>(rows);
  plan.proxy_statistics =
      workspace.take<float2>(params.proxy_lse ? tokens * s.proxy_heads * s.top_k : 0);
  return plan;
}

// The proxy is one row a token, a sixteenth of the work: the portable kernel serves.
template <class T>
void run_proxy_lse(const ForwardParams& params, const Shapes& s, const Plan& plan,
                   const CombineParams& pass, const Params& main, int32_t* next_item,
                   cudaStream_t stream) {
  portable::forward::PartialParams<T> proxy = {};
  proxy.index = plan.index;
  proxy.first_segment = main.first_segment;
  proxy.last_segment = main.last_segment;
  proxy.first_token = main.first_token;
  proxy.q_heads = s.proxy_heads;
  proxy.kv_heads = s.proxy_kv_heads;
  proxy.parts = 1;
  proxy.key_tiles = 1;
  proxy.dim = s.proxy_dim;
  proxy.score_scale = static_cast<float>(std::abs(params.problem.proxy_scale) * kLog2e);
  proxy.negate = params.problem.proxy_scale < 0;
  proxy.q = tensor_view<const T>(params.q_proxy);
  proxy.k = tensor_view<const T>(params.k_proxy);
  proxy.ticket = next_item;
  proxy.statistics = plan.proxy_statistics;
  with_dim<64, 128>(portable::forward::tile_dim(s.proxy_dim), [&]<int kDim>() {
    portable::forward::PartialKernel<T, kDim, Config::kKeys, false>::run(proxy, stream);
  });
  portable::forward::CombineParams merge = {};
  merge.index = plan.index;
  merge.first_token = pass.first_token;
  merge.tokens = pass.tokens;
  merge.heads = s.proxy_heads;
  merge.group = 1;
  merge.key_tiles = 1;
  merge.statistics = plan.proxy_statistics;
  portable::forward::combine_statistics(merge, tensor_view<float>(params.proxy_lse, false), stream);
}

// The pass once more by the portable kernels, in the same workspace, if an input is not finite.
template <class T>
void run_careful(const ForwardParams& params, const Shapes& s, const Plan& plan,
                 const CombineParams& pass, const Params& main, int32_t* next_item,
                 cudaStream_t stream) {
  portable::forward::PartialParams<T> careful = {};
  careful.index = plan.index;
  careful.index.gate = plan.gate;
  careful.first_segment = main.first_segment;
  careful.last_segment = main.last_segment;
  careful.first_token = main.first_token;
  careful.q_heads = s.q_heads;
  careful.kv_heads = s.kv_heads;
  careful.parts = plan.parts;
  careful.key_tiles = 1;
  careful.dim = s.dim;
  careful.score_scale = main.score_scale;
  careful.q = tensor_view<const T>(params.q);
  careful.k = tensor_view<const T>(params.k);
  careful.v = tensor_view<const T>(params.v);
  careful.ticket = next_item;
  careful.partial = static_cast<T*>(plan.partial);
  careful.statistics = plan.statistics;
  portable::forward::PartialKernel<T, Config::kDim, Config::kKeys, true>::run(careful, stream);
  portable::forward::CombineParams merge = {};
  merge.index = careful.index;
  merge.first_token = pass.first_token;
  merge.tokens = pass.tokens;
  merge.heads = s.q_heads;
  merge.group = s.group();
  merge.key_tiles = 1;
  merge.dim = merge.padded_dim = Config::kDim;
  merge.statistics = plan.statistics;
  portable::forward::combine(merge, static_cast<const T*>(plan.partial), tensor_view<T>(params.out),
                             tensor_view<float>(params.lse, false), stream);
}

template <class T>
void run(const ForwardParams& params, const Shapes& s, const Plan& plan, cudaStream_t stream) {
  const int sms = device_facts().sm_count;
  const BlockIndex& index = plan.index;
  build_index(index, params.problem, s, params.block_indices, stream);
  check(cudaMemsetAsync(plan.next_item, 0, (3 * plan.passes + 1) * sizeof(int32_t), stream),
        "cudaMemsetAsync");

  // Of K and Q, what is not finite only reaches the rows that read it.
  launch("sm90 taint", taint_keys_kernel<T>, sms * 8, 256, 0, stream,
         tensor_view<const T>(params.v), index.key_row, static_cast<int32_t>(s.keys), s.kv_heads,
         s.dim, plan.gate);

  const int heads = rows_per_token(s);
  const CUtensorMap q_map = encode_map(params.q, heads, 1);
  const CUtensorMap k_map = encode_map(params.k, 1, Config::kKeys);
  const CUtensorMap v_map = encode_map(params.v, 1, Config::kKeys);
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int first_window = pass * plan.windows_per_pass;
    const int last_window = std::min(first_window + plan.windows_per_pass, index.windows);
    Params main = {};
    main.index = index;
    main.first_segment = first_window * s.proxy_heads;
    main.last_segment = last_window * s.proxy_heads;
    main.first_token = static_cast<int32_t>(first_window * int64_t(index.window_tokens));
    main.token_rows = static_cast<int32_t>(s.tokens_per_row);
    main.key_rows = static_cast<int32_t>(s.keys_per_row);
    main.q_heads = s.q_heads;
    main.kv_heads = s.kv_heads;
    main.parts = plan.parts;
    main.next_item = plan.next_item + pass;
    main.partial = plan.partial;
    main.statistics = plan.statistics;
    main.score_scale = static_cast<float>(params.problem.softmax_scale * kLog2e);
    with_heads(heads, [&]<int kHeads>() {
      launch("sm90 forward", forward_kernel<T, kHeads>, sms, Config::kThreads, sizeof(Shared),
             stream, true, q_map, k_map, v_map, main);
    });

    CombineParams combine = {};
    combine.index = index;
    combine.first_token = main.first_token;
    combine.tokens = static_cast<int32_t>(
        std::min<int64_t>(s.tokens, last_window * int64_t(index.window_tokens)) - main.first_token);
    combine.q_heads = s.q_heads;
    combine.group = s.group();
    combine.partial = plan.partial;
    combine.statistics = plan.statistics;
    with_heads(heads, [&]<int kHeads>() {
      constexpr int kRows = kPieceRows<kHeads>;
      launch("sm90 combine", combine_kernel<T, kRows>,
             ceil_div(int64_t(combine.tokens) * s.q_heads / 2, int64_t(8)), 256, 0, stream, true,
             combine, tensor_view<T>(params.out), tensor_view<float>(params.lse, false));
    });
    run_careful<T>(params, s, plan, combine, main, plan.next_item + 2 * plan.passes + pass, stream);
    if (params.proxy_lse)
      run_proxy_lse<T>(params, s, plan, combine, main, plan.next_item + plan.passes + pass, stream);
  }
}

} // namespace

extern const Kernel<ForwardParams> sparse_forward = {
    "sm90",
    [](const ForwardParams& params, const Shapes& s, const DeviceFacts& device) -> std::string {
      const std::string reason = refuses_attention(s, device);
      if (!reason.empty())
        return reason;
      if (params.proxy_lse && !has_proxy_kernel(s))
        return kProxyDims;
      if (!(params.problem.softmax_scale > 0))
        return "needs a positive softmax_scale";
      return strides_fit(params.q) && strides_fit(params.k) && strides_fit(params.v) ? ""
                                                                                     : kStrides;
    },
    [](const ForwardParams& params, const Shapes& shapes) {
      WorkspaceCarver measure;
      make_plan(params, shapes, measure);
      return measure.bytes();
    },
    [](const ForwardParams& params, const Shapes& shapes, const Workspace& workspace,
       cudaStream_t stream) {
      WorkspaceCarver carver(workspace.data);
      const Plan plan = make_plan(params, shapes, carver);
      with_dtype(shapes.dtype, [&]<class T>() { run<T>(params, shapes, plan, stream); });
    }};

} // namespace thresher::cuda::sm90
