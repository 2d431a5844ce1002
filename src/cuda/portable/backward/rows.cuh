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

// Describes the rows of the tiles, one row a thread: an entry is fetched three tiles ahead of its
// use, the facts of its token two tiles, so that nobody waits for memory.
template <class T, class C>
class RowFeed {
 public:
  __device__ __forceinline__ RowFeed(const MainParams<T>& p, const Unit& unit,
                                     const RowLayout<C>& layout, MainShared<C>& shared)
      : p_(p), unit_(unit), shared_(shared), row_(threadIdx.x) {
    const int warp = row_ / C::kScoreRows, within = row_ % C::kScoreRows;
    const int token = within / layout.heads;
    head_ = within - token * layout.heads;
    step_ = layout.tokens_per_tile;
    // Rows that are left over lie behind every list.
    next_ = token < layout.tokens_per_warp ? warp * layout.tokens_per_warp + token : unit.count;
    shared_.head[row_] = static_cast<uint8_t>(token < layout.tokens_per_warp ? head_ : 0);
    fetch_entry();
    fetch_facts();
    fetch_entry();
  }

  // Writes down the next tile, in place `ring` of three, and fetches ahead.
  __device__ __forceinline__ void write(int ring) {
    int32_t word = kNoRow;
    int32_t reach = C::kKeys; // of no row: such a row adds zeros, nothing need be masked
    if (token_ >= 0) {
      word = token_;
      if (isnan(constants_.x))
        word |= kQueryBad;
      if (isinf(constants_.y))
        word |= kOutputBad;
      reach = max(0, min(unit_.key_count, position_ - unit_.position + 1));
    }
    shared_.token[ring][row_] = word;
    shared_.reach[ring][row_] = static_cast<uint16_t>(reach | slot_ << 8);
    shared_.constants[ring][row_] = constants_;
    fetch_facts();
    fetch_entry();
  }

 private:
  __device__ __forceinline__ void fetch_entry() {
    valid_ = next_ < unit_.count;
    entry_ = 0;
    if (valid_)
      entry_ = unit_.entries ? __ldg(unit_.entries + next_)
                             : static_cast<Entry>(next_) | static_cast<Entry>(unit_.slot)
                                                               << kEntryTokenBits;
    next_ += valid_ ? step_ : 0;
  }
  __device__ __forceinline__ void fetch_facts() {
    token_ = kNoRow;
    slot_ = 0;
    constants_ = {0.f, 0.f};
    position_ = 0;
    if (valid_) {
      token_ = unit_.first_token + BlockIndex::entry_offset(entry_);
      slot_ = BlockIndex::entry_slot(entry_);
      position_ = __ldg(p_.index.position + p_.pass.first_token + token_);
      constants_ = __ldg(p_.constants + static_cast<int64_t>(token_) * p_.q_heads +
                         unit_.first_head + head_);
    }
  }

  const MainParams<T>& p_;
  const Unit& unit_;
  MainShared<C>& shared_;
  int32_t row_, head_, step_, next_;
  Entry entry_;
  bool valid_;
  int32_t token_, slot_, position_;
  RowConstants constants_;
};

// Enqueues the loads of the described tile in place `ring` into `stage`. Rows that are not there,
// or not finite, become zeros.
template <class T, class C>
__device__ __forceinline__ void load_rows(const MainParams<T>& p, const Unit& unit,
                                          MainShared<C>& shared, int ring, int stage) {
  constexpr int kChunks = Tile<C::kDim>::kChunks;
  static_assert(C::kRows * kChunks % C::kThreads == 0);
  const uint32_t q = ptx::shared_address(shared.q[stage]);
  const uint32_t dout = ptx::shared_address(shared.dout[stage]);
  const int chunk = threadIdx.x % kChunks;
  const bool inside = chunk * 8 < p.dim;
#pragma unroll
  for (int first = 0; first < C::kRows; first += C::kThreads / kChunks) {
    const int row = first + threadIdx.x / kChunks;
    const int32_t word = shared.token[ring][row];
    const int32_t token = p.pass.first_token + (word & kTokenMask);
    const int32_t head = unit.first_head + shared.head[row];
    const bool real = word >= 0 && inside;
    const uint32_t place = Tile<C::kDim>::offset(row, chunk);
    const bool has_q = real && !(word & kQueryBad);
    ptx::copy_async_16(q + place, has_q ? p.q.at(token, head) + chunk * 8 : p.q.data, has_q);
    if (p.dout.data) {
      const bool has_dout = real && !(word & kOutputBad);
      ptx::copy_async_16(dout + place, has_dout ? p.dout.at(token, head) + chunk * 8 : p.dout.data,
                         has_dout);
    }
  }
}

// Enqueues the loads of the unit's keys and values.
template <class T, class C>
__device__ __forceinline__ void load_keys(const MainParams<T>& p, const Unit& unit,
                                          MainShared<C>& shared) {
  const auto row_of = [&](const TensorView<const T>& tensor) {
    return [&](int row) -> const T* {
      return row < unit.key_count ? tensor.at(unit.key_begin + row, unit.kv_head) : nullptr;
    };
  };
  load_rows_async<C::kDim, C::kKeys, C::kThreads>(ptx::shared_address(shared.k), threadIdx.x, p.dim,
                                                  p.k.data, row_of(p.k));
  if (p.dout.data)
    load_rows_async<C::kDim, C::kKeys, C::kThreads>(ptx::shared_address(shared.v), threadIdx.x,
                                                    p.dim, p.v.data, row_of(p.v));
}

// Whether one of two packed 16-bit floats is infinite or NaN.
template <class T>
__device__ __forceinline__ bool has_bad(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<T, bf16> ? 0x7f807f80u : 0x7c007c00u;
  const uint32_t rest = (pair & kExponent) ^ kExponent;
  return ((rest - 0x00010001u) & ~rest & 0x80008000u) != 0;
}

// Key rows with an infinity or NaN would spoil, as 0 * NaN, the sums of rows that do not see them:
// they are replaced by zeros and noted in `bad_keys`. Returns whether there are any. `keys` is a
// loaded tile that all threads see; synchronises.
template <class T, int kDim, int kKeys, int kThreads>
__device__ __forceinline__ bool clear_bad_keys(uint8_t* keys, uint32_t* bad_keys) {
  constexpr int kPerRow = kThreads / kKeys, kChunks = Tile<kDim>::kChunks;
  const int row = threadIdx.x / kPerRow;
  bool bad = false;
#pragma unroll
  for (int chunk = threadIdx.x % kPerRow; chunk < kChunks; chunk += kPerRow) {
    const uint4 x = *reinterpret_cast<const uint4*>(keys + Tile<kDim>::offset(row, chunk));
    bad |= has_bad<T>(x.x) || has_bad<T>(x.y) || has_bad<T>(x.z) || has_bad<T>(x.w);
  }
  if (!__syncthreads_or(bad))
    return false;
  if (threadIdx.x < (kKeys + 31) / 32)
    bad_keys[threadIdx.x] = 0;
  __syncthreads();
  if (bad)
    atomicOr(bad_keys + row / 32, 1u << (row % 32));
  __syncthreads();
  if (bad_keys[row / 32] >> (row % 32) & 1)
    for (int chunk = threadIdx.x % kPerRow; chunk < kChunks; chunk += kPerRow)
      *reinterpret_cast<uint4*>(keys + Tile<kDim>::offset(row, chunk)) = make_uint4(0, 0, 0, 0);
  __syncthreads();
  return true;
}

} // namespace thresher::cuda::portable::backward
