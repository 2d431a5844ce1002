// A work item's list in chunks of 32 entries, one a lane of the producer warp. What the next chunk
// needs is in flight meanwhile: an entry is read two chunks ahead, its token's position one.
//
// A list is walked as a ring from a place of the caller's choice, see spread_start().
#pragma once

#include "cuda/index/index.h"

namespace thresher::cuda::sm90 {

// Warps that produce a tile of kHeads heads a token. Bulk copies of several lanes are issued one
// after the other, 80 cycles each; a tile of 16 tokens needs 32 of them, or 64.
template <int kHeads>
inline constexpr int kProducerWarps = kHeads < 16 ? 4 : 1;

class EntryList {
 public:
  __device__ __forceinline__ EntryList(const BlockIndex& index, const WorkItem& item, int start)
      : chunks((item.entry_count + 31) / 32), index_(index), item_(item) {
    chunk_ = next_ = start;
    upcoming_ = read();
    upcoming_position_ = read_position(upcoming_);
    later_ = read();
  }
  // Moves on to the next chunk; must be called before the first. Returns its first entry.
  __device__ __forceinline__ int advance() {
    const int first = chunk_ * 32;
    chunk_ = chunk_ + 1 == chunks ? 0 : chunk_ + 1;
    entry = upcoming_;
    position_ = upcoming_position_;
    upcoming_ = later_;
    upcoming_position_ = read_position(upcoming_);
    later_ = read();
    return first;
  }

  const int chunks;
  static constexpr Entry kNone = ~0u; // past the end of the list
  Entry entry;

  __device__ __forceinline__ int token(Entry e) const {
    return e == kNone ? -1 : index_.entry_token(item_, e);
  }
  // Last key of the block that this lane's token sees; -1: none.
  __device__ __forceinline__ int last_key() const {
    return entry == kNone ? -1 : min(position_ - item_.block_begin, item_.key_count - 1);
  }

 private:
  __device__ __forceinline__ Entry read() {
    const int e = next_ * 32 + (threadIdx.x & 31);
    next_ = next_ + 1 == chunks ? 0 : next_ + 1;
    return e < item_.entry_count ? __ldg(index_.item_entries(item_) + e) : kNone;
  }
  __device__ __forceinline__ int32_t read_position(Entry e) const {
    return e == kNone ? 0 : __ldg(index_.position + index_.entry_token(item_, e));
  }

  const BlockIndex& index_;
  const WorkItem& item_;
  int chunk_, next_; // next to be handed out, next to be read
  Entry upcoming_, later_;
  int32_t position_, upcoming_position_;
};

// Where item `number` starts in its list. All lists of a window ascend through the same tokens:
// CTAs that started together would ask for the same rows at the same time. (The fractions of
// multiples of the golden ratio lie apart.)
__device__ __forceinline__ int spread_start(const WorkItem& item, int number) {
  const uint32_t chunks = static_cast<uint32_t>(item.entry_count + 31) / 32;
  return static_cast<int>(__umulhi(static_cast<uint32_t>(number) * 2654435769u, chunks));
}

// TMA coordinates of a row: (row within its batch row, batch row).
__device__ __forceinline__ int2 split_row(int row, int rows) {
  const int batch = row / rows;
  return {row - batch * rows, batch};
}

} // namespace thresher::cuda::sm90
