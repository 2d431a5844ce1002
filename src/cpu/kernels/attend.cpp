// Forward: one block of keys against the tokens that chose it. Each (token, slot) gets a partial
// result (maximum, sum, output that is not normalised); the combination adds a token's slots in
// their order.
#include "cpu/kernels/math.h"
#include "cpu/kernels/table.h"
#include "cpu/kernels/tile.h"

namespace thresher::cpu::THRESHER_ISA {
namespace {

template <class T>
struct Buffers {
  Tile<T> q, k, v, scores, out;
  T *row_max, *row_sum;
  int32_t* visible;
  OddRows<T> odd_values;

  Buffers(Scratch& s, const Sizes& z, const Tiling& t) {
    const int64_t rows = round_up(t.rows, kGemmRows);
    const int64_t dim = z.padded_dim > z.padded_proxy_dim ? z.padded_dim : z.padded_proxy_dim;
    q = s.tile<T>(rows, dim);
    k = s.tile<T>(z.block_size, dim);
    v = s.tile<T>(z.block_size, z.padded_dim);
    scores = s.tile<T>(rows, t.row_stride);
    out = s.tile<T>(rows, z.padded_dim);
    row_max = s.take<T>(rows);
    row_sum = s.take<T>(rows);
    visible = s.take<int32_t>(rows);
    OddRows<T>::reserve(s, z.block_size, z.padded_dim, &odd_values);
  }
};

// Scores of one row become exp(score - max); returns max and sum over the visible ones.
template <class T>
void softmax_row(T* row, int32_t visible, int32_t keys, T* out_max, T* out_sum) {
  constexpr int L = kLanes<T>;
  const int32_t whole = visible / L * L;
  const Vec<T> lowest = splat<T>(-kInfinity<T>);
  Vec<T> m = lowest;
  for (int32_t j = 0; j < whole; j += L)
    m = vmax<T>(m, load<T>(row + j));
  if (whole < visible) {
    const Vec<T> tail = keep_first<T>(load<T>(row + whole), visible - whole, lowest);
    store<T>(row + whole, tail);
    m = vmax<T>(m, tail);
  }
  const T top = max<T>(m);
  const Vec<T> shift = splat<T>(top);
  Vec<T> total{};
  for (int32_t j = 0; j < whole; j += L) {
    const Vec<T> e = exp<T>(load<T>(row + j) - shift);
    store<T>(row + j, e);
    total += e;
  }
  if (whole < visible) {
    const Vec<T> e = keep_first<T>(exp<T>(load<T>(row + whole) - shift), visible - whole, Vec<T>{});
    store<T>(row + whole, e);
    total += e;
  }
  for (int32_t j = static_cast<int32_t>(round_up(visible, L)); j < keys; j += L)
    store<T>(row + j, Vec<T>{});
  *out_max = top;
  *out_sum = sum<T>(total);
}

// (max, sum[, out]) of a slot joins what it already holds.
template <class T>
void merge(T* to_max, T* to_sum, T* to_out, T from_max, T from_sum, const T* from_out,
           int64_t dim) {
  const T top = from_max > *to_max ? from_max : *to_max;
  // A slot that is still empty has max -inf: its weight is 0 and not exp(-inf + inf).
  const T old_weight = *to_sum == 0 ? T(0) : exp1<T>(*to_max - top);
  const T new_weight = exp1<T>(from_max - top);
  *to_sum = *to_sum * old_weight + from_sum * new_weight;
  *to_max = top;
  for (int64_t i = 0; i < dim; ++i)
    to_out[i] = to_out[i] * old_weight + from_out[i] * new_weight;
}

template <class In>
struct Attend {
  using T = Acc<In>;
  const AttendArgs& a;
  const Window& w;
  const Chunk& c;
  Buffers<T> b;

  Attend(const AttendArgs& args, const Window& window, const Chunk& chunk, Scratch& scratch)
      : a(args), w(window), c(chunk), b(scratch, args.sizes, args.tiling) {}

  void load_keys(const Tile<T>& to, const View& from, int32_t head, int32_t dim, int32_t padded) {
    for (int32_t j = 0; j < c.keys; ++j)
      load_row<In>(to.row(j), at<const In>(from, c.key_row + j, head), dim, padded);
  }

  void segment(const Segment& s) {
    const Sizes& z = a.sizes;
    b.k.stride = b.q.stride = z.padded_dim;
    load_keys(b.k, a.k, s.kv_head, z.dim, z.padded_dim);
    load_keys(b.v, a.v, s.kv_head, z.dim, z.padded_dim);
    const int32_t heads = s.head_end - s.head_begin;
    for (int32_t i = c.begin; i < c.end; i += a.tiling.tokens) {
      const int32_t tokens = c.end - i < a.tiling.tokens ? c.end - i : a.tiling.tokens;
      const int32_t fit = a.tiling.rows / tokens;
      for (int32_t h = 0; h < heads; h += fit)
        main_tile(i, tokens, s.head_begin + h, heads - h < fit ? heads - h : fit);
    }
  }

