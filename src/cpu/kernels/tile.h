// What the kernels share: addressing of token tensors, the scratch memory of a thread, and the
// treatment of NaN and infinity in tiles that the causal mask cuts.
#pragma once

#include "cpu/args.h"
#include "cpu/kernels/gemm.h"
#include "cpu/kernels/half.h"

namespace thresher::cpu::THRESHER_ISA {

template <class T>
inline T* at(const View& view, int64_t token, int64_t head) {
  T* data = static_cast<T*>(view.data);
  if (token >= view.per_row) {
    data += token / view.per_row * view.batch;
    token %= view.per_row;
  }
  return data + token * view.token + head * view.head;
}

// Hands out pieces of a thread's scratch memory; with a null base it only counts.
class Scratch {
 public:
  explicit Scratch(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }
  template <class T>
  Tile<T> tile(int64_t rows, int64_t stride) {
    return {take<T>(rows * stride), stride};
  }
  size_t used() const { return static_cast<size_t>(used_); }

 private:
  char* base_;
  int64_t used_ = 0;
};

template <class T>
inline Tile<const T> readonly(Tile<T> t) {
  return {t.data, t.stride};
}

template <class T>
inline void fill_rows(Tile<T> t, int64_t begin, int64_t end) {
  __builtin_memset(t.row(begin), 0, static_cast<size_t>((end - begin) * t.stride) * sizeof(T));
}
template <class T>
inline void add_row(T* __restrict to, const T* __restrict from, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    to[i] += from[i];
}
template <class T>
inline void add_scaled(T* __restrict to, T a, const T* __restrict from, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    to[i] += a * from[i];
}

// Rows of a tile that hold NaN or infinity, taken out of it. A product multiplies masked entries by
// an exact 0, which is harmless only for finite rows (0 * NaN = NaN would leak into queries that do
// not see the key). So a masked tile is multiplied without such rows, whose terms are then added by
// hand, to those that really read them.
template <class T>
class OddRows {
 public:
  static void reserve(Scratch& scratch, int64_t max_rows, int64_t stride, OddRows* rows) {
    rows->index_ = scratch.take<int32_t>(max_rows);
    rows->saved_ = scratch.tile<T>(max_rows, stride);
  }

  void set_stride(int64_t stride) { saved_.stride = stride; }

  void take_out(Tile<T> tile, int64_t rows) {
    tile_ = tile;
    count_ = 0;
    for (int64_t i = 0; i < rows; ++i) {
      if (finite(tile.row(i)))
        continue;
      index_[count_] = static_cast<int32_t>(i);
      __builtin_memcpy(saved_.row(count_++), tile.row(i), bytes());
      fill_rows(tile, i, i + 1);
    }
  }
  void put_back() {
    for (int i = 0; i < count_; ++i)
      __builtin_memcpy(tile_.row(index_[i]), saved_.row(i), bytes());
    count_ = 0;
  }

  // This tile holds keys: c[r] += a[r, j] key[j] for the rows r that see key j.
  void add_keys_to_rows(Tile<T> c, Tile<const T> a, const int32_t* visible, int64_t rows) const {
    for (int i = 0; i < count_; ++i)
      for (int64_t r = 0; r < rows; ++r)
        if (index_[i] < visible[r])
          add_scaled(c.row(r), a.row(r)[index_[i]], saved_.row(i), saved_.stride);
  }
  // This tile holds query rows: c[j] += a[r, j] row[r] for the keys j that row r sees.
  void add_rows_to_keys(Tile<T> c, Tile<const T> a, const int32_t* visible) const {
    for (int i = 0; i < count_; ++i)
      for (int64_t j = 0; j < visible[index_[i]]; ++j)
        add_scaled(c.row(j), a.row(index_[i])[j], saved_.row(i), saved_.stride);
  }

 private:
  bool finite(const T* row) const {
    Vec<T> zero{};
    for (int64_t i = 0; i < saved_.stride; i += kLanes<T>)
      zero += load<T>(row + i) * T(0);
    return sum<T>(zero) == 0; // x * 0 is NaN for NaN and infinity
  }
  size_t bytes() const { return static_cast<size_t>(saved_.stride) * sizeof(T); }

  int count_ = 0;
  int32_t* index_ = nullptr;
  Tile<T> saved_{}, tile_{};
};

// Query heads of one proxy head that read the same kv head.
struct Segment {
  int32_t kv_head, head_begin, head_end;
};

inline Segment segment_at(const Sizes& s, int32_t proxy_head, int32_t head) {
  const int32_t per_kv = s.q_heads / s.kv_heads;
  const int32_t kv = head / per_kv, end = (proxy_head + 1) * s.group;
  const int32_t kv_end = (kv + 1) * per_kv;
  return {kv, head, kv_end < end ? kv_end : end};
}
inline int32_t proxy_kv_of(const Sizes& s, int32_t proxy_head) {
  return proxy_head / (s.proxy_heads / s.proxy_kv_heads);
}

// Keys of the chunk's block that the window's token sees.
inline int32_t visible_keys(const Window& w, const Chunk& c, int32_t token) {
  const int64_t seen = w.position[token] - c.first_position + 1;
  return static_cast<int32_t>(seen < c.keys ? seen : c.keys);
}

inline bool any_masked(const int32_t* visible, int64_t rows, int32_t keys) {
  for (int64_t r = 0; r < rows; ++r)
    if (visible[r] < keys)
      return true;
  return false;
}

} // namespace thresher::cpu::THRESHER_ISA
