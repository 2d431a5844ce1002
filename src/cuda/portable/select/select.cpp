#include "cuda/portable/select/select.h"

#include "cuda/common/dtype.h"
#include "cuda/common/workspace.h"
#include "cuda/kernel.h"

#include <algorithm>
#include <cmath>

namespace thresher::cuda::portable {
namespace {

constexpr int kUnitsPerBlock = 3; // fewer units of work than this for each CTA: split the keys

template <class F>
void with_kernel(const Shapes& shapes, F&& f) {
  with_dtype(shapes.dtype, [&]<class T>() {
    with_dim<64, 96, 128, 192, 256>(padded_dim(shapes.proxy_dim),
                                    [&]<int kDim>() { f.template operator()<T, kDim>(); });
  });
}

struct Plan {
  SelectArgs args;
  ScorePlan score;
  size_t bytes = 0;
};

// Sizes and workspace of a call; `workspace` may be null to measure.
Plan plan_select(const SelectParams& params, const Shapes& shapes, void* workspace,
                 const SelectOptions& options) {
  Plan plan;
  SelectArgs& args = plan.args;
  args = select_args(params, shapes);
  if (args.scored() == 0)
    return plan; // every place is forced

  with_kernel(shapes, [&]<class T, int kDim>() {
    plan.score = ScoreTiles<T, kDim>::plan(args.scored(), options.shared_limit);
  });
  choose_tiles(args, plan.score.rows);

  // Few rows leave SMs idle, or wait for the longest one: cut their keys.
  const int64_t units = tile_units(args);
  const int64_t wanted = int64_t{kUnitsPerBlock} * plan.score.blocks;
  args.splits = static_cast<int32_t>(
      std::clamp<int64_t>(ceil_div(wanted, std::max<int64_t>(units, 1)), 1, kMaxSplits));
  if (options.splits)
    args.splits = std::min(options.splits, kMaxSplits);

  WorkspaceCarver carver(workspace);
  args.counters = carver.take<int32_t>(2);
  args.tiles = carver.take<int32_t>(args.tile_slots);
  if (args.splits > 1)
    args.candidates =
        carver.take<Candidate>(shapes.tokens * args.proxy_heads * args.splits * args.scored());
  if (!plan.score.lists_in_shared)
    args.list_memory = carver.take<Candidate>(int64_t{plan.score.blocks} * plan.score.list_entries);
  plan.bytes = carver.bytes();
  return plan;
}

} // namespace

SelectArgs select_args(const SelectParams& params, const Shapes& shapes) {
  SelectArgs args;
  args.geometry = make_geometry(params.problem, shapes);
  args.block_ids = block_ids_view<int32_t>(params.block_indices);
  args.proxy_heads = shapes.proxy_heads;
  args.proxy_kv_heads = shapes.proxy_kv_heads;
  args.dim = shapes.proxy_dim;
  args.block_size = shapes.block_size;
  args.top_k = shapes.top_k;
  args.init_blocks = params.problem.init_blocks;
  args.local_blocks = params.problem.local_blocks;
  args.scale = static_cast<float>(std::abs(params.problem.proxy_scale));
  args.negate = params.problem.proxy_scale < 0;
  return args;
}

void choose_tiles(SelectArgs& args, int32_t rows) {
  const int32_t heads_per_key = args.proxy_heads / args.proxy_kv_heads;
  args.tile_heads = std::min(heads_per_key, rows);
  args.head_groups = ceil_div(heads_per_key, args.tile_heads);
  args.tile_tokens = rows / args.tile_heads;
  args.tile_slots = static_cast<int32_t>(tile_slots(args.geometry, args.tile_tokens));
}

int64_t tile_units(const SelectArgs& args) {
  return ceil_div<int64_t>(args.geometry.tokens, args.tile_tokens) * args.proxy_kv_heads *
         args.head_groups;
}

size_t select_workspace_size(const SelectParams& params, const Shapes& shapes,
                             const SelectOptions& options) {
  return plan_select(params, shapes, nullptr, options).bytes;
}

void run_select(const SelectParams& params, const Shapes& shapes, const Workspace& workspace,
                const SelectOptions& options, cudaStream_t stream) {
  const Plan plan = plan_select(params, shapes, workspace.data, options);
  if (plan.args.scored() > 0) {
    order_tiles(plan.args, stream);
    with_kernel(shapes, [&]<class T, int kDim>() {
      ScoreTiles<T, kDim>::run(plan.args, plan.score, tensor_view<const T>(params.q_proxy),
                               tensor_view<const T>(params.k_proxy), stream);
    });
  }
  finish_rows(plan.args, stream);
}

const Kernel<SelectParams> select_blocks = {
    "portable",
    [](const SelectParams&, const Shapes&, const DeviceFacts&) { return std::string(); },
    [](const SelectParams& params, const Shapes& shapes) {
      return select_workspace_size(params, shapes, {});
    },
    [](const SelectParams& params, const Shapes& shapes, const Workspace& workspace,
       cudaStream_t stream) { run_select(params, shapes, workspace, {}, stream); }};

} // namespace thresher::cuda::portable
