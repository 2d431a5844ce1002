// Host side of the portable backward, sparse and dense: sizes, workspace, passes.
#include "cuda/portable/backward/backward.h"

#include "cuda/common/dtype.h"
#include "cuda/index/tokens.h"
#include "cuda/kernel.h"
#include "cuda/portable/backward/unit.cuh"
#include "cuda/portable/forward/forward.h"
#include "cuda/portable/forward/heads.h"

#include <algorithm>
#include <cmath>

namespace thresher::cuda::portable {
namespace backward {
namespace {

constexpr double kLog2e = 1.4426950408889634;
constexpr int32_t kDenseBlock = 128; // keys of a block of dense lists
constexpr int32_t kLeastTokens = 16; // of a pass

// What a call computes. Of KlParams the same, without gradients.
struct Request {
  BackwardParams params;
  bool dense;              // all visible keys
  int32_t proxy_heads = 0; // Hp; of a dense call without a proxy: any grouping will do
  int32_t block_size = 0;  // of the lists
  bool main = false;       // main gradients
  bool proxy = false;      // something of the proxy
  bool proxy_gradients = false;
};

Request make_request(const BackwardParams& params, const Shapes& s) {
  Request r = {.params = params, .dense = !params.block_indices};
  r.proxy_heads = s.proxy_heads ? s.proxy_heads : s.kv_heads;
  r.block_size = r.dense ? kDenseBlock : s.block_size;
  r.main = params.dout && (params.dq || params.dk || params.dv);
  r.proxy_gradients = params.dkl && (params.dq_proxy || params.dk_proxy);
  r.proxy = r.proxy_gradients || params.kl;
  return r;
}

struct Plan {
  KernelPlan main, proxy;
  int32_t key_tiles = 1, proxy_key_tiles = 1;
  int32_t chunks = 1, parts = 1; // of the heads that a proxy head shares with a kv head; in all
  int32_t slots = 1;             // places of a row of dQ
  int32_t kl_slots = 1;
  int64_t pairs_of_token = 0;     // of one proxy head
  int32_t tokens = 0, passes = 0; // of a pass
  BlockIndex index;
  int32_t* tickets = nullptr; // [2, passes]
  DenseItems dense = {};
  RowConstants* constants = nullptr;
  ProxyConstants* proxy_constants = nullptr;
  float *dq = nullptr, *dk = nullptr, *dv = nullptr, *dq_proxy = nullptr, *dk_proxy = nullptr;
  float* teacher = nullptr;
  int64_t teacher_part_stride = 0;
  float* kl_partial = nullptr;
  float* dkl_bound = nullptr; // fp16 only: its gradients need a common scale
  int32_t *turns = nullptr, *proxy_turns = nullptr;
  char* cleared = nullptr; // tickets, sums over passes: zero before the first
  size_t cleared_bytes = 0;
};

template <class T, class F>
void with_main(const Shapes& s, F&& f) {
  with_dim<64, 128, 256>(forward::tile_dim(s.dim),
                         [&]<int kDim>() { f.template operator()<MainKernel<T, kDim>>(); });
}
template <class T, class F>
void with_proxy(const Shapes& s, F&& f) {
  with_dim<64, 128, 256>(forward::tile_dim(s.proxy_dim),
                         [&]<int kDim>() { f.template operator()<ProxyKernel<T, kDim>>(); });
}

template <class T>
Plan make_plan(const Request& r, const Shapes& s, const Embedding& embedding,
               WorkspaceCarver& workspace) {
  const BackwardParams& params = r.params;
  const bool deterministic = params.problem.deterministic;
  Plan plan;
  with_main<T>(s, [&]<class Kernel>() { plan.main = Kernel::plan(); });
  if (r.proxy)
    with_proxy<T>(s, [&]<class Kernel>() { plan.proxy = Kernel::plan(); });
  plan.key_tiles = ceil_div(r.block_size, plan.main.keys);
  const int32_t shared = std::min(s.q_heads / r.proxy_heads, s.q_heads / s.kv_heads);
  plan.chunks = ceil_div(shared, plan.main.max_heads);
  plan.parts = plan.chunks * forward::most_parts(s.q_heads, s.kv_heads, r.proxy_heads);
  const int64_t blocks = ceil_div<int64_t>(s.keys, kDenseBlock);
  plan.pairs_of_token = r.dense ? blocks : s.top_k;
  // One place would mean that reductions met there.
  const auto places = static_cast<int32_t>(std::max<int64_t>(plan.pairs_of_token, 2));
  plan.slots = deterministic ? places : 1;
  plan.kl_slots = places;
  if (r.proxy)
    plan.proxy_key_tiles = ceil_div(r.block_size, plan.proxy.keys);

  const int main_dim = forward::tile_dim(s.dim),
            proxy_dim = r.proxy ? forward::tile_dim(s.proxy_dim) : 0;
  const bool dq = r.main && params.dq, dq_proxy = r.proxy_gradients && params.dq_proxy;
  const int64_t dq_places = int64_t{plan.slots} * (deterministic ? plan.key_tiles : 1);
  const int64_t dq_proxy_places = int64_t{plan.slots} * (deterministic ? plan.proxy_key_tiles : 1);
  const int64_t kl_places = int64_t{plan.kl_slots} * plan.proxy_key_tiles;
  const int64_t pairs = plan.pairs_of_token * r.proxy_heads; // of a token
  int64_t bytes = s.q_heads * int64_t{sizeof(RowConstants)};
  bytes += dq ? s.q_heads * main_dim * 4 * dq_places : 0;
  if (r.proxy) {
    bytes += plan.parts * pairs * r.block_size * int64_t{sizeof(float)};
    bytes += r.proxy_heads * int64_t{sizeof(ProxyConstants)};
    bytes += dq_proxy ? r.proxy_heads * proxy_dim * 4 * dq_proxy_places : 0;
    bytes += params.kl ? r.proxy_heads * kl_places * 4 : 0;
  }

  // Passes: whole windows of the index; of a dense call the window is the pass.
  IndexOptions options;
  options.ordered = deterministic && !r.dense;
  Shapes index_shapes = s;
  index_shapes.proxy_heads = r.proxy_heads;
  index_shapes.block_size = r.block_size;
  if (r.dense) {
    index_shapes.top_k = 0;
    options.window_tokens = static_cast<int32_t>(std::min<int64_t>(
        std::clamp<int64_t>(embedding.pass_bytes / bytes, kLeastTokens, 65536), s.tokens));
  } else {
    options.window_tokens = suggested_window(s);
    while (options.window_tokens > kLeastTokens &&
           options.window_tokens * bytes > embedding.pass_bytes)
      options.window_tokens /= 2;
  }
  plan.index = embedding.index ? *embedding.index
                               : carve_index(params.problem, index_shapes, options, workspace);
  plan.index.gate = embedding.gate;
  const int64_t window = plan.index.window_tokens;
  const int64_t most_windows =
      std::min<int64_t>(kTokenMask / window, std::max(plan.index.windows, 1));
  const int64_t windows = r.dense ? 1
                                  : std::clamp<int64_t>(embedding.pass_bytes / (window * bytes), 1,
                                                        std::max<int64_t>(most_windows, 1));
  plan.tokens = static_cast<int32_t>(windows * window);
  plan.passes = static_cast<int32_t>(ceil_div<int64_t>(s.tokens, plan.tokens));
  const int64_t tokens = std::min<int64_t>(plan.tokens, s.tokens);

  const size_t cleared_from = workspace.bytes();
  plan.tickets = workspace.take<int32_t>(2 * plan.passes);
  plan.cleared = reinterpret_cast<char*>(plan.tickets);
  const int64_t key_rows = s.keys * s.kv_heads;
  plan.dk = workspace.take<float>(r.main && params.dk ? key_rows * main_dim : 0);
  plan.dv = workspace.take<float>(r.main && params.dv ? key_rows * main_dim : 0);
  plan.dk_proxy = workspace.take<float>(
      r.proxy_gradients && params.dk_proxy ? s.keys * s.proxy_kv_heads * proxy_dim : 0);
  if (deterministic) {
    const int64_t counters = r.dense ? plan.passes : int64_t{r.proxy_heads} * plan.index.rows;
    plan.turns = workspace.take<int32_t>(counters);
    plan.proxy_turns = workspace.take<int32_t>(counters);
  }
  plan.dkl_bound = workspace.take<float>(r.proxy_gradients && s.dtype == DType::kFloat16 ? 1 : 0);
  plan.cleared_bytes = workspace.bytes() - cleared_from;

  plan.constants = workspace.take<RowConstants>(tokens * s.q_heads);
  plan.dq = workspace.take<float>(dq ? tokens * s.q_heads * main_dim * dq_places : 0);
  if (r.proxy) {
    plan.proxy_constants = workspace.take<ProxyConstants>(tokens * r.proxy_heads);
    // Lists of the index are spaced by whole windows.
    plan.teacher_part_stride = int64_t{r.dense ? tokens : plan.tokens} * pairs * r.block_size;
    plan.teacher = workspace.take<float>(plan.parts * plan.teacher_part_stride);
    plan.dq_proxy =
        workspace.take<float>(dq_proxy ? tokens * r.proxy_heads * proxy_dim * dq_proxy_places : 0);
    plan.kl_partial = workspace.take<float>(params.kl ? tokens * r.proxy_heads * kl_places : 0);
  }
  if (r.dense) {
    const int64_t fragments = fragment_count(params.problem, s);
    const int64_t items = r.proxy_heads * dense_item_bound(params.problem, s, kDenseBlock);
    plan.dense.proxy_heads = r.proxy_heads;
    plan.dense.block_size = kDenseBlock;
    plan.dense.items = workspace.take<WorkItem>(items);
    plan.dense.pair_begin = workspace.take<int64_t>(items);
    plan.dense.count = workspace.take<int32_t>(1);
    plan.dense.item_base = workspace.take<int32_t>(fragments + 1);
    plan.dense.pair_base = workspace.take<int64_t>(fragments + 1);
    plan.index.items = plan.dense.items;
  }
  return plan;
}

template <class T>
void run_passes(const Request& r, const Shapes& s, Plan plan, bool build, cudaStream_t stream) {
  const BackwardParams& params = r.params;
  const BlockIndex& index = plan.index;
  const Geometry geometry = make_geometry(params.problem, s);
  const bool deterministic = params.problem.deterministic;
  const int main_dim = forward::tile_dim(s.dim),
            proxy_dim = r.proxy ? forward::tile_dim(s.proxy_dim) : 0;
  const int32_t tokens_in_all = static_cast<int32_t>(s.tokens);
  if (r.dense) {
    check(cudaMemsetAsync(index.scratch.cleared, 0, index.scratch.cleared_bytes, stream),
          "clear index");
    describe_tokens(index, geometry, stream);
  } else if (build) {
    build_index(index, params.problem, s, params.block_indices, stream);
  }
  clear_sums(index, plan.cleared, plan.cleared_bytes, stream);
  const auto dkl = tensor_view<const float>(params.dkl, false);
  if (plan.dkl_bound)
    bound_dkl(dkl, index, r.proxy_heads, plan.dkl_bound, stream);

  const bool several = plan.passes > 1 || plan.chunks > 1 || r.dense;
  MainParams<T> main = {};
  main.index = index;
  main.pair_begin = plan.dense.pair_begin;
  main.key_tiles = plan.key_tiles;
  main.dim = s.dim;
  main.slots = plan.slots;
  main.turns = plan.turns;
  main.turn_group = heads_sharing(r.proxy_heads, s.kv_heads);
  main.always_accumulate = several;
  main.q_heads = s.q_heads;
  main.kv_heads = s.kv_heads;
  main.proxy_heads = r.proxy_heads;
  main.parts = plan.parts;
  main.chunks = plan.chunks;
  main.max_heads = plan.main.max_heads;
  main.q = tensor_view<const T>(params.q);
  main.k = tensor_view<const T>(params.k);
  if (r.main) {
    main.v = tensor_view<const T>(params.v);
    main.dout = tensor_view<const T>(params.dout);
    main.dk_out = tensor_view<T>(params.dk);
    main.dv_out = tensor_view<T>(params.dv);
  }
  main.constants = plan.constants;
  main.score_scale = static_cast<float>(params.problem.softmax_scale * kLog2e);
  main.dq = plan.dq;
  main.dk = plan.dk;
  main.dv = plan.dv;
  main.dk_scale = static_cast<float>(params.problem.softmax_scale);
  main.teacher = plan.teacher;
  main.teacher_part_stride = plan.teacher_part_stride;
  main.teacher_scale =
      kTeacherScale / 16384.f * static_cast<float>(r.proxy_heads) / static_cast<float>(s.q_heads);

  ProxyParams<T> proxy = {};
  proxy.index = index;
  proxy.pair_begin = plan.dense.pair_begin;
  proxy.key_tiles = plan.proxy_key_tiles;
  proxy.dim = s.proxy_dim;
  proxy.slots = plan.slots;
  proxy.turns = plan.proxy_turns;
  proxy.always_accumulate = plan.passes > 1 || r.dense;
  proxy.proxy_heads = r.proxy_heads;
  proxy.proxy_kv_heads = s.proxy_kv_heads;
  proxy.parts = plan.parts;
  proxy.constants = plan.proxy_constants;
  proxy.score_scale = static_cast<float>(params.problem.proxy_scale * kLog2e);
  proxy.teacher = main.teacher;
  proxy.teacher_part_stride = plan.teacher_part_stride;
  proxy.gradients = r.proxy_gradients;
  proxy.dq = plan.dq_proxy;
  proxy.dk = plan.dk_proxy;
  proxy.dk_scale = static_cast<float>(params.problem.proxy_scale);
  proxy.dkl_bound = plan.dkl_bound;
  proxy.kl_partial = plan.kl_partial;
  proxy.kl_slots = plan.kl_slots;
  if (r.proxy) {
    proxy.turn_group = heads_sharing(r.proxy_heads, s.proxy_kv_heads);
    proxy.q = tensor_view<const T>(params.q_proxy);
    proxy.k = tensor_view<const T>(params.k_proxy);
    proxy.dk_out = tensor_view<T>(params.dk_proxy);
  }

  for (int32_t pass = 0; pass < plan.passes; ++pass) {
    const auto first_token = static_cast<int32_t>(int64_t{pass} * plan.tokens);
    const int32_t tokens = std::min(plan.tokens, tokens_in_all - first_token);
    PassRange range;
    range.first_token = first_token;
    range.tokens = tokens;
    if (r.dense) {
      plan.dense.tickets = plan.tickets + 2 * pass;
      list_dense_items(geometry, plan.dense, first_token, tokens, pass, stream);
      range.last_item = plan.dense.count;
      if (deterministic) {
        main.turns = plan.turns + pass;
        proxy.turns = plan.proxy_turns + pass;
      }
    } else {
      const int32_t windows = plan.tokens / index.window_tokens;
      const int32_t first_window = pass * windows;
      const int32_t last_window = std::min(first_window + windows, index.windows);
      range.first_item = index.segment_items + first_window * r.proxy_heads;
      range.last_item = index.segment_items + last_window * r.proxy_heads;
    }

    PrepareRows rows = {index, first_token, tokens, s.q_heads, s.dim};
    rows.lse = tensor_view<const float>(params.lse, false);
    rows.constants = plan.constants;
    rows.clear = plan.slots == 1 ? plan.dq : nullptr;
    rows.padded_dim = main_dim;
    prepare_rows<T>(rows, main.q, r.main ? tensor_view<const T>(params.out) : TensorView<const T>{},
                    main.dout, stream);
    main.pass = proxy.pass = range;
    main.ticket = plan.tickets + 2 * pass;
    proxy.ticket = main.ticket + 1;
    with_main<T>(s, [&]<class Kernel>() { Kernel::run(main, plan.main, stream); });

    PartialCount count;
    count.slots = plan.slots;
    count.dense = r.dense;
    if (plan.dq) {
      FinishRows finish = {index, first_token, tokens, s.q_heads, s.dim, main_dim};
      finish.heads_per_proxy = s.q_heads / r.proxy_heads;
      finish.count = count;
      finish.count.key_tiles = plan.key_tiles;
      finish.partial = plan.dq;
      finish.scale = main.dk_scale;
      finish.dkl_bound = nullptr;
      finish_rows(finish, tensor_view<T>(params.dq), stream);
    }
    if (!r.proxy)
      continue;

    PrepareProxyRows proxy_rows = {index,         first_token, tokens,
                                   r.proxy_heads, s.proxy_dim, s.q_heads / r.proxy_heads};
    proxy_rows.lse = tensor_view<const float>(params.proxy_lse, false);
    proxy_rows.dkl = dkl;
    proxy_rows.main = plan.constants;
    proxy_rows.dkl_bound = plan.dkl_bound;
    proxy_rows.constants = plan.proxy_constants;
    proxy_rows.clear = plan.slots == 1 ? plan.dq_proxy : nullptr;
    proxy_rows.padded_dim = proxy_dim;
    prepare_proxy_rows<T>(proxy_rows, proxy.q, stream);
    with_proxy<T>(s, [&]<class Kernel>() { Kernel::run(proxy, plan.proxy, stream); });
    if (plan.dq_proxy) {
      FinishRows finish = {index, first_token, tokens, r.proxy_heads, s.proxy_dim, proxy_dim};
      finish.heads_per_proxy = 1;
      finish.count = count;
      finish.count.key_tiles = plan.proxy_key_tiles;
      finish.partial = plan.dq_proxy;
      finish.scale = proxy.dk_scale;
      finish.dkl_bound = plan.dkl_bound;
      finish_rows(finish, tensor_view<T>(params.dq_proxy), stream);
    }
    if (plan.kl_partial) {
      FinishKl finish = {index, first_token, tokens, r.proxy_heads};
      finish.count = count;
      finish.count.slots = plan.kl_slots;
      finish.count.key_tiles = plan.proxy_key_tiles;
      finish.partial = plan.kl_partial;
      finish.kl = tensor_view<float>(params.kl, false);
      finish_kl(finish, stream);
    }
  }

  FinishKeys keys = {index, static_cast<int32_t>(s.keys), s.kv_heads, s.dim, main_dim};
  keys.q_heads = s.q_heads;
  keys.proxy_heads = r.proxy_heads;
  keys.always_accumulate = main.always_accumulate;
  keys.accumulator = plan.dk;
  keys.scale = main.dk_scale;
  if (plan.dk)
    finish_keys(keys, tensor_view<T>(params.dk), stream);
  keys.accumulator = plan.dv;
  keys.scale = 1.f;
  if (plan.dv)
    finish_keys(keys, tensor_view<T>(params.dv), stream);
  if (plan.dk_proxy) {
    keys.owners = s.proxy_kv_heads;
    keys.q_heads = r.proxy_heads;
    keys.dim = s.proxy_dim;
    keys.padded_dim = proxy_dim;
    keys.always_accumulate = proxy.always_accumulate;
    keys.accumulator = plan.dk_proxy;
    keys.scale = proxy.dk_scale;
    keys.dkl_bound = plan.dkl_bound;
    finish_keys(keys, tensor_view<T>(params.dk_proxy), stream);
  }
}

} // namespace

size_t backward_workspace_size(const BackwardParams& params, const Shapes& shapes,
                               const Embedding& embedding) {
  size_t bytes = 0;
  with_dtype(shapes.dtype, [&]<class T>() {
    WorkspaceCarver carver;
    make_plan<T>(make_request(params, shapes), shapes, embedding, carver);
    bytes = carver.bytes();
  });
  return bytes;
}

void run_backward(const BackwardParams& params, const Shapes& shapes, const Workspace& workspace,
                  const Embedding& embedding, cudaStream_t stream) {
  const Request request = make_request(params, shapes);
  with_dtype(shapes.dtype, [&]<class T>() {
    WorkspaceCarver carver(workspace.data);
    const Plan plan = make_plan<T>(request, shapes, embedding, carver);
    if (request.main || request.proxy)
      run_passes<T>(request, shapes, plan, !embedding.index, stream);
  });
}

namespace {

// Exact KL rows are the proxy kernel's by-product.
BackwardParams as_backward(const KlParams& params) {
  BackwardParams backward = {};
  backward.problem = params.problem;
  backward.q = params.q;
  backward.k = params.k;
  backward.q_proxy = params.q_proxy;
  backward.k_proxy = params.k_proxy;
  backward.block_indices = params.block_indices;
  backward.lse = params.lse;
  backward.proxy_lse = params.proxy_lse;
  backward.kl = params.kl;
  return backward;
}

std::string takes_all(const BackwardParams&, const Shapes&, const DeviceFacts&) {
  return "";
}

size_t measure(const BackwardParams& params, const Shapes& shapes) {
  return backward_workspace_size(params, shapes, {});
}
void run(const BackwardParams& params, const Shapes& shapes, const Workspace& workspace,
         cudaStream_t stream) {
  run_backward(params, shapes, workspace, {}, stream);
}

} // namespace
} // namespace backward

const Kernel<BackwardParams> sparse_backward = {"portable", backward::takes_all, backward::measure,
                                                backward::run};
const Kernel<BackwardParams> warmup_backward = {"portable", backward::takes_all, backward::measure,
                                                backward::run};
const Kernel<KlParams> proxy_kl = {
    "portable", [](const KlParams&, const Shapes&, const DeviceFacts&) { return std::string(); },
    [](const KlParams& params, const Shapes& shapes) {
      return backward::measure(backward::as_backward(params), shapes);
    },
    [](const KlParams& params, const Shapes& shapes, const Workspace& workspace,
       cudaStream_t stream) {
      backward::run(backward::as_backward(params), shapes, workspace, stream);
    }};

} // namespace thresher::cuda::portable
