// One CTA builds one segment (window, proxy head): it counts the entries of each block row in
// shared memory, turns the counts into list starts, and fills the lists in token order. A chunk of
// tokens is placed at a time: every (token, row) pair sets the token's bit in the row's mask, and
// the number of lower bits is the entry's place behind the row's cursor. Nothing depends on the
// order in which threads run.
//
// Rows that do not fit in shared memory at once are taken in passes. Segments write their items
// without gaps: a look-back over the segments before gives the first place.
#include "cuda/index/lists.h"

#include "cuda/common/launch.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/index/slots.cuh"

#include <climits>

namespace thresher::cuda {
namespace {

constexpr int kTurnThreads = 1024;
constexpr int kRowTile = 4096;  // 80 KiB of shared memory: fits every GPU since Ampere
constexpr int kSizeClasses = 4; // item lengths from max_entries down: whole, > 1/2, > 1/4, less
constexpr int kPieceRound = 64; // pieces of a split list are whole matrix tiles

struct Shared {
  int32_t cursor[kRowTile];      // entries placed before and in the row
  uint32_t mask[2][2][kRowTile]; // [chunk parity][token / 32][row], bit token % 32
  int32_t scan[32];
  int32_t segment, first_row, end_row;
  int32_t first_item;
};

// How a list is cut into items.
struct Pieces {
  int32_t count, length; // all pieces but the last have `length` entries
  __device__ __forceinline__ Pieces(int32_t entries, int32_t max_entries) {
    count = (entries + max_entries - 1) / max_entries;
    length = entries;
    if (count > 1) {
      length = (entries + count - 1) / count;
      length = min(max_entries, (length + kPieceRound - 1) / kPieceRound * kPieceRound);
      count = (entries + length - 1) / length;
    }
  }
};

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

// kPerLane: slots of a token a lane, 1 (K <= 32) or 4.
template <int kPerLane>
class SegmentBuilder {
 public:
  static constexpr int kThreads = kPerLane == 1 ? 1024 : 512; // by registers
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kRowsPerThread = kRowTile / kThreads;

  __device__ __forceinline__ SegmentBuilder(const BlockIndex& index,
                                            const BlockIdsView<const int32_t>& ids, Shared& shared)
      : index_(index), ids_(ids), shared_(shared), layout_(index.top_k, kThreads) {
    window_ = shared.segment / index.proxy_heads;
    head_ = shared.segment % index.proxy_heads;
    begin_ = window_ * index.window_tokens;
    count_ = min(index.window_tokens, index.tokens - begin_);
    entries_ =
        index.entries + static_cast<int64_t>(shared.segment) * index.window_tokens * index.top_k;
  }

  // Rows that the window's tokens can see: [first_row, end_row).
  __device__ __forceinline__ void find_rows() {
    int32_t first = INT_MAX, end = 0;
    for (int32_t offset = threadIdx.x; offset < count_; offset += kThreads) {
      const int32_t position = index_.position[begin_ + offset];
      const int32_t base = index_.row_base[begin_ + offset];
      if (position >= 0) {
        first = min(first, base);
        end = max(end, base + position / index_.block_size + 1);
      }
    }
    first = __reduce_min_sync(0xffffffffu, first);
    end = __reduce_max_sync(0xffffffffu, end);
    if ((threadIdx.x & 31) == 0) {
      atomicMin(&shared_.first_row, first);
      atomicMax(&shared_.end_row, end);
    }
    __syncthreads();
  }

  // Leaves each row's first place in cursor; returns the entries of the pass and adds its items.
  __device__ __forceinline__ int32_t count_rows(int32_t low, int32_t base, bool first_pass,
                                                int32_t& items) {
    for (int row = threadIdx.x; row < kRowTile; row += kThreads)
      shared_.cursor[row] = 0;
    __syncthreads();
    RawSlots<kPerLane> raw, next;
    raw.load(index_, ids_, head_, begin_, layout_.token, count_, layout_.lane);
    for (int32_t chunk = 0; chunk < count_; chunk += layout_.tokens_per_block) {
      const int32_t offset = chunk + layout_.token;
      next.load(index_, ids_, head_, begin_, offset + layout_.tokens_per_block, count_,
                layout_.lane);
      const ValidSlots<kPerLane> slots(index_, layout_, raw);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        if (in_tile(slots.row[j], low))
          atomicAdd(&shared_.cursor[slots.row[j] - low], 1);
      if (first_pass && layout_.lane == 0 && offset < count_)
        index_.slot_count[static_cast<int64_t>(head_) * index_.tokens + begin_ + offset] =
            static_cast<uint8_t>(slots.count);
      raw = next;
    }
    __syncthreads();

    int32_t counts[kRowsPerThread], sum = 0, own_items = 0, total, total_items;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      counts[i] = shared_.cursor[threadIdx.x * kRowsPerThread + i];
      sum += counts[i];
      own_items += Pieces(counts[i], index_.max_entries).count;
    }
    int32_t place = base + block_exclusive_scan<kThreads>(sum, shared_.scan, total);
    block_exclusive_scan<kThreads>(own_items, shared_.scan, total_items);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      shared_.cursor[threadIdx.x * kRowsPerThread + i] = place;
      place += counts[i];
    }
    __syncthreads();
    items += total_items;
    return total;
  }