  void main_tile(int32_t first, int32_t tokens, int32_t head, int32_t heads) {
    const Sizes& z = a.sizes;
    const int32_t rows = tokens * heads;
    for (int32_t i = 0, r = 0; i < tokens; ++i) {
      const int32_t token = w.items[first + i] / a.slots;
      const int32_t visible = visible_keys(w, c, token);
      for (int32_t h = 0; h < heads; ++h, ++r) {
        load_row<In>(b.q.row(r), at<const In>(a.q, w.token0 + token, head + h), z.dim, z.padded_dim,
                     static_cast<T>(z.softmax_scale));
        b.visible[r] = visible;
      }
    }
    const int64_t padded = round_up(rows, kGemmRows);
    fill_rows(b.q, rows, padded);
    gemm_nt(b.scores, readonly(b.q), readonly(b.k), padded, c.keys, z.dim);
    for (int32_t r = 0; r < rows; ++r)
      softmax_row<T>(b.scores.row(r), b.visible[r], c.keys, &b.row_max[r], &b.row_sum[r]);
    const bool masked = any_masked(b.visible, rows, c.keys);
    if (masked)
      b.odd_values.take_out(b.v, c.keys);
    gemm_nn(b.out, readonly(b.scores), readonly(b.v), padded, z.padded_dim, c.keys);
    if (masked) {
      b.odd_values.add_keys_to_rows(b.out, readonly(b.scores), b.visible, rows);
      b.odd_values.put_back();
    }
    const int32_t in_group = head - w.proxy_head * z.group;
    for (int32_t i = 0, r = 0; i < tokens; ++i)
      for (int32_t h = 0; h < heads; ++h, ++r) {
        const int64_t to = static_cast<int64_t>(w.items[first + i]) * z.group + in_group + h;
        T* out = static_cast<T*>(a.partial_out) + to * z.padded_dim;
        T* max = static_cast<T*>(a.partial_max) + to;
        T* sum = static_cast<T*>(a.partial_sum) + to;
        if (a.accumulate) {
          merge(max, sum, out, b.row_max[r], b.row_sum[r], b.out.row(r), z.padded_dim);
        } else {
          *max = b.row_max[r];
          *sum = b.row_sum[r];
          __builtin_memcpy(out, b.out.row(r), static_cast<size_t>(z.padded_dim) * sizeof(T));
        }
      }
  }

