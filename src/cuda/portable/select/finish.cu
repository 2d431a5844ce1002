#include "cuda/common/launch.h"
#include "cuda/portable/select/select.h"

#include <algorithm>

namespace thresher::cuda::portable {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMaxTopK = 128;

// One warp a row. kPerLane: candidates of a row a lane.
template <int kPerLane>
__global__ void __launch_bounds__(kThreads) finish_rows_kernel(SelectArgs args) {
  __shared__ int32_t shared_ids[kWarps][kMaxTopK];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t* kept = shared_ids[warp];
  const int64_t rows = static_cast<int64_t>(args.proxy_heads) * args.geometry.tokens;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const auto head = static_cast<int32_t>(row / args.geometry.tokens);
    const auto token = static_cast<int32_t>(row - int64_t{head} * args.geometry.tokens);
    const int32_t fragment = args.geometry.fragment_of(token);
    const int32_t position = fragment < 0 ? -1 : args.geometry.position(fragment, token);
    const int32_t visible = position < 0 ? 0 : position / args.block_size + 1;
    int32_t* ids = args.block_ids.at(head, token);
    if (visible <= args.top_k) {
      for (int slot = lane; slot < args.top_k; slot += 32)
        ids[slot] = slot < visible ? slot : -1;
      continue;
    }

    const int scored = args.scored();
    if (args.splits == 1) {
      // The scores' own choice, in the order in which it came about.
      for (int i = lane; i < scored; i += 32)
        kept[i] = ids[args.init_blocks + i];
    } else {
      const int count = args.splits * scored;
      const Candidate* from = args.candidates + row * count;
      Candidate candidates[kPerLane];
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        candidates[j] = lane + 32 * j < count ? from[lane + 32 * j] : 0;
      // The scored-th largest, bit by bit. Candidates differ from each other: ids do.
      Candidate least = 0;
      for (int bit = 63; bit >= 0; --bit) {
        const Candidate attempt = least | Candidate{1} << bit;
        int larger = 0;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j)
          larger += candidates[j] >= attempt;
        if (static_cast<int>(__reduce_add_sync(0xffffffffu, larger)) >= scored)
          least = attempt;
      }
      int before = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const bool keep = candidates[j] >= least;
        const uint32_t votes = __ballot_sync(0xffffffffu, keep);
        if (keep)
          kept[before + __popc(votes & ((1u << lane) - 1))] = candidate_id(candidates[j]);
        before += __popc(votes);
      }
    }
    __syncwarp();
    for (int i = lane; i < scored; i += 32) {
      const int32_t id = kept[i];
      int rank = 0;
      for (int other = 0; other < scored; ++other)
        rank += kept[other] < id;
      ids[args.init_blocks + rank] = id;
    }
    for (int i = lane; i < args.init_blocks; i += 32)
      ids[i] = i;
    for (int i = lane; i < args.local_blocks; i += 32)
      ids[args.top_k - args.local_blocks + i] = visible - args.local_blocks + i;
    __syncwarp(); // the next row reuses kept
  }
}

} // namespace

void finish_rows(const SelectArgs& args, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(args.proxy_heads) * args.geometry.tokens;
  const dim3 grid(static_cast<unsigned>(
      std::min<int64_t>(ceil_div<int64_t>(rows, kWarps), int64_t{16} * device_facts().sm_count)));
  const int per_lane = args.splits == 1 ? 1 : ceil_div(args.splits * args.scored(), 32);
  const auto run = [&](auto kernel) {
    launch("select finish_rows", kernel, grid, dim3(kThreads), 0, stream, args);
  };
  if (per_lane <= 2)
    run(finish_rows_kernel<2>);
  else if (per_lane <= 8)
    run(finish_rows_kernel<8>);
  else
    run(finish_rows_kernel<32>);
}

} // namespace thresher::cuda::portable