  // Places the entries; afterwards cursor holds each row's end.
  __device__ __forceinline__ void fill(int32_t low) {
    const int chunk_tokens = min(layout_.tokens_per_block, 64); // bits of a mask
    const bool active = layout_.token < chunk_tokens;
    const int half = layout_.token >> 5;
    const uint32_t bit = 1u << (layout_.token & 31);
    int32_t placed_row[kPerLane], placed[kPerLane]; // rows whose cursor this thread moves on
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      placed_row[j] = -1;
    const auto move_cursors = [&](int parity) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        if (placed_row[j] >= 0) {
          shared_.cursor[placed_row[j]] += placed[j];
          shared_.mask[parity][0][placed_row[j]] = 0;
          shared_.mask[parity][1][placed_row[j]] = 0;
        }
    };
    RawSlots<kPerLane> raw, next;
    const int32_t readable = active ? count_ : 0;
    raw.load(index_, ids_, head_, begin_, layout_.token, readable, layout_.lane);
    int parity = 0;
    for (int32_t chunk = 0; chunk < count_; chunk += chunk_tokens, parity ^= 1) {
      const int32_t offset = chunk + layout_.token;
      next.load(index_, ids_, head_, begin_, offset + chunk_tokens, readable, layout_.lane);
      const ValidSlots<kPerLane> slots(index_, layout_, raw);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        if (in_tile(slots.row[j], low))
          atomicOr(&shared_.mask[parity][half][slots.row[j] - low], bit);
      move_cursors(parity ^ 1); // of the chunk before
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        placed_row[j] = -1;
        if (!in_tile(slots.row[j], low))
          continue;
        const int32_t row = slots.row[j] - low;
        const uint32_t lower = shared_.mask[parity][0][row], upper = shared_.mask[parity][1][row];
        const int rank =
            half == 0 ? __popc(lower & (bit - 1)) : __popc(lower) + __popc(upper & (bit - 1));
        entries_[shared_.cursor[row] + rank] = static_cast<uint32_t>(slots.number[j])
                                                   << kEntryTokenBits |
                                               static_cast<uint32_t>(offset);
        if (rank == 0) {
          placed_row[j] = row;
          placed[j] = __popc(lower) + __popc(upper);
        }
      }
      __syncthreads();
      raw = next;
    }
    move_cursors(parity ^ 1);
    __syncthreads();
  }

  // Writes the items of the pass, longest first, from items[first_item] on. `base` is where the
  // first row's list starts.
  __device__ __forceinline__ void emit(int32_t low, int32_t base, int32_t first_item) {
    // Counts of the size classes, two in a word (a pass has fewer than 2^16 items).
    uint32_t classes[kSizeClasses / 2] = {};
    for_each_item(low, base, [&](int size_class, auto&&...) {
      classes[size_class / 2] += 1u << (16 * (size_class & 1));
    });
    int32_t place[kSizeClasses];
    int32_t before = first_item;
#pragma unroll
    for (int i = 0; i < kSizeClasses / 2; ++i) {
      int32_t total;
      const uint32_t own =
          block_exclusive_scan<kThreads>(static_cast<int32_t>(classes[i]), shared_.scan, total);
      place[2 * i] = before + static_cast<int32_t>(own & 0xffff);
      before += static_cast<uint32_t>(total) & 0xffff;
      place[2 * i + 1] = before + static_cast<int32_t>(own >> 16);
      before += static_cast<uint32_t>(total) >> 16;
    }
    for_each_item(low, base,
                  [&](int size_class, int32_t row, int32_t begin, int32_t count, int32_t piece,
                      int32_t pieces) {
                    int32_t at = 0;
#pragma unroll
                    for (int i = 0; i < kSizeClasses; ++i) // place[] stays in registers
                      if (i == size_class)
                        at = place[i]++;
                    const BlockRow keys = index_.block_rows[row];
                    index_.items[at] = {head_,
                                        window_,
                                        row,
                                        keys.block_begin,
                                        keys.key_begin,
                                        keys.key_count,
                                        static_cast<uint32_t>(begin),
                                        count};
                    if (index_.scratch.pieces)
                      index_.scratch.pieces[at] = {piece, pieces};
                    if (piece == 0)
                      atomicAdd(index_.row_items + static_cast<int64_t>(head_) * index_.rows + row,
                                pieces);
                  });
  }

  // Every key row's block row; the work is spread over all CTAs.
  __device__ static __forceinline__ void fill_key_rows(const BlockIndex& index) {
    const int lane = threadIdx.x & 31;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
         row < index.rows; row += static_cast<int64_t>(gridDim.x) * kWarps) {
      const BlockRow keys = index.block_rows[row];
      for (int key = lane; key < keys.key_count; key += 32)
        index.key_row[keys.key_begin + key] = static_cast<int32_t>(row) + 1;
    }
  }

 private:
  __device__ static __forceinline__ bool in_tile(int32_t row, int32_t low) {
    return row >= low && row < low + kRowTile; // row -1 is below every tile
  }

  template <class F>
  __device__ __forceinline__ void for_each_item(int32_t low, int32_t base, F&& f) {
#pragma unroll 1
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = threadIdx.x * kRowsPerThread + i;
      const int32_t begin = row == 0 ? base : shared_.cursor[row - 1];
      const int32_t entries = shared_.cursor[row] - begin;
      const Pieces pieces(entries, index_.max_entries);
      for (int32_t piece = 0; piece < pieces.count; ++piece) {
        const int32_t from = piece * pieces.length, count = min(pieces.length, entries - from);
        const int size_class = min(kSizeClasses - 1, __clz(count) - __clz(index_.max_entries));
        f(size_class, low + row, begin + from, count, piece, pieces.count);
      }
    }
  }

  const BlockIndex& index_;
  const BlockIdsView<const int32_t>& ids_;
  Shared& shared_;
  SlotLayout layout_;
  int32_t window_, head_;
  int32_t begin_, count_; // tokens of the window
  Entry* entries_;
};