  void proxy() {
    const Sizes& z = a.sizes;
    b.k.stride = b.q.stride = z.padded_proxy_dim;
    load_keys(b.k, a.k_proxy, proxy_kv_of(z, w.proxy_head), z.proxy_dim, z.padded_proxy_dim);
    for (int32_t first = c.begin; first < c.end; first += a.tiling.rows) {
      const int32_t rows = c.end - first < a.tiling.rows ? c.end - first : a.tiling.rows;
      for (int32_t r = 0; r < rows; ++r)
        load_row<In>(b.q.row(r),
                     at<const In>(a.q_proxy, w.token0 + w.items[first + r] / a.slots, w.proxy_head),
                     z.proxy_dim, z.padded_proxy_dim, static_cast<T>(z.proxy_scale));
      const int64_t padded = round_up(rows, kGemmRows);
      fill_rows(b.q, rows, padded);
      gemm_nt(b.scores, readonly(b.q), readonly(b.k), padded, c.keys, z.proxy_dim);
      for (int32_t r = 0; r < rows; ++r) {
        const int32_t item = w.items[first + r];
        T top, total;
        softmax_row<T>(b.scores.row(r), visible_keys(w, c, item / a.slots), c.keys, &top, &total);
        T* max = static_cast<T*>(a.partial_proxy_max) + item;
        T* sum = static_cast<T*>(a.partial_proxy_sum) + item;
        if (a.accumulate) {
          merge<T>(max, sum, nullptr, top, total, nullptr, 0);
        } else {
          *max = top;
          *sum = total;
        }
      }
    }
  }
};

template <class In>
void attend(const AttendArgs& a, const Window& w, const Chunk& c, void* memory) {
  Scratch scratch(memory);
  Attend<In> work(a, w, c, scratch);
  const int32_t end = (w.proxy_head + 1) * a.sizes.group;
  for (int32_t h = w.proxy_head * a.sizes.group; h < end;) {
    const Segment s = segment_at(a.sizes, w.proxy_head, h);
    work.segment(s);
    h = s.head_end;
  }
  if (a.proxy)
    work.proxy();
}

// Empties the slots that chunks will merge into.
template <class T>
void reset(const AttendArgs& a, const Window& w, int32_t begin, int32_t end) {
  const int64_t group = a.sizes.group, row = group * a.sizes.padded_dim;
  for (int64_t i = int64_t{begin} * a.slots; i < int64_t{end} * a.slots; ++i) {
    if (!w.used[i])
      continue;
    for (int64_t g = i * group; g < (i + 1) * group; ++g) {
      static_cast<T*>(a.partial_max)[g] = -kInfinity<T>;
      static_cast<T*>(a.partial_sum)[g] = 0;
    }
    __builtin_memset(static_cast<T*>(a.partial_out) + i * row, 0,
                     static_cast<size_t>(row) * sizeof(T));
    if (!a.proxy)
      continue;
    static_cast<T*>(a.partial_proxy_max)[i] = -kInfinity<T>;
    static_cast<T*>(a.partial_proxy_sum)[i] = 0;
  }
}

// Slot weights of one row, whose partial maxima lie `step` apart, and its log-sum-exp. False if the
// row has no key.
template <class T>
bool combine_weights(const T* max, const T* sum, int64_t step, const uint8_t* used, int32_t slots,
                     T* weight, T* lse) {
  T top = -kInfinity<T>, total = 0;
  bool any = false;
  for (int32_t s = 0; s < slots; ++s)
    if (used[s] && sum[s * step] != 0) {
      any = true;
      if (max[s * step] > top)
        top = max[s * step];
    }
  for (int32_t s = 0; s < slots; ++s) {
    weight[s] = 0;
    if (!used[s] || sum[s * step] == 0)
      continue;
    weight[s] = exp1<T>(max[s * step] - top);
    total += weight[s] * sum[s * step];
  }
  *lse = any ? top + log1<T>(total) : -kInfinity<T>;
  if (total != total)
    *lse = total;
  for (int32_t s = 0; s < slots; ++s)
    weight[s] /= total;
  return any;
}

template <class In>
void combine(const AttendArgs& a, const Window& w, int32_t begin, int32_t end, void* memory) {
  using T = Acc<In>;
  const Sizes& z = a.sizes;
  Scratch scratch(memory);
  T* weight = scratch.take<T>(a.slots); // not on the stack: top_k may be anything
  T* out = scratch.take<T>(z.padded_dim);
  for (int32_t t = begin; t < end; ++t) {
    const int64_t item = static_cast<int64_t>(t) * a.slots, token = w.token0 + t;
    const uint8_t* used = w.used + item;
    for (int32_t g = 0; g < z.group; ++g) {
      const int32_t head = w.proxy_head * z.group + g;
      const int64_t at0 = item * z.group + g;
      T lse;
      const bool any = combine_weights(static_cast<const T*>(a.partial_max) + at0,
                                       static_cast<const T*>(a.partial_sum) + at0, z.group, used,
                                       a.slots, weight, &lse);
      for (int32_t i = 0; i < z.padded_dim; ++i)
        out[i] = 0;
      for (int32_t s = 0; any && s < a.slots; ++s)
        if (used[s])
          add_scaled(out, weight[s],
                     static_cast<const T*>(a.partial_out) + (at0 + s * z.group) * z.padded_dim,
                     z.padded_dim);
      store_row<In>(at<In>(a.out, token, head), out, z.dim);
      *at<T>(a.lse, token, head) = lse;
    }
    if (!a.proxy)
      continue;
    T lse;
    combine_weights(static_cast<const T*>(a.partial_proxy_max) + item,
                    static_cast<const T*>(a.partial_proxy_sum) + item, 1, used, a.slots, weight,
                    &lse);
    *at<T>(a.proxy_lse, token, w.proxy_head) = lse;
  }
}

template <class In>
size_t attend_scratch(const Sizes& z, const Tiling& t, int32_t slots) {
  Scratch tiles(nullptr), combination(nullptr);
  Buffers<Acc<In>> buffers(tiles, z, t);
  combination.take<Acc<In>>(slots);
  combination.take<Acc<In>>(z.padded_dim);
  return tiles.used() > combination.used() ? tiles.used() : combination.used();
}

template <class In>
void fill(Kernels* table) {
  table->attend_scratch = attend_scratch<In>;
  table->attend = attend<In>;
  table->attend_reset = reset<Acc<In>>;
  table->attend_combine = combine<In>;
}

} // namespace

void fill_attend(Kernels* tables) {
  fill<float>(&tables[0]);
  fill<double>(&tables[1]);
  fill<BFloat16>(&tables[2]);
  fill<Float16>(&tables[3]);
}

} // namespace thresher::cpu::THRESHER_ISA
