// The (token, head) rows of a unit as one warp meets them, 16 at a time: described and loaded one
// tile ahead, their entries read two tiles ahead, so that nobody waits for a chain of loads.
#pragma once

#include "cuda/common/tile.cuh"
#include "cuda/portable/forward/unit.cuh"

namespace thresher::cuda::portable::forward {

// Row r of a unit is head r % heads of entry r / heads. Tile i of a warp holds the rows 16 (warp +
// kWarps i) and following; lanes l and l + 16 both know row l of it.
template <class T, class C>
class RowFeed {
 public:
  __device__ __forceinline__ RowFeed(const PartialParams<T>& p, const Unit& unit, int warp,
                                     int lane)
      : p_(p), unit_(unit), lane_(lane) {
    const int32_t row = warp * C::kRows + (lane & 15);
    next_ = row / unit.heads;
    next_head_ = row - next_ * unit.heads;
    fetch_entry();
    advance();
  }

  // Of the described tile: place of the row's partial result, -1: no such row.
  __device__ __forceinline__ int32_t place() const { return place_; }
  // Keys of the unit that the row sees; kKeys for no row.
  __device__ __forceinline__ int32_t reach() const {
    return place_ < 0 ? C::kKeys : max(0, min(unit_.key_count, position_ - unit_.position + 1));
  }

  // Describes the next tile.
  __device__ __forceinline__ void advance() {
    place_ = -1;
    from_ = nullptr;
    if (valid_) {
      const int32_t token = unit_.first_token + BlockIndex::entry_offset(entry_);
      const int32_t head = unit_.first_head + head_;
      place_ = (token * p_.q_heads + head) * p_.slots() +
               BlockIndex::entry_slot(entry_) * p_.key_tiles + unit_.key_tile;
      position_ = __ldg(p_.index.position + p_.first_token + token);
      from_ = p_.q.at(p_.first_token + token, head);
    }
    fetch_entry();
  }

  // Enqueues the loads of the described tile.
  __device__ __forceinline__ void load(uint32_t to) const {
    using Rows = Tile<C::kDim>;
    constexpr int kTogether = 32 / Rows::kChunks; // rows of one instruction
    static_assert(Rows::kGroup == 8, "the swizzle of a later row flips bits of the first one's");
    const int chunk = lane_ % Rows::kChunks;
    uint32_t place = to + Rows::offset(lane_ / Rows::kChunks, chunk);
    asm volatile("" : "+r"(place)); // or all places below would be kept in registers
    const auto mine = reinterpret_cast<unsigned long long>(from_);
#pragma unroll
    for (int first = 0; first < C::kRows; first += kTogether) {
      const T* from =
          reinterpret_cast<const T*>(__shfl_sync(~0u, mine, first + lane_ / Rows::kChunks));
      const bool valid = from != nullptr && chunk * 8 < p_.dim;
      ptx::copy_async_16((place ^ (first & 7) << 4) + first * Rows::kRowBytes,
                         valid ? from + chunk * 8 : p_.q.data, valid);
    }
  }

 private:
  __device__ __forceinline__ void fetch_entry() {
    valid_ = next_ < unit_.entry_count;
    head_ = next_head_;
    if (valid_)
      entry_ = __ldg(unit_.entries + next_);
    next_ += unit_.entry_step;
    next_head_ += unit_.head_step;
    if (next_head_ >= unit_.heads) {
      next_head_ -= unit_.heads;
      ++next_;
    }
  }

  const PartialParams<T>& p_;
  const Unit& unit_;
  int32_t lane_;
  int32_t next_, next_head_;
  Entry entry_ = 0; // of the tile after the described one
  bool valid_ = false;
  int32_t head_ = 0;
  int32_t place_ = -1, position_ = 0; // of the described tile
  const T* from_ = nullptr;
};

// Enqueues the loads of the unit's rows of K or V.
template <class T, class C>
__device__ __forceinline__ void load_keys(const PartialParams<T>& p,
                                          const TensorView<const T>& tensor, const Unit& unit,
                                          uint32_t to) {
  load_rows_async<C::kDim, C::kKeys, C::kThreads>(
      to, threadIdx.x, p.dim, tensor.data, [&](int row) -> const T* {
        return row < unit.key_count ? tensor.at(unit.key_begin + row, unit.kv_head) : nullptr;
      });
}

} // namespace thresher::cuda::portable::forward