template <int kPerLane>
__global__ void __launch_bounds__(SegmentBuilder<kPerLane>::kThreads)
    build_segments(BlockIndex index, BlockIdsView<const int32_t> ids) {
  using Builder = SegmentBuilder<kPerLane>;
  extern __shared__ __align__(16) char raw_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(raw_shared);
  if (threadIdx.x == 0) {
    shared.segment = atomicAdd(index.scratch.ticket, 1);
    shared.first_row = INT_MAX;
    shared.end_row = 0;
  }
  for (int i = threadIdx.x; i < 4 * kRowTile; i += Builder::kThreads)
    (&shared.mask[0][0][0])[i] = 0;
  __syncthreads();
  Builder::fill_key_rows(index);

  Builder builder(index, ids, shared);
  builder.find_rows();
  const int32_t low = shared.first_row;
  const int32_t passes = max(1, (shared.end_row - low + kRowTile - 1) / kRowTile);
  const int32_t first = low == INT_MAX ? 0 : low;

  int32_t items = 0, entries = 0;
  for (int32_t pass = 0; pass < passes; ++pass)
    entries += builder.count_rows(first + pass * kRowTile, entries, pass == 0, items);
  if (threadIdx.x < 32) {
    const int32_t before = look_back(index.scratch.segment_state, shared.segment, items);
    if (threadIdx.x == 0) {
      shared.first_item = before;
      index.segment_items[shared.segment] = before;
      if (shared.segment == static_cast<int32_t>(gridDim.x) - 1)
        index.segment_items[gridDim.x] = before + items;
    }
  }
  __syncthreads();

  int32_t place = shared.first_item;
  entries = 0;
  for (int32_t pass = 0; pass < passes; ++pass) {
    const int32_t tile = first + pass * kRowTile;
    int32_t tile_items = 0, tile_entries = 0;
    if (passes > 1) // the cursors of an only pass are still there
      tile_entries = builder.count_rows(tile, entries, false, tile_items);
    builder.fill(tile);
    builder.emit(tile, entries, place);
    place += tile_items;
    entries += tile_entries;
    __syncthreads();
  }
}

// order.x / order.y (blockIdx.y): one CTA walks the segments of the heads that share accumulators
// in list order and hands out turns.
__global__ void __launch_bounds__(kTurnThreads)
    hand_out_turns(BlockIndex index, int32_t kv_group, int32_t proxy_kv_group) {
  const int32_t group = blockIdx.y == 0 ? kv_group : proxy_kv_group;
  const int32_t first_head = blockIdx.x * group;
  if (first_head >= index.proxy_heads)
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
           dim3(static_cast<unsigned>(index.windows * index.proxy_heads)),
           dim3(SegmentBuilder<kPerLane>::kThreads), sizeof(Shared), stream, index, block_ids);
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
