// One CTA a part of a segment (segment.cuh). Rows that do not fit in shared memory at once are
// taken in passes. Segments write their items without gaps: a look-back over the segments before
// gives the first place.
#include "cuda/index/lists.h"

#include "cuda/common/launch.h"
#include "cuda/index/segment.cuh"

namespace thresher::cuda {
namespace {

constexpr int kTurnThreads = 1024;

// State word of a segment: items in the low 30 bits, above them what they are the sum of.
constexpr uint32_t kOwnItems = 1u << 30, kAllItems = 2u << 30, kItemBits = kOwnItems - 1;

// Items of all earlier segments. Called by one whole warp; segments start in order, so the ones
// waited for are running or done.
__device__ int32_t look_back(uint32_t* state, int32_t segment, int32_t own) {
  const int lane = threadIdx.x & 31;
  auto* words = reinterpret_cast<int32_t*>(state);
  if (lane == 0)
    ptx::store_release(words + segment,
                       static_cast<int32_t>((segment == 0 ? kAllItems : kOwnItems) | own));
  int32_t before = 0;
  for (int32_t last = segment - 1; last >= 0; last -= 32) {
    const int32_t mine = last - lane;
    uint32_t word = kAllItems; // beyond the first segment: nothing
    while (mine >= 0 && (word = ptx::load_acquire(words + mine)) == 0)
      ;
    const uint32_t complete = __ballot_sync(0xffffffffu, word & kAllItems);
    const int nearest = complete ? __ffs(complete) - 1 : 31;
    before += warp_sum(lane <= nearest ? static_cast<int32_t>(word & kItemBits) : 0);
    if (complete)
      break;
  }
  if (lane == 0 && segment > 0)
    ptx::store_release(words + segment, static_cast<int32_t>(kAllItems | (before + own)));
  return before;
}

template <int kPerLane>
__global__ void __launch_bounds__(SegmentBuilder<kPerLane>::kThreads,
                                  SegmentBuilder<kPerLane>::kCtas)
    build_segments(BlockIndex index, BlockIdsView<const int32_t> ids) {
  using Builder = SegmentBuilder<kPerLane>;
  extern __shared__ __align__(16) char raw_shared[];
  SegmentShared& shared = *reinterpret_cast<SegmentShared*>(raw_shared);
  if (index.idle())
    return;
  const int32_t parts = index.scratch.parts;
  if (threadIdx.x == 0) {
    const int32_t unit = atomicAdd(index.scratch.ticket, 1);
    shared.segment = unit / parts;
    shared.part = unit - shared.segment * parts;
    shared.first_row = INT_MAX;
    shared.end_row = 0;
  }
  for (int i = threadIdx.x; i < 2 * kIndexRowTile; i += Builder::kThreads)
    (&shared.mask[0][0])[i] = 0;
  __syncthreads();
  Builder::fill_key_rows(index);

  Builder builder(index, ids, shared);
  int32_t low = 0, passes = 1; // several parts: all rows fit, and the parts must agree on them
  if (parts == 1) {
    builder.find_rows();
    if (shared.first_row != INT_MAX) {
      low = shared.first_row;
      passes = (shared.end_row - low + kIndexRowTile - 1) / kIndexRowTile;
    }
  }

  int32_t items = 0, entries = 0;
  for (int32_t pass = 0; pass < passes; ++pass)
    entries += builder.count_rows(low + pass * kIndexRowTile, entries, pass == 0, items);
  if (shared.part == 0) {
    if (threadIdx.x < 32) {
      const int32_t before = look_back(index.scratch.segment_state, shared.segment, items);
      if (threadIdx.x == 0) {
        shared.first_item = before;
        index.segment_items[shared.segment] = before;
        if (shared.segment == index.windows * index.proxy_heads - 1)
          index.segment_items[shared.segment + 1] = before + items;
      }
    }
    __syncthreads();
  }

  int32_t first_item = shared.first_item;
  if (passes == 1) { // the cursors are still there
    if (shared.part == 0)
      builder.emit(low, entries, first_item);
    builder.fill(low);
    return;
  }
  entries = 0;
  for (int32_t pass = 0; pass < passes; ++pass) {
    const int32_t tile = low + pass * kIndexRowTile;
    int32_t tile_items = 0;
    entries += builder.count_rows(tile, entries, false, tile_items);
    builder.emit(tile, entries, first_item);
    builder.fill(tile);
    first_item += tile_items;
  }
}

// order.x / order.y (blockIdx.y): one CTA walks the segments of the heads that share accumulators
// in list order and hands out turns.
__global__ void __launch_bounds__(kTurnThreads)
    hand_out_turns(BlockIndex index, int32_t kv_group, int32_t proxy_kv_group) {
  const int32_t group = blockIdx.y == 0 ? kv_group : proxy_kv_group;
  const int32_t first_head = blockIdx.x * group;
  if (index.idle() || first_head >= index.proxy_heads)
    return;
  int32_t* turns = index.scratch.turns +
                   (static_cast<int64_t>(blockIdx.y) * index.proxy_heads + blockIdx.x) * index.rows;
  for (int32_t window = 0; window < index.windows; ++window)
    for (int32_t head = first_head; head < min(first_head + group, index.proxy_heads); ++head) {
      const int32_t segment = window * index.proxy_heads + head;
      const int32_t begin = index.segment_items[segment], end = index.segment_items[segment + 1];
      for (int32_t item = begin + threadIdx.x; item < end; item += kTurnThreads) {
        const int32_t turn = turns[index.items[item].row] + index.scratch.pieces[item].x;
        (blockIdx.y == 0 ? index.order[item].x : index.order[item].y) = turn;
      }
      __syncthreads();
      for (int32_t item = begin + threadIdx.x; item < end; item += kTurnThreads)
        if (index.scratch.pieces[item].x == 0)
          turns[index.items[item].row] += index.scratch.pieces[item].y;
      __syncthreads();
    }
}

} // namespace

void build_lists(const BlockIndex& index, const BlockIdsView<const int32_t>& block_ids,
                 cudaStream_t stream) {
  const auto run = [&]<int kPerLane>() {
    launch("index build_segments", build_segments<kPerLane>,
           dim3(static_cast<unsigned>(index.windows * index.proxy_heads * index.scratch.parts)),
           dim3(SegmentBuilder<kPerLane>::kThreads), sizeof(SegmentShared), stream, index,
           block_ids);
  };
  if (index.top_k <= 32)
    run.template operator()<1>();
  else
    run.template operator()<4>();
}

void order_items(const BlockIndex& index, int32_t kv_group, int32_t proxy_kv_group,
                 cudaStream_t stream) {
  const int32_t groups =
      ceil_div(index.proxy_heads, kv_group < proxy_kv_group ? kv_group : proxy_kv_group);
  launch("index order_items", hand_out_turns, dim3(static_cast<unsigned>(groups), 2),
         dim3(kTurnThreads), 0, stream, index, kv_group, proxy_kv_group);
}

} // namespace thresher::cuda
