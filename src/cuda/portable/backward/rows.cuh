// What streams past a unit: its rows are described two tiles ahead and loaded one tile ahead.
#pragma once

#include "cuda/portable/backward/unit.cuh"

namespace thresher::cuda::portable::backward {

// How the (token, head) rows of a tile are laid out: each row warp of S^T takes as many whole
// tokens as fit; rows that are left over stand for nothing.
template <class C>
struct RowLayout {
  int32_t heads, tokens_per_warp, tokens_per_tile, tiles;

  __device__ __forceinline__ explicit RowLayout(const Unit& unit) {
    heads = unit.heads;
    tokens_per_warp = C::kScoreRows / heads;
    tokens_per_tile = tokens_per_warp * C::kScoreRowWarps;
    tiles = (unit.count + tokens_per_tile - 1) / tokens_per_tile;
  }
};

// Describes the rows of the tiles, one row a thread (the first kRows threads; the others do
// nothing): an entry is fetched three tiles ahead of its use, the facts of its token two tiles, so
// that nobody waits for memory. Constants: [tokens of the pass][heads].
template <class C, class Constants>
class RowFeed {
 public:
  __device__ __forceinline__ RowFeed(const WorkParams& p, const Unit& unit,
                                     const RowLayout<C>& layout, const Constants* constants,
                                     int32_t heads, RowRing<C::kRows, Constants>& rows)
      : p_(p), unit_(unit), all_constants_(constants), heads_(heads), rows_(rows),
        row_(threadIdx.x) {
    if (!active())
      return;
    const int warp = row_ / C::kScoreRows, within = row_ % C::kScoreRows;
    const int token = within / layout.heads;
    const bool used = token < layout.tokens_per_warp;
    head_ = used ? within - token * layout.heads : 0;
    step_ = layout.tokens_per_tile;
    // Rows that are left over lie behind every list.
    next_ = used ? warp * layout.tokens_per_warp + token : unit.count;
    rows_.head[row_] = static_cast<uint8_t>(head_);
    fetch_entry();
    fetch_facts();
    fetch_entry();
  }

  // Writes down the next tile, in place `ring` of three, and fetches ahead.
  __device__ __forceinline__ void write(int ring) {
    if (!active())
      return;
    int32_t word = kNoRow;
    int32_t reach = 0;
    if (token_ >= 0) {
      word = token_;
      if (isnan(constants_.x))
        word |= kQueryBad;
      if (isinf(constants_.y))
        word |= kOutputBad;
      reach = max(0, min(unit_.key_count, position_ - unit_.position + 1));
    }
    rows_.token[ring][row_] = word;
    rows_.reach[ring][row_] = static_cast<uint16_t>(reach | slot_ << 8);
    rows_.constants[ring][row_] = constants_;
    fetch_facts();
    fetch_entry();
  }

 private:
  __device__ __forceinline__ bool active() const {
    return C::kRows == C::kThreads || row_ < C::kRows;
  }
  __device__ __forceinline__ void fetch_entry() {
    valid_ = next_ < unit_.count;
    entry_ = static_cast<Entry>(next_);
    if (valid_ && unit_.entries)
      entry_ = __ldg(unit_.entries + next_);
    next_ += valid_ ? step_ : 0;
  }
  __device__ __forceinline__ void fetch_facts() {
    token_ = kNoRow;
    slot_ = 0;
    constants_ = {};
    position_ = 0;
    if (valid_) {
      token_ = unit_.first_token + BlockIndex::entry_offset(entry_);
      slot_ = BlockIndex::entry_slot(entry_);
      position_ = __ldg(p_.index.position + p_.pass.first_token + token_);
      constants_ =
          __ldg(all_constants_ + static_cast<int64_t>(token_) * heads_ + unit_.first_head + head_);
    }
  }

  const WorkParams& p_;
  const Unit& unit_;
  const Constants* all_constants_;
  int32_t heads_;
  RowRing<C::kRows, Constants>& rows_;
  int32_t row_, head_ = 0, step_ = 0, next_ = 0;
  Entry entry_ = 0;
  bool valid_ = false;
  int32_t token_ = kNoRow, slot_ = 0, position_ = 0;
  Constants constants_ = {};
};

// Number of a row's slot (a token's number of a block).
__device__ __forceinline__ int32_t slot_of(const Unit& unit, uint16_t reach) {
  return unit.entries ? reach >> 8 : unit.slot;
}

// Enqueues the loads of a tensor's rows of the described tile in place `ring`. Rows that are not
// there, or have the flag `bad`, become zeros.
template <class C, class T, class Constants>
__device__ __forceinline__ void
load_rows(const WorkParams& p, const Unit& unit, const RowRing<C::kRows, Constants>& rows, int ring,
          const TensorView<const T>& tensor, int32_t bad, uint8_t* to) {
  constexpr int kChunks = Tile<C::kDim>::kChunks;
  static_assert(C::kRows * kChunks % C::kThreads == 0);
  const uint32_t base = ptx::shared_address(to);
  const int chunk = threadIdx.x % kChunks;
#pragma unroll
  for (int first = 0; first < C::kRows; first += C::kThreads / kChunks) {
    const int row = first + threadIdx.x / kChunks;
    const int32_t word = rows.token[ring][row];
    const bool valid = word >= 0 && (word & bad) == 0 && chunk * 8 < p.dim;
    const T* from = tensor.data;
    if (valid)
      from = tensor.at(p.pass.first_token + (word & kTokenMask), unit.first_head + rows.head[row]) +
             chunk * 8;
    ptx::copy_async_16(base + Tile<C::kDim>::offset(row, chunk), from, valid);
  }
}

// Enqueues the loads of the unit's rows of K or V.
template <class C, class T>
__device__ __forceinline__ void load_keys(const WorkParams& p, const Unit& unit,
                                          const TensorView<const T>& tensor, uint8_t* to) {
  load_rows_async<C::kDim, C::kKeys, C::kThreads>(
      ptx::shared_address(to), threadIdx.x, p.dim, tensor.data, [&](int row) -> const T* {
        return row < unit.key_count ? tensor.at(unit.key_begin + row, unit.key_head) : nullptr;
      });
}

} // namespace thresher::cuda::portable::backward
