// Builds a segment (window, proxy head) of the index, or one of `parts` token ranges of it.
//
// Counts the entries of each block row in shared memory, turns the counts into list starts, and
// places the entries in token order. A chunk of tokens is placed at a time: every (token, row) pair
// sets the token's bit in the row's mask, and the number of lower bits is the entry's place behind
// the row's cursor. Nothing depends on the order in which threads run.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/index/slots.cuh"

#include <climits>

namespace thresher::cuda {

inline constexpr int kSizeClasses = 4; // item lengths: max_entries, > 1/2, > 1/4 of it, less
inline constexpr int kPieceRound = 64; // pieces of a split list are whole matrix tiles

struct SegmentShared {             // 50 KiB: two CTAs an SM on every GPU since Ampere
  int32_t cursor[kIndexRowTile];   // entries placed before and in the row
  uint32_t mask[2][kIndexRowTile]; // [chunk parity][row], a bit a token of the chunk
  int32_t scan[32];
  int32_t segment, part;
  int32_t first_row, end_row;
  int32_t first_item;
};

// How a list is cut into items: all but the last have `length` entries.
struct Pieces {
  int32_t count, length;
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

// kPerLane: slots of a token a lane, 1 (K <= 32) or 4.
template <int kPerLane>
class SegmentBuilder {
 public:
  static constexpr int kThreads = 512;
  static constexpr int kCtas = kPerLane == 1 ? 2 : 1; // an SM, by registers
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kRowsPerThread = kIndexRowTile / kThreads;

  __device__ __forceinline__ SegmentBuilder(const BlockIndex& index,
                                            const BlockIdsView<const int32_t>& ids,
                                            SegmentShared& shared)
      : index_(index), ids_(ids), shared_(shared), layout_(index.top_k, kThreads) {
    window_ = shared.segment / index.proxy_heads;
    head_ = shared.segment % index.proxy_heads;
    window_begin_ = window_ * index.window_tokens;
    const int32_t window_end =
        min(index.window_tokens, index.tokens - window_begin_); // within the window, as below
    first_ = min(window_end, shared.part * index.scratch.part_tokens);
    end_ = min(window_end, first_ + index.scratch.part_tokens);
    entries_ =
        index.entries + static_cast<int64_t>(shared.segment) * index.window_tokens * index.top_k;
  }

  // Rows that the tokens can see: [first_row, end_row).
  __device__ __forceinline__ void find_rows() {
    int32_t first = INT_MAX, end = 0;
    for (int32_t offset = first_ + threadIdx.x; offset < end_; offset += kThreads) {
      const int32_t position = index_.position[window_begin_ + offset];
      const int32_t base = index_.row_base[window_begin_ + offset];
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

  // Counts the rows of a pass, those from `low` on. Leaves in cursor where this part's first entry
  // of each row goes; returns the segment's entries of the pass and adds its items.
  __device__ __forceinline__ int32_t count_rows(int32_t low, int32_t base, bool first_pass,
                                                int32_t& items) {
    for (int row = threadIdx.x; row < kIndexRowTile; row += kThreads)
      shared_.cursor[row] = 0;
    __syncthreads();
    RawSlots<kPerLane> raw, next;
    const int32_t step = layout_.tokens_per_block;
    raw.load(index_, ids_, head_, window_begin_, first_ + layout_.token, end_, layout_.lane);
    for (int32_t chunk = first_; chunk < end_; chunk += step) {
      const int32_t offset = chunk + layout_.token;
      next.load(index_, ids_, head_, window_begin_, offset + step, end_, layout_.lane);
      const ValidSlots<kPerLane> slots(index_, layout_, raw);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        if (in_tile(slots.row[j], low))
          atomicAdd(&shared_.cursor[slots.row[j] - low], 1);
      if (first_pass && layout_.lane == 0 && offset < end_)
        index_.slot_count[static_cast<int64_t>(head_) * index_.tokens + window_begin_ + offset] =
            static_cast<uint8_t>(slots.count);
      raw = next;
    }
    __syncthreads();

    int32_t counts[kRowsPerThread], before[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      counts[i] = shared_.cursor[threadIdx.x * kRowsPerThread + i];
      before[i] = 0;
    }
    if (index_.scratch.parts > 1)
      exchange_counts(counts, before);
    int32_t sum = 0, own_items = 0, total, total_items;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      sum += counts[i];
      own_items += Pieces(counts[i], index_.max_entries).count;
    }
    int32_t place = base + block_exclusive_scan<kThreads>(sum, shared_.scan, total);
    block_exclusive_scan<kThreads>(own_items, shared_.scan, total_items);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      shared_.cursor[threadIdx.x * kRowsPerThread + i] = place + before[i];
      place += counts[i];
    }
    __syncthreads();
    items += total_items;
    return total;
  }

