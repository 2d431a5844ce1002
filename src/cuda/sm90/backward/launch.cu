// Host side of the backward: index, then row constants, main kernel, proxy and conversions pass by
// pass.
#include "cuda/common/launch.h"
#include "cuda/kernel.h"
#include "cuda/portable/backward/backward.h"
#include "cuda/sm90/backward/combine.cuh"
#include "cuda/sm90/backward/kernel.cuh"
#include "cuda/sm90/backward/passes.cuh"
#if THRESHER_UNPROVEN
#include "cuda/sm90/backward/proxy_wgmma.cuh"
#else
#include "cuda/sm90/backward/proxy.cuh"
#endif
#include "cuda/sm90/common/support.h"
#include "cuda/sm90/common/tensor_map.h"

#include <algorithm>

namespace thresher::cuda::sm90 {

namespace {

using namespace backward;

// Everything a call needs beside its tensors.
struct Plan {
  BlockIndex index;
  int32_t* gate;     // [1] an input is not finite
  Workspace way_out; // of the portable kernels, over what is no longer needed
  bool deterministic = false;
  bool proxy = false; // teacher rows are wanted
  int parts = 1;      // kv heads of a proxy head
  int windows_per_pass = 1;
  int64_t tokens_per_pass = 0; // at most 65,536: a tile holds 16-bit token offsets
  int64_t teacher_part_stride = 0;
  float *bound, *minus_lse, *minus_delta, *dk, *dv, *dq_proxy, *dk_proxy, *kl_partial;
  // [passes] of the main kernel, then as many of the proxy's, which deals out items only if
  // deterministic.
  int32_t* next_item;
  int32_t *turns, *proxy_turns; // deterministic only
  char* cleared;                // bound, work counters, turns
  int64_t cleared_bytes;
  int8_t* exponent;
  __half *dq, *teacher;
  int64_t accumulator_count, proxy_key_count; // floats of dk (= of dv), of dk_proxy
};

constexpr int64_t kPassBytes = int64_t(5) << 28; // 1.25 GiB

// The portable kernels read the same index. Not if deterministic: a place in fp32 for every slot
// allows them windows too short for this kernel, so they build their own, in the place of this.
portable::backward::Embedding embedding(const Plan& plan) {
  portable::backward::Embedding result;
  result.index = plan.deterministic ? nullptr : &plan.index;
  result.gate = plan.gate;
  if (plan.deterministic)
    result.pass_bytes = kPassBytes;
  return result;
}

Plan make_plan(const BackwardParams& params, const Shapes& s, WorkspaceCarver& workspace) {
  Plan plan;
  plan.deterministic = params.problem.deterministic;
  plan.proxy = params.dkl || params.kl;
  plan.parts = std::max(1, s.kv_heads / s.proxy_heads);
  const int64_t pairs_per_token = static_cast<int64_t>(s.proxy_heads) * s.top_k;
  const int64_t places = plan.deterministic ? s.top_k : 1; // of a row's dQ
  // The proxy's partial rows lie where those of dQ were.
  const int64_t bytes_per_token =
      s.q_heads * (2 * Config::kDim * places + 9) +
      (plan.proxy ? plan.parts * pairs_per_token * Config::kKeys * 2 + pairs_per_token * 4 +
                        (plan.deterministic ? 0 : s.proxy_heads * s.proxy_dim * 4)
                  : 0);
  IndexOptions options = index_options(s, Config::kRows);
  options.ordered = plan.deterministic;
  if (plan.deterministic)
    while (options.window_tokens > 256 && options.window_tokens * bytes_per_token > kPassBytes)
      options.window_tokens /= 2;

  plan.gate = workspace.take<int32_t>(1);
  WorkspaceCarver overlay = workspace;
  plan.index = carve_index(params.problem, s, options, workspace);
  if (!plan.deterministic)
    overlay = workspace; // behind the index, which the portable kernels read
  plan.way_out.bytes = portable::backward::backward_workspace_size(params, s, embedding(plan));
  plan.way_out.data = overlay.take<char>(static_cast<int64_t>(plan.way_out.bytes));
  const int64_t window = plan.index.window_tokens;

  const int64_t limit = std::min<int64_t>(65536, kPassBytes / bytes_per_token);
  plan.windows_per_pass = static_cast<int>(
      std::clamp<int64_t>(limit / window, 1, std::max<int64_t>(plan.index.windows, 1)));
  if (plan.deterministic && plan.index.windows > 0) // many short passes: none shorter than need be
    plan.windows_per_pass =
        ceil_div(plan.index.windows, ceil_div(plan.index.windows, plan.windows_per_pass));
  plan.tokens_per_pass = plan.windows_per_pass * window;
  const int64_t tokens = std::min(plan.tokens_per_pass, s.tokens);
  const int64_t rows = tokens * s.q_heads;

  const size_t cleared_from = workspace.bytes();
  plan.bound = workspace.take<float>(2);
  plan.next_item = workspace.take<int32_t>(2 * ceil_div(plan.index.windows, plan.windows_per_pass));
  const int64_t counters = plan.deterministic ? int64_t{kTurnWarps} * plan.index.rows : 0;
  plan.turns = workspace.take<int32_t>(counters * s.kv_heads);
  plan.proxy_turns = workspace.take<int32_t>(plan.proxy ? counters * s.proxy_kv_heads : 0);
  plan.cleared = reinterpret_cast<char*>(plan.bound);
  plan.cleared_bytes = static_cast<int64_t>(workspace.bytes() - cleared_from);
  plan.minus_lse = workspace.take<float>(rows);
  plan.minus_delta = workspace.take<float>(rows);
  plan.exponent = workspace.take<int8_t>(rows);
  plan.dq = workspace.take<__half>(rows * Config::kDim * places);
  plan.accumulator_count = s.keys * s.kv_heads * Config::kDim;
  plan.dk = workspace.take<float>(plan.accumulator_count);
  plan.dv = workspace.take<float>(plan.accumulator_count);
  // Lists are spaced by whole windows.
  plan.teacher_part_stride = plan.tokens_per_pass * pairs_per_token * Config::kKeys;
  plan.teacher = workspace.take<__half>(plan.proxy ? plan.parts * plan.teacher_part_stride : 0);
  const bool wants_dq_proxy = params.dkl && params.dq_proxy;
  plan.dq_proxy = workspace.take<float>(
      wants_dq_proxy && !plan.deterministic ? tokens * s.proxy_heads * s.proxy_dim : 0);
  if (wants_dq_proxy && plan.deterministic) // 512 bytes a pair at most, of at least 4 x 256
    plan.dq_proxy = reinterpret_cast<float*>(plan.dq);
  plan.proxy_key_count =
      params.dkl && params.dk_proxy ? s.keys * s.proxy_kv_heads * s.proxy_dim : 0;
  plan.dk_proxy = workspace.take<float>(plan.proxy_key_count);
  plan.kl_partial = workspace.take<float>(params.kl ? tokens * pairs_per_token : 0);
  if (workspace.bytes() < overlay.bytes())
    workspace = overlay;
  return plan;
}

template <class T, bool kDeterministic, class... Args>
void launch_main(int heads, bool teacher, int sms, cudaStream_t stream, const Args&... args) {
  auto run = [&]<int kHeads, bool kTeacher>() {
    launch("sm90 backward", backward_kernel<T, kHeads, kTeacher, kDeterministic>, sms,
           Config::kThreads, sizeof(Shared), stream, args...);
  };
  with_heads(heads, [&]<int kHeads>() {
    teacher ? run.template operator()<kHeads, true>() : run.template operator()<kHeads, false>();
  });
}

// dQ of a pass, from the sums or from partial results.
template <class T, bool kDeterministic>
void launch_dq(const BackwardParams& params, const Shapes& s, const Plan& plan, int32_t first_token,
               int32_t tokens, int sms, cudaStream_t stream) {
  const auto scale = static_cast<float>(params.problem.softmax_scale);
  if constexpr (kDeterministic) {
    const CombineParams combine = {plan.index, first_token, tokens,        s.q_heads,
                                   s.group(),  plan.dq,     plan.exponent, scale};
    with_heads(rows_per_token(s), [&]<int kHeads>() {
      launch("sm90 backward combine dq", combine_dq_kernel<T, kPieceRows<kHeads>>,
             static_cast<unsigned>(ceil_div(int64_t(tokens) * s.q_heads / 2, int64_t(8))), 256, 0,
             stream, combine, tensor_view<T>(params.dq));
    });
  } else {
    launch("sm90 backward convert dq", convert_dq_kernel<T>, sms * 8, 256, 0, stream, plan.dq,
           plan.exponent, tensor_view<T>(params.dq), first_token, tokens, s.q_heads,
           plan.index.position, scale);
  }
}

template <class T, bool kDeterministic>
void run(const BackwardParams& params, const Shapes& s, const Plan& plan, cudaStream_t stream) {
  const int sms = device_facts().sm_count;
  const dim3 wide(sms * 8);
  const BlockIndex& index = plan.index;
  auto clear = [&](void* data, int64_t bytes) {
    if (data && bytes > 0)
      check(cudaMemsetAsync(data, 0, bytes, stream), "cudaMemsetAsync");
  };

  build_index(index, params.problem, s, params.block_indices, stream);
  clear(plan.gate, sizeof(int32_t));
  const int passes = ceil_div(index.windows, plan.windows_per_pass);
  clear(plan.cleared, plan.cleared_bytes);
  clear(plan.dk, plan.accumulator_count * 4);
  clear(plan.dv, plan.accumulator_count * 4);
  clear(plan.dk_proxy, plan.proxy_key_count * 4);
  const auto k = tensor_view<const T>(params.k), v = tensor_view<const T>(params.v);
  launch("sm90 backward bound", bound_kernel<T>, wide, 256, 0, stream, k, v, index.key_row,
         static_cast<int32_t>(s.keys), s.kv_heads, plan.bound, plan.gate);

  const int heads = rows_per_token(s);
  const CUtensorMap q_map = encode_map(params.q, heads, 1);
  const CUtensorMap dout_map = encode_map(params.dout, heads, 1);
  const CUtensorMap k_map = encode_map(params.k, 1, Config::kKeys);
  const CUtensorMap v_map = encode_map(params.v, 1, Config::kKeys);
#if THRESHER_UNPROVEN
  CUtensorMap teacher_map = {};
  if (plan.proxy) {
    Tensor rows; // [pairs, 1, 128]
    rows.data = plan.teacher;
    rows.dtype = DType::kFloat16;
    rows.rank = 3;
    rows.shape[0] = plan.teacher_part_stride / Config::kKeys;
    rows.shape[1] = 1;
    rows.shape[2] = Config::kKeys;
    rows.stride[0] = rows.stride[1] = Config::kKeys;
    rows.stride[2] = 1;
    teacher_map = encode_map(rows, 1, ProxyConfig<128>::kTokens);
  }
#endif

  for (int pass = 0; pass < passes; ++pass) {
    const int first_window = pass * plan.windows_per_pass;
    const int last_window = std::min(first_window + plan.windows_per_pass, index.windows);
    const int32_t first_token = static_cast<int32_t>(first_window * int64_t(index.window_tokens));
    const int32_t tokens = static_cast<int32_t>(
        std::min<int64_t>(s.tokens, last_window * int64_t(index.window_tokens)) - first_token);

    launch("sm90 backward row constants", row_constants_kernel<T, !kDeterministic>, wide, 256, 0,
           stream, tensor_view<const T>(params.out), tensor_view<const T>(params.dout),
           tensor_view<const float>(params.lse, false), index.position, first_token, tokens,
           s.q_heads, plan.bound, plan.minus_lse, plan.minus_delta, plan.exponent, plan.dq,
           plan.gate);

    Params main = {};
    main.index = index;
    main.first_segment = first_window * s.proxy_heads;
    main.last_segment = last_window * s.proxy_heads;
    main.first_token = first_token;
    main.token_rows = static_cast<int32_t>(s.tokens_per_row);
    main.key_rows = static_cast<int32_t>(s.keys_per_row);
    main.q_heads = s.q_heads;
    main.kv_heads = s.kv_heads;
    main.proxy_heads = s.proxy_heads;
    main.parts = plan.parts;
    main.next_item = plan.next_item + pass;
    main.minus_lse = plan.minus_lse;
    main.minus_delta = plan.minus_delta;
    main.exponent = plan.exponent;
    main.dq = plan.dq;
    main.dk = plan.dk;
    main.dv = plan.dv;
    main.teacher = plan.teacher;
    main.teacher_part_stride = plan.teacher_part_stride;
    main.score_scale = static_cast<float>(params.problem.softmax_scale * 1.4426950408889634);
    main.turns = plan.turns;
    launch_main<T, kDeterministic>(heads, plan.proxy, sms, stream, q_map, dout_map, k_map, v_map,
                                   main);

    if (params.dq)
      launch_dq<T, kDeterministic>(params, s, plan, first_token, tokens, sms, stream);

    if (plan.proxy) {
      if (!kDeterministic)
        clear(plan.dq_proxy, int64_t(tokens) * s.proxy_heads * s.proxy_dim * 4);
      ProxyParams<T> proxy = {};
      proxy.index = index;
      proxy.first_segment = main.first_segment;
      proxy.last_segment = main.last_segment;
      proxy.first_token = first_token;
      proxy.proxy_heads = s.proxy_heads;
      proxy.proxy_kv_heads = s.proxy_kv_heads;
      proxy.q_proxy = tensor_view<const T>(params.q_proxy);
      proxy.k_proxy = tensor_view<const T>(params.k_proxy);
      proxy.proxy_lse = tensor_view<const float>(params.proxy_lse, false);
      proxy.dkl = tensor_view<const float>(params.dkl, false);
      proxy.dq_proxy = plan.dq_proxy;
      proxy.dk_proxy = plan.dk_proxy;
      proxy.kl_partial = plan.kl_partial;
      proxy.scale = static_cast<float>(params.problem.proxy_scale);
      proxy.next_item = plan.next_item + passes + pass;
      proxy.turns = plan.proxy_turns;
#if THRESHER_UNPROVEN
      if (plan.parts > 1)
        launch("sm90 backward sum teacher", sum_parts_kernel, wide, 256, 0, stream, plan.teacher,
               plan.teacher_part_stride, plan.parts);
      with_dim<64, 128>(s.proxy_dim, [&]<int kDim>() {
        using C = ProxyConfig<kDim>;
        launch("sm90 backward proxy", proxy_backward_kernel<T, C, kDeterministic>, sms, C::kThreads,
               sizeof(ProxyShared<C>), stream, teacher_map, proxy);
      });
#else
      proxy.parts = plan.parts;
      proxy.teacher = plan.teacher;
      proxy.teacher_part_stride = plan.teacher_part_stride;
      with_dim<64, 128>(s.proxy_dim, [&]<int kDim>() {
        launch("sm90 backward proxy", proxy_backward_kernel<T, kDim, kDeterministic>, sms, 256,
               sizeof(typename ProxyBackwardStream<T, kDim, kDeterministic>::Shared), stream,
               proxy);
      });
#endif
      if (plan.dq_proxy && kDeterministic)
        launch("sm90 backward combine dq_proxy", combine_rows_kernel<T>, wide, 256, 0, stream,
               plan.dq_proxy, index.slot_count, tensor_view<T>(params.dq_proxy), first_token,
               tokens, static_cast<int32_t>(s.tokens), s.proxy_heads, s.proxy_dim, s.top_k,
               proxy.scale);
      else if (plan.dq_proxy)
        launch("sm90 backward convert dq_proxy", convert_rows_kernel<T>, wide, 256, 0, stream,
               plan.dq_proxy, tensor_view<T>(params.dq_proxy), first_token, tokens, s.proxy_heads,
               s.proxy_dim, proxy.scale);
      if (plan.kl_partial)
        launch("sm90 backward sum kl", sum_kl_kernel<T>, wide, 256, 0, stream, plan.kl_partial,
               index.slot_count, tensor_view<float>(params.kl, false), first_token, tokens,
               static_cast<int32_t>(s.tokens), s.proxy_heads, s.top_k);
    }
  }

  const int32_t keys = static_cast<int32_t>(s.keys);
  if (params.dk)
    launch("sm90 backward convert dk", convert_rows_kernel<T>, wide, 256, 0, stream, plan.dk,
           tensor_view<T>(params.dk), 0, keys, s.kv_heads, Config::kDim,
           static_cast<float>(params.problem.softmax_scale));
  if (params.dv)
    launch("sm90 backward convert dv", convert_rows_kernel<T>, wide, 256, 0, stream, plan.dv,
           tensor_view<T>(params.dv), 0, keys, s.kv_heads, Config::kDim, 1.f);
  if (plan.dk_proxy)
    launch("sm90 backward convert dk_proxy", convert_rows_kernel<T>, wide, 256, 0, stream,
           plan.dk_proxy, tensor_view<T>(params.dk_proxy), 0, keys, s.proxy_kv_heads, s.proxy_dim,
           static_cast<float>(params.problem.proxy_scale));

  if (plan.proxy) {
    launch("sm90 taint", taint_keys_kernel<T>, wide, 256, 0, stream,
           tensor_view<const T>(params.k_proxy), index.key_row, keys, s.proxy_kv_heads, s.proxy_dim,
           plan.gate);
    launch("sm90 taint", taint_rows_kernel<T>, wide, 256, 0, stream,
           tensor_view<const float>(params.proxy_lse, false), index.position,
           static_cast<int32_t>(s.tokens), s.proxy_heads, plan.gate);
  }
  portable::backward::run_backward(params, s, plan.way_out, embedding(plan), stream);
}

} // namespace

extern const Kernel<BackwardParams> sparse_backward = {
    "sm90",
    [](const BackwardParams& params, const Shapes& s, const DeviceFacts& device) -> std::string {
      const std::string reason = refuses_attention(s, device);
      if (!reason.empty())
        return reason;
      if (!params.dout)
        return "has no variant without main gradients";
#if !THRESHER_UNPROVEN
      if (params.problem.deterministic)
        return kUnproven;
#endif
      if ((params.dkl || params.kl) && !has_proxy_kernel(s))
        return kProxyDims;
      return strides_fit(params.q) && strides_fit(params.k) && strides_fit(params.v) &&
                     strides_fit(params.dout)
                 ? ""
                 : kStrides;
    },
    [](const BackwardParams& params, const Shapes& shapes) {
      WorkspaceCarver measure;
      make_plan(params, shapes, measure);
      return measure.bytes();
    },
    [](const BackwardParams& params, const Shapes& shapes, const Workspace& workspace,
       cudaStream_t stream) {
      WorkspaceCarver carver(workspace.data);
      const Plan plan = make_plan(params, shapes, carver);
      with_dtype(shapes.dtype, [&]<class T>() {
        plan.deterministic ? run<T, true>(params, shapes, plan, stream)
                           : run<T, false>(params, shapes, plan, stream);
      });
    }};

} // namespace thresher::cuda::sm90
