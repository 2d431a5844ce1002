// Host side of the Hopper selection: the order of the tiles, scores and top-k, the finished rows.
#include "cuda/common/dtype.h"
#include "cuda/common/launch.h"
#include "cuda/common/workspace.h"
#include "cuda/sm90/common/support.h"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/select/finish.cuh"
#include "cuda/sm90/select/kernel.cuh"
#include "cuda/sm90/select/select.h"

#include <algorithm>

namespace thresher::cuda::sm90 {

namespace {

using namespace select;

constexpr int kRows = Config<128, 128, 16>::kRows; // of a tile, in every configuration
constexpr int kUnitsPerSm = 3;                     // fewer units than this: cut the keys

// Candidates in a lane's registers: the shortest list that holds those of a row.
constexpr int kMaxPlaces = 64;
template <class F>
auto with_places(int scored, F&& f) {
  if (scored <= 16)
    return f.template operator()<16>();
  if (scored <= 32)
    return f.template operator()<32>();
  return f.template operator()<kMaxPlaces>();
}
int64_t places(int scored) {
  return with_places(scored, [&]<int kPlaces>() -> int64_t { return kPlaces; });
}

template <int kPlaces, class F>
void with_config(const Shapes& s, F&& f) {
  const auto with_block = [&]<int kDim>() {
    if (s.block_size == 64)
      f.template operator()<Config<kDim, 64, kPlaces>>();
    else if (s.block_size == 128)
      f.template operator()<Config<kDim, 128, kPlaces>>();
    else
      f.template operator()<Config<kDim, 256, kPlaces>>();
  };
  if (s.proxy_dim <= 64)
    with_block.template operator()<64>();
  else
    with_block.template operator()<128>();
}

// Batch rows that follow each other in memory as one: a document may cross their border.
Tensor packed(const Tensor& tensor) {
  if (tensor.rank != 4)
    return tensor;
  const bool follow = tensor.shape[0] == 1 || tensor.shape[1] == 1 ||
                      tensor.stride[0] == tensor.shape[1] * tensor.stride[1];
  if (!follow)
    return tensor;
  Tensor result = tensor;
  result.rank = 3;
  result.shape[0] = tensor.shape[0] * tensor.shape[1];
  result.stride[0] = tensor.shape[1] == 1 ? tensor.stride[0] : tensor.stride[1];
  for (int axis = 1; axis < 3; ++axis) {
    result.shape[axis] = tensor.shape[axis + 1];
    result.stride[axis] = tensor.stride[axis + 1];
  }
  return result;
}

struct Plan {
  portable::SelectArgs args;
  size_t bytes = 0;
};

Plan make_plan(const SelectParams& params, const Shapes& shapes, void* workspace, int splits) {
  Plan plan;
  portable::SelectArgs& args = plan.args;
  args = portable::select_args(params, shapes);
  if (args.scored() == 0)
    return plan; // every place is forced
  portable::choose_tiles(args, kRows);
  const int64_t wanted = int64_t{kUnitsPerSm} * device_facts().sm_count;
  const int64_t units = std::max<int64_t>(portable::tile_units(args), 1);
  args.splits =
      static_cast<int32_t>(std::clamp<int64_t>(ceil_div(wanted, units), 1, portable::kMaxSplits));
  if (splits)
    args.splits = std::min(splits, portable::kMaxSplits);

  WorkspaceCarver carver(workspace);
  args.counters = carver.take<int32_t>(2);
  args.tiles = carver.take<int32_t>(args.tile_slots);
  if (args.splits > 1)
    // [splits, places, Hp, T], each row's best first, so that a warp's rows lie side by side.
    args.candidates = carver.take<Candidate>(args.splits * places(args.scored()) *
                                             args.proxy_heads * shapes.tokens);
  plan.bytes = carver.bytes();
  return plan;
}

template <int kPlaces>
void score_tiles(const Shapes& shapes, const Params& kernel_params, const Tensor& q,
                 const Tensor& k, cudaStream_t stream) {
  const portable::SelectArgs& args = kernel_params.args;
  const int64_t units =
      int64_t{args.tile_slots} * args.splits * args.proxy_kv_heads * args.head_groups;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(units, device_facts().sm_count));
  with_dtype(shapes.dtype, [&]<class T>() {
    with_config<kPlaces>(shapes, [&]<class C>() {
      static_assert(C::kRows == kRows);
      const CUtensorMap q_map = encode_map(q, args.tile_heads, args.tile_tokens);
      const CUtensorMap k_map = encode_map(k, 1, C::kKeys);
      launch("sm90 select", select_kernel<T, C>, dim3(blocks), dim3(C::kThreads), sizeof(Shared<C>),
             stream, true, q_map, k_map, kernel_params);
    });
  });
}

template <int kPlaces>
void finish(const Params& params, cudaStream_t stream) {
  const portable::SelectArgs& args = params.args;
  const int64_t warps = int64_t{args.proxy_heads} * ceil_div(args.geometry.tokens, 32);
  const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(warps, kFinishThreads / 32));
  launch("sm90 select finish", finish_kernel<kPlaces>, dim3(blocks), dim3(kFinishThreads),
         finish_shared_bytes(args.top_k), stream, true, params);
}

} // namespace

size_t select_workspace_size(const SelectParams& params, const Shapes& shapes, int splits) {
  return make_plan(params, shapes, nullptr, splits).bytes;
}

void run_select(const SelectParams& params, const Shapes& shapes, const Workspace& workspace,
                int splits, cudaStream_t stream) {
  const Plan plan = make_plan(params, shapes, workspace.data, splits);
  const Tensor q = packed(params.q_proxy), k = packed(params.k_proxy);
  Params kernel_params;
  kernel_params.args = plan.args;
  kernel_params.token_rows = q.rank == 4 ? static_cast<int32_t>(shapes.tokens_per_row) : 0;
  kernel_params.key_rows = k.rank == 4 ? static_cast<int32_t>(shapes.keys_per_row) : 0;
  const int scored = plan.args.scored();
  with_places(scored, [&]<int kPlaces>() {
    if (scored > 0) {
      portable::order_tiles(plan.args, stream);
      score_tiles<kPlaces>(shapes, kernel_params, q, k, stream);
    }
    finish<kPlaces>(kernel_params, stream);
  });
}

extern const Kernel<SelectParams> select_blocks = {
    "sm90",
    [](const SelectParams& params, const Shapes& s, const DeviceFacts& device) -> std::string {
      const Problem& problem = params.problem;
      if (device.major != 9)
        return "needs compute capability 9.0";
      if (s.proxy_dim > 128)
        return "needs a proxy head dimension of at most 128";
      if (s.block_size != 64 && s.block_size != 128 && s.block_size != 256)
        return "needs a block size of 64, 128 or 256";
      if (s.top_k - problem.init_blocks - problem.local_blocks > kMaxPlaces)
        return "needs at most " + std::to_string(kMaxPlaces) + " blocks that are not forced";
      if (problem.local_blocks < 1)
        return "needs the local block forced"; // so that no scored block is partly visible
      if (problem.proxy_scale < 0)
        return "needs a proxy_scale that is not negative";
      return strides_fit(params.q_proxy) && strides_fit(params.k_proxy) ? "" : kStrides;
    },
    [](const SelectParams& params, const Shapes& shapes) {
      return select_workspace_size(params, shapes, 0);
    },
    [](const SelectParams& params, const Shapes& shapes, const Workspace& workspace,
       cudaStream_t stream) { run_select(params, shapes, workspace, 0, stream); }};

} // namespace thresher::cuda::sm90
