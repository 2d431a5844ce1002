// Host side of the KL rows: index, then the kernel and the sum of its partial results pass by pass.
#include "cuda/common/dtype.h"
#include "cuda/common/launch.h"
#include "cuda/kernel.h"
#include "cuda/sm90/common/support.h"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/kl/kernel.cuh"

#include <algorithm>

namespace thresher::cuda::sm90 {

namespace {

// Everything a call needs beside its tensors.
struct Plan {
  BlockIndex index;
  int windows_per_pass = 1, passes = 1;
  int32_t* next_item; // [passes]
  float* partial;     // [tokens of a pass, Hp, K, kPartials]
};

constexpr int64_t kPassBytes = int64_t(1) << 28; // 256 MiB of partial sums

Plan make_plan(const KlParams& params, const Shapes& s, WorkspaceCarver& workspace) {
  Plan plan;
  // Entries of an item as in the other kernels, whose tiles have half as many rows.
  plan.index = carve_index(params.problem, s, index_options(s, 64), workspace);
  const int64_t window = plan.index.window_tokens;
  const int64_t window_partials = window * s.proxy_heads * s.top_k * kl::kPartials;
  plan.windows_per_pass =
      static_cast<int>(std::clamp<int64_t>(kPassBytes / (window_partials * int64_t{sizeof(float)}),
                                           1, std::max<int64_t>(plan.index.windows, 1)));
  plan.passes = ceil_div(plan.index.windows, plan.windows_per_pass);
  plan.next_item = workspace.take<int32_t>(plan.passes);
  plan.partial = workspace.take<float>(plan.windows_per_pass * window_partials);
  return plan;
}

template <class T>
void run(const KlParams& params, const Shapes& s, const Plan& plan, cudaStream_t stream) {
  const int sms = device_facts().sm_count;
  const BlockIndex& index = plan.index;
  build_index(index, params.problem, s, params.block_indices, stream);
  check(cudaMemsetAsync(plan.next_item, 0, plan.passes * sizeof(int32_t), stream),
        "cudaMemsetAsync");

  const int heads = rows_per_token(s);
  const CUtensorMap q_map = encode_map(params.q, heads, 1);
  const CUtensorMap k_map = encode_map(params.k, 1, s.block_size);
  const CUtensorMap k_proxy_map = encode_map(params.k_proxy, 1, s.block_size);
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int first_window = pass * plan.windows_per_pass;
    const int last_window = std::min(first_window + plan.windows_per_pass, index.windows);
    kl::Params<T> main = {};
    main.index = index;
    main.first_segment = first_window * s.proxy_heads;
    main.last_segment = last_window * s.proxy_heads;
    main.first_token = static_cast<int32_t>(first_window * int64_t(index.window_tokens));
    main.token_rows = static_cast<int32_t>(s.tokens_per_row);
    main.key_rows = static_cast<int32_t>(s.keys_per_row);
    main.kv_heads = s.kv_heads;
    main.proxy_heads = s.proxy_heads;
    main.proxy_kv_heads = s.proxy_kv_heads;
    main.next_item = plan.next_item + pass;
    main.q_proxy = tensor_view<const T>(params.q_proxy);
    main.lse = tensor_view<const float>(params.lse, false);
    main.proxy_lse = tensor_view<const float>(params.proxy_lse, false);
    main.kl_partial = plan.partial;
    main.score_scale = static_cast<float>(params.problem.softmax_scale * 1.4426950408889634);
    main.proxy_score_scale = static_cast<float>(params.problem.proxy_scale * 1.4426950408889634);
    with_heads(heads, [&]<int kHeads>() {
      with_dim<64, 128>(s.proxy_dim, [&]<int kDim>() {
        using C = kl::Config<kHeads, kDim>;
        launch("sm90 kl", kl::kl_kernel<T, C>, sms, C::kThreads, sizeof(kl::Shared<C>), stream,
               q_map, k_map, k_proxy_map, main);
      });
    });
    const int32_t tokens = static_cast<int32_t>(
        std::min<int64_t>(s.tokens, last_window * int64_t(index.window_tokens)) - main.first_token);
    launch("sm90 kl sum", kl::sum_partials_kernel<T>, sms * 8, 256, 0, stream, plan.partial,
           index.slot_count, tensor_view<float>(params.kl, false), main.first_token, tokens,
           static_cast<int32_t>(s.tokens), s.proxy_heads, s.top_k);
  }
}

} // namespace

extern const Kernel<KlParams> proxy_kl = {
    "sm90",
    [](const KlParams& params, const Shapes& s, const DeviceFacts& device) -> std::string {
      if (!params.block_indices)
        return "has no variant for all visible keys";
      const std::string reason = refuses_attention(s, device);
      if (!reason.empty())
        return reason;
      if (s.kv_heads > s.proxy_heads)
        return "needs the main heads of a proxy head on one kv head";
      if (!has_proxy_kernel(s))
        return kProxyDims;
      return strides_fit(params.q) && strides_fit(params.k) && strides_fit(params.k_proxy)
                 ? ""
                 : kStrides;
    },
    [](const KlParams& params, const Shapes& shapes) {
      WorkspaceCarver measure;
      make_plan(params, shapes, measure);
      return measure.bytes();
    },
    [](const KlParams& params, const Shapes& shapes, const Workspace& workspace,
       cudaStream_t stream) {
      WorkspaceCarver carver(workspace.data);
      const Plan plan = make_plan(params, shapes, carver);
      with_dtype(shapes.dtype, [&]<class T>() { run<T>(params, shapes, plan, stream); });
    }};

} // namespace thresher::cuda::sm90