  // Writes the items of the pass, longest first, from items[first_item] on; by the part that is
  // first, whose cursors are the lists' starts, before it fills them. Entries [base, end) are the
  // pass's.
  __device__ __forceinline__ void emit(int32_t low, int32_t end, int32_t first_item) {
    // Counts of the size classes, two in a word (a pass has fewer than 2^16 items).
    uint32_t classes[kSizeClasses / 2] = {};
    for_each_item(low, end, [&](int size_class, auto&&...) {
#pragma unroll
      for (int i = 0; i < kSizeClasses / 2; ++i) // classes[] stays in registers
        if (i == size_class / 2)
          classes[i] += 1u << (16 * (size_class & 1));
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
    for_each_item(low, end,
                  [&](int size_class, int32_t row, int32_t begin, int32_t count, int32_t piece,
                      int32_t pieces) {
                    int32_t at = 0;
#pragma unroll
                    for (int i = 0; i < kSizeClasses; ++i)
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
    __syncthreads();
  }

  // Places this part's entries; moves the cursors on.
  __device__ __forceinline__ void fill(int32_t low) {
    const int chunk_tokens = min(layout_.tokens_per_block, 32); // bits of a mask
    const bool active = layout_.token < chunk_tokens;
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
          shared_.mask[parity][placed_row[j]] = 0;
        }
    };
    RawSlots<kPerLane> raw, next;
    const int32_t readable = active ? end_ : 0;
    raw.load(index_, ids_, head_, window_begin_, first_ + layout_.token, readable, layout_.lane);
    int parity = 0;
    for (int32_t chunk = first_; chunk < end_; chunk += chunk_tokens, parity ^= 1) {
      const int32_t offset = chunk + layout_.token;
      next.load(index_, ids_, head_, window_begin_, offset + chunk_tokens, readable, layout_.lane);
      const ValidSlots<kPerLane> slots(index_, layout_, raw);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        if (in_tile(slots.row[j], low))
          atomicOr(&shared_.mask[parity][slots.row[j] - low], bit);
      move_cursors(parity ^ 1); // of the chunk before
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        placed_row[j] = -1;
        if (!in_tile(slots.row[j], low))
          continue;
        const int32_t row = slots.row[j] - low;
        const uint32_t tokens = shared_.mask[parity][row];
        const int rank = __popc(tokens & (bit - 1));
        entries_[shared_.cursor[row] + rank] = static_cast<uint32_t>(slots.number[j])
                                                   << kEntryTokenBits |
                                               static_cast<uint32_t>(offset);
        if (rank == 0) {
          placed_row[j] = row;
          placed[j] = __popc(tokens);
        }
      }
      __syncthreads();
      raw = next;
    }
    move_cursors(parity ^ 1);
    __syncthreads();
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
    return row >= low && row < low + kIndexRowTile; // row -1 is below every tile
  }

  // Turns this part's counts into the segment's, and finds the entries of earlier parts.
  __device__ __forceinline__ void exchange_counts(int32_t (&counts)[kRowsPerThread],
                                                  int32_t (&before)[kRowsPerThread]) {
    const int32_t parts = index_.scratch.parts;
    const int64_t unit = static_cast<int64_t>(shared_.segment) * parts;
    int32_t* all = index_.scratch.part_counts + unit * index_.rows;
    const int32_t row = threadIdx.x * kRowsPerThread;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i)
      if (row + i < index_.rows)
        all[static_cast<int64_t>(shared_.part) * index_.rows + row + i] = counts[i];
    __threadfence();
    __syncthreads();
    // Units start in order, so the parts waited for run already or get the next free places.
    int32_t* ready = index_.scratch.part_ready + unit;
    if (threadIdx.x == 0)
      ptx::store_release(ready + shared_.part, 1);
    if (threadIdx.x < parts)
      while (ptx::load_acquire(ready + threadIdx.x) == 0)
        ;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i)
      counts[i] = 0;
    for (int32_t part = 0; part < parts; ++part)
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i)
        if (row + i < index_.rows) {
          const int32_t other = __ldcg(all + static_cast<int64_t>(part) * index_.rows + row + i);
          counts[i] += other;
          before[i] += part < shared_.part ? other : 0;
        }
  }

  template <class F>
  __device__ __forceinline__ void for_each_item(int32_t low, int32_t end, F&& f) {
#pragma unroll 1
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = threadIdx.x * kRowsPerThread + i;
      const int32_t begin = shared_.cursor[row];
      const int32_t entries = (row + 1 < kIndexRowTile ? shared_.cursor[row + 1] : end) - begin;
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
  SegmentShared& shared_;
  SlotLayout layout_;
  int32_t window_, head_;
  int32_t window_begin_; // token
  int32_t first_, end_;  // this part's tokens, within the window
  Entry* entries_;
};

} // namespace thresher::cuda
