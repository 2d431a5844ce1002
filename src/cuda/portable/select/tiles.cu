#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "cuda/portable/select/select.h"

namespace thresher::cuda::portable {
namespace {

constexpr int kThreads = 1024;
constexpr int kClasses = 256; // lengths that are told apart

// One CTA: a counting sort of the tiles by the blocks they sweep. The order within a class is of no
// consequence: it decides when a tile is worked on, not what comes out.
__global__ void __launch_bounds__(kThreads) order_tiles_kernel(SelectArgs args) {
  __shared__ int32_t place[kClasses], scan[32];
  const int32_t most = args.geometry.keys / args.block_size + 1;
  // Class of a slot, longest first; -1: empty, or every token keeps all that it sees.
  const auto class_of = [&](int32_t slot) {
    const QueryTile tile = query_tile(args.geometry, slot, args.tile_tokens);
    if (tile.fragment < 0)
      return -1;
    const int32_t position = tile.first_position + tile.tokens - 1;
    const int32_t blocks = position < 0 ? 0 : position / args.block_size + 1;
    if (blocks <= args.top_k)
      return -1;
    const int64_t share = static_cast<int64_t>(min(blocks, most)) * (kClasses - 1) / most;
    return kClasses - 1 - static_cast<int>(share);
  };
  if (threadIdx.x < kClasses)
    place[threadIdx.x] = 0;
  __syncthreads();
  for (int32_t slot = threadIdx.x; slot < args.tile_slots; slot += kThreads) {
    const int length_class = class_of(slot);
    if (length_class >= 0)
      atomicAdd(&place[length_class], 1);
  }
  __syncthreads();
  const int32_t own = threadIdx.x < kClasses ? place[threadIdx.x] : 0;
  int32_t total;
  const int32_t before = block_exclusive_scan<kThreads>(own, scan, total);
  if (threadIdx.x < kClasses)
    place[threadIdx.x] = before;
  if (threadIdx.x == 0) {
    args.counters[0] = total;
    args.counters[1] = 0;
  }
  __syncthreads();
  for (int32_t slot = threadIdx.x; slot < args.tile_slots; slot += kThreads) {
    const int length_class = class_of(slot);
    if (length_class >= 0)
      args.tiles[atomicAdd(&place[length_class], 1)] = slot;
  }
}

} // namespace

void order_tiles(const SelectArgs& args, cudaStream_t stream) {
  launch("select order_tiles", order_tiles_kernel, dim3(1), dim3(kThreads), 0, stream, args);
}

} // namespace thresher::cuda::portable
