// Backward of the main attention and of the proxy's KL in one pass: P is formed once per tile, and
// serves the main gradients and, averaged over the heads of the group, as the proxy's teacher.
// Key gradients go to the accumulators of the block (or to a partial buffer of the chunk), query
// gradients to the (token, slot) that the item names; the combination adds slots in their order.
#include "cpu/kernels/math.h"
#include "cpu/kernels/table.h"
#include "cpu/kernels/tile.h"

namespace thresher::cpu::THRESHER_ISA {
namespace {

bool need_proxy(const BackwardArgs& a) {
  return a.need_dq_proxy || a.need_dk_proxy || a.need_kl;
}
bool need_scores_gradient(const BackwardArgs& a) {
  return a.need_dq || a.need_dk;
}

template <class T>
struct Buffers {
  Tile<T> q, dout, k, v, dk, dv, scores, dscores, dq, teacher;
  T *lse, *delta;
  int32_t* visible;
  OddRows<T> odd_q, odd_dout, odd_k;

  Buffers(Scratch& s, const Sizes& z, const Tiling& t) {
    const int64_t rows = round_up(t.rows, kGemmRows);
    const int64_t dim = z.padded_dim > z.padded_proxy_dim ? z.padded_dim : z.padded_proxy_dim;
    q = s.tile<T>(rows, dim);
    dout = s.tile<T>(rows, z.padded_dim);
    dq = s.tile<T>(rows, dim);
    k = s.tile<T>(z.block_size, dim);
    v = s.tile<T>(z.block_size, z.padded_dim);
    dk = s.tile<T>(z.block_size, dim);
    dv = s.tile<T>(z.block_size, z.padded_dim);
    scores = s.tile<T>(rows, t.row_stride);
    dscores = s.tile<T>(rows, t.row_stride);
    teacher = s.tile<T>(t.chunk_tokens, t.row_stride);
    lse = s.take<T>(rows);
    delta = s.take<T>(rows);
    visible = s.take<int32_t>(rows);
    OddRows<T>::reserve(s, rows, dim, &odd_q);
    OddRows<T>::reserve(s, rows, z.padded_dim, &odd_dout);
    OddRows<T>::reserve(s, z.block_size, dim, &odd_k);
  }
  void set_dim(int64_t padded) {
    q.stride = dq.stride = k.stride = dk.stride = padded;
    odd_q.set_stride(padded);
    odd_k.set_stride(padded);
  }
};

template <class In>
struct Backward {
  using T = Acc<In>;
  static constexpr int L = kLanes<T>;
  const BackwardArgs& a;
  const Sizes& z;
  const Window& w;
  const Chunk& c;
  Buffers<T> b;
  const bool proxy, scores_gradient, main;
  int32_t first = 0, count = 0; // items of this round

  Backward(const BackwardArgs& args, const Window& window, const Chunk& chunk, Scratch& scratch)
      : a(args), z(args.sizes), w(window), c(chunk), b(scratch, args.sizes, args.tiling),
        proxy(need_proxy(args)), scores_gradient(need_scores_gradient(args)),
        main(scores_gradient || args.need_dv) {}

  int32_t item(int32_t i) const { return w.items[first + i]; }
  int32_t token(int32_t i) const { return item(i) / a.slots; }

  void load_keys(const Tile<T>& to, const View& from, int32_t head, int32_t dim, int32_t padded) {
    for (int32_t j = 0; j < c.keys; ++j)
      load_row<In>(to.row(j), at<const In>(from, c.key_row + j, head), dim, padded);
  }

  void run() {
    const int32_t heads_end = (w.proxy_head + 1) * z.group;
    for (first = c.begin; first < c.end; first += a.tiling.chunk_tokens) {
      count = c.end - first < a.tiling.chunk_tokens ? c.end - first : a.tiling.chunk_tokens;
      if (proxy)
        fill_rows(b.teacher, 0, count);
      int64_t partial = 0; // offset of the segment in a partial buffer
      for (int32_t h = w.proxy_head * z.group; h < heads_end;) {
        const Segment s = segment_at(z, w.proxy_head, h);
        segment(s, partial);
        partial += 2 * static_cast<int64_t>(z.block_size) * z.padded_dim;
        h = s.head_end;
      }
      if (proxy)
        proxy_part(partial);
    }
  }

  // Adds a tile of key gradients to where this chunk's go.
  void add_keys(const Tile<T>& tile, const View& accumulator, int32_t head, int32_t dim,
                int64_t partial_offset) {
    T* partial = c.partial < 0 ? nullptr
                               : static_cast<T*>(a.partial_keys) + c.partial * a.key_partial_size +
                                     partial_offset;
    for (int32_t j = 0; j < c.keys; ++j) {
      if (partial)
        __builtin_memcpy(partial + j * tile.stride, tile.row(j),
                         static_cast<size_t>(tile.stride) * sizeof(T));
      else
        add_row(at<T>(accumulator, c.key_row + j, head), tile.row(j), dim);
    }
  }

  void segment(const Segment& s, int64_t partial) {
    b.set_dim(z.padded_dim);
    load_keys(b.k, a.k, s.kv_head, z.dim, z.padded_dim);
    if (scores_gradient)
      load_keys(b.v, a.v, s.kv_head, z.dim, z.padded_dim);
    if (a.need_dk)
      fill_rows(b.dk, 0, c.keys);
    if (a.need_dv)
      fill_rows(b.dv, 0, c.keys);
    const int32_t heads = s.head_end - s.head_begin;
    for (int32_t i = 0; i < count; i += a.tiling.tokens) {
      const int32_t tokens = count - i < a.tiling.tokens ? count - i : a.tiling.tokens;
      const int32_t fit = a.tiling.rows / tokens;
      for (int32_t h = 0; h < heads; h += fit)
        main_tile(i, tokens, s.head_begin + h, heads - h < fit ? heads - h : fit);
    }
    if (a.need_dk)
      add_keys(b.dk, a.dk, s.kv_head, z.dim, partial);
    if (a.need_dv)
      add_keys(b.dv, a.dv, s.kv_head, z.dim,
               partial + static_cast<int64_t>(z.block_size) * z.padded_dim);
  }

  void main_tile(int32_t first_token, int32_t tokens, int32_t head, int32_t heads) {
    const int32_t rows = tokens * heads, in_group = head - w.proxy_head * z.group;
    for (int32_t i = 0, r = 0; i < tokens; ++i) {
      const int32_t t = token(first_token + i), visible = visible_keys(w, c, t);
      for (int32_t h = 0; h < heads; ++h, ++r) {
        load_row<In>(b.q.row(r), at<const In>(a.q, w.token0 + t, head + h), z.dim, z.padded_dim,
                     static_cast<T>(z.softmax_scale));
        if (main)
          load_row<In>(b.dout.row(r), at<const In>(a.dout, w.token0 + t, head + h), z.dim,
                       z.padded_dim);
        b.lse[r] = *at<const T>(a.lse, w.token0 + t, head + h);
        if (scores_gradient)
          b.delta[r] =
              static_cast<const T*>(a.delta)[static_cast<int64_t>(t) * z.group + in_group + h];
        b.visible[r] = visible;
      }
    }
    const int64_t padded = round_up(rows, kGemmRows);
    fill_rows(b.q, rows, padded);
    gemm_nt(b.scores, readonly(b.q), readonly(b.k), padded, c.keys, z.dim);
    if (scores_gradient) {
      fill_rows(b.dout, rows, padded);
      gemm_nt(b.dscores, readonly(b.dout), readonly(b.v), padded, c.keys, z.dim);
    }
    for (int32_t r = 0; r < rows; ++r)
      main_row(b.scores.row(r), b.dscores.row(r), b.teacher.row(first_token + r / heads),
               b.visible[r], b.lse[r], b.delta[r]);
    if (!main)
      return;

    const bool masked = any_masked(b.visible, rows, c.keys);
    if (masked) {
      b.odd_q.take_out(b.q, rows);
      b.odd_dout.take_out(b.dout, rows);
      b.odd_k.take_out(b.k, c.keys);
    }
    if (a.need_dv) {
      gemm_tn_add(b.dv, readonly(b.scores), readonly(b.dout), c.keys, z.padded_dim, rows);
      if (masked)
        b.odd_dout.add_rows_to_keys(b.dv, readonly(b.scores), b.visible);
    }
    if (a.need_dk) {
      gemm_tn_add(b.dk, readonly(b.dscores), readonly(b.q), c.keys, z.padded_dim, rows);
      if (masked)
        b.odd_q.add_rows_to_keys(b.dk, readonly(b.dscores), b.visible);
    }
    if (a.need_dq) {
      gemm_nn(b.dq, readonly(b.dscores), readonly(b.k), padded, z.padded_dim, c.keys);
      if (masked)
        b.odd_k.add_keys_to_rows(b.dq, readonly(b.dscores), b.visible, rows);
      for (int32_t i = 0, r = 0; i < tokens; ++i)
        for (int32_t h = 0; h < heads; ++h, ++r)
          put(static_cast<T*>(a.partial_dq) +
                  (static_cast<int64_t>(item(first_token + i)) * z.group + in_group + h) *
                      z.padded_dim,
              b.dq.row(r), z.padded_dim);
    }
    if (masked)
      b.odd_k.put_back();
  }

  void put(T* to, const T* from, int64_t n) const {
    if (a.accumulate)
      add_row(to, from, n);
    else
      __builtin_memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
  }

  // scores becomes P, dscores (<dout, v> so far) becomes P (dP - delta), P joins the teacher.
  // Entries beyond `visible` become exactly 0.
  void main_row(T* scores, T* dscores, T* teacher, int32_t visible, T lse, T delta) const {
    const Vec<T> lse_v = splat<T>(lse), delta_v = splat<T>(delta);
    const Vec<T> share = splat<T>(T(1) / static_cast<T>(z.group));
    for (int32_t j = 0; j < visible; j += L) {
      Vec<T> p = exp<T>(load<T>(scores + j) - lse_v);
      if (j + L > visible)
        p = keep_first<T>(p, visible - j, Vec<T>{});
      store<T>(scores + j, p);
      if (scores_gradient) {
        Vec<T> d = p * (load<T>(dscores + j) - delta_v);
        if (j + L > visible)
          d = keep_first<T>(d, visible - j, Vec<T>{});
        store<T>(dscores + j, d);
      }
      if (proxy)
        store<T>(teacher + j, load<T>(teacher + j) + p * share);
    }
    for (int32_t j = static_cast<int32_t>(round_up(visible, L)); j < c.keys; j += L) {
      store<T>(scores + j, Vec<T>{});
      if (scores_gradient)
        store<T>(dscores + j, Vec<T>{});
    }
  }

  // scores becomes dS_proxy = dkl (student - teacher); returns the row's share of the KL.
  T proxy_row(T* scores, const T* teacher, int32_t visible, T lse, T dkl) const {
    const Vec<T> lse_v = splat<T>(lse), dkl_v = splat<T>(dkl);
    const Vec<T> smallest = splat<T>(MathConstants<T>::min_normal);
    const bool gradient = a.need_dq_proxy || a.need_dk_proxy;
    Vec<T> total{};
    for (int32_t j = 0; j < visible; j += L) {
      const bool tail = j + L > visible;
      const Vec<T> log_student = load<T>(scores + j) - lse_v;
      const Vec<T> difference = exp<T>(log_student) - load<T>(teacher + j);
      if (a.need_kl) {
        // student - teacher sums to 0 over the row. Term by term it takes out what the rounding of
        // the two normalisers (lse, proxy_lse) would add to a small KL, in every row with one sign.
        // 0 ln 0 = 0; a NaN teacher passes.
        const Vec<T> t = load<T>(teacher + j);
        Vec<T> term = (t < smallest ? Vec<T>{} : t * (log<T>(t) - log_student)) + difference;
        if (tail)
          term = keep_first<T>(term, visible - j, Vec<T>{});
        total += term;
      }
      if (gradient) {
        Vec<T> d = dkl_v * difference;
        if (tail)
          d = keep_first<T>(d, visible - j, Vec<T>{});
        store<T>(scores + j, d);
      }
    }
    for (int32_t j = static_cast<int32_t>(round_up(visible, L)); j < c.keys; j += L)
      store<T>(scores + j, Vec<T>{});
    return sum<T>(total);
  }

  void proxy_part(int64_t partial) {
    const int32_t key_head = proxy_kv_of(z, w.proxy_head);
    b.set_dim(z.padded_proxy_dim);
    load_keys(b.k, a.k_proxy, key_head, z.proxy_dim, z.padded_proxy_dim);
    if (a.need_dk_proxy)
      fill_rows(b.dk, 0, c.keys);
    for (int32_t i = 0; i < count; i += a.tiling.rows)
      proxy_tile(i, count - i < a.tiling.rows ? count - i : a.tiling.rows);
    if (a.need_dk_proxy)
      add_keys(b.dk, a.dk_proxy, key_head, z.proxy_dim, partial);
  }

  void proxy_tile(int32_t first_token, int32_t rows) {
    const bool gradient = a.need_dq_proxy || a.need_dk_proxy;
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t t = token(first_token + r);
      load_row<In>(b.q.row(r), at<const In>(a.q_proxy, w.token0 + t, w.proxy_head), z.proxy_dim,
                   z.padded_proxy_dim, static_cast<T>(z.proxy_scale));
      b.visible[r] = visible_keys(w, c, t);
    }
    const int64_t padded = round_up(rows, kGemmRows);
    fill_rows(b.q, rows, padded);
    gemm_nt(b.scores, readonly(b.q), readonly(b.k), padded, c.keys, z.proxy_dim);
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t at_item = item(first_token + r);
      const int64_t t = w.token0 + at_item / a.slots;
      const T kl = proxy_row(b.scores.row(r), b.teacher.row(first_token + r), b.visible[r],
                             *at<const T>(a.proxy_lse, t, w.proxy_head),
                             gradient ? *at<const T>(a.dkl, t, w.proxy_head) : T(0));
      if (a.need_kl) {
        T* to = static_cast<T*>(a.partial_kl) + at_item;
        *to = a.accumulate ? *to + kl : kl;
      }
    }
    if (!gradient)
      return;
    const bool masked = any_masked(b.visible, rows, c.keys);
    if (masked) {
      b.odd_q.take_out(b.q, rows);
      b.odd_k.take_out(b.k, c.keys);
    }
    if (a.need_dk_proxy) {
      gemm_tn_add(b.dk, readonly(b.scores), readonly(b.q), c.keys, z.padded_proxy_dim, rows);
      if (masked)
        b.odd_q.add_rows_to_keys(b.dk, readonly(b.scores), b.visible);
    }
    if (a.need_dq_proxy) {
      gemm_nn(b.dq, readonly(b.scores), readonly(b.k), padded, z.padded_proxy_dim, c.keys);
      if (masked)
        b.odd_k.add_keys_to_rows(b.dq, readonly(b.scores), b.visible, rows);
      for (int32_t r = 0; r < rows; ++r)
        put(static_cast<T*>(a.partial_dq_proxy) +
                static_cast<int64_t>(item(first_token + r)) * z.padded_proxy_dim,
            b.dq.row(r), z.padded_proxy_dim);
    }
    if (masked)
      b.odd_k.put_back();
  }
};

template <class In>
void backward(const BackwardArgs& a, const Window& w, const Chunk& c, void* memory) {
  Scratch scratch(memory);
  Backward<In>(a, w, c, scratch).run();
}

// delta = <dout, out> of each row.
template <class In>
void delta(const BackwardArgs& a, const Window& w, int32_t begin, int32_t end) {
  using T = Acc<In>;
  for (int32_t t = begin; t < end; ++t)
    for (int32_t g = 0; g < a.sizes.group; ++g) {
      const int32_t head = w.proxy_head * a.sizes.group + g;
      const In* out = at<const In>(a.out, w.token0 + t, head);
      const In* dout = at<const In>(a.dout, w.token0 + t, head);
      constexpr int kParts = 16;
      T part[kParts] = {};
      int i = 0;
      for (; i + kParts <= a.sizes.dim; i += kParts)
        for (int l = 0; l < kParts; ++l)
          part[l] += to_acc(out[i + l]) * to_acc(dout[i + l]);
      for (int l = 0; i < a.sizes.dim; ++i, ++l)
        part[l] += to_acc(out[i]) * to_acc(dout[i]);
      T total = 0;
      for (int l = 0; l < kParts; ++l)
        total += part[l];
      static_cast<T*>(a.delta)[static_cast<int64_t>(t) * a.sizes.group + g] = total;
    }
}

// Zeroes the slots that chunks will add to.
template <class T>
void reset(const BackwardArgs& a, const Window& w, int32_t begin, int32_t end) {
  auto clear = [](void* data, int64_t item, int64_t per_item) {
    __builtin_memset(static_cast<T*>(data) + item * per_item, 0,
                     static_cast<size_t>(per_item) * sizeof(T));
  };
  for (int64_t i = int64_t{begin} * a.slots; i < int64_t{end} * a.slots; ++i) {
    if (!w.used[i])
      continue;
    if (a.need_dq)
      clear(a.partial_dq, i, int64_t{a.sizes.group} * a.sizes.padded_dim);
    if (a.need_dq_proxy)
      clear(a.partial_dq_proxy, i, a.sizes.padded_proxy_dim);
    if (a.need_kl)
      clear(a.partial_kl, i, 1);
  }
}

// Adds a chunk's partial key gradients to the accumulators.
template <class T>
void reduce(const BackwardArgs& a, const Window& w, const Chunk& c) {
  const Sizes& z = a.sizes;
  const T* from = static_cast<const T*>(a.partial_keys) + c.partial * a.key_partial_size;
  auto add = [&](const View& to, int32_t head, int32_t dim, int32_t padded) {
    for (int32_t j = 0; j < c.keys; ++j)
      add_row(at<T>(to, c.key_row + j, head), from + static_cast<int64_t>(j) * padded, dim);
  };
  const int64_t step = static_cast<int64_t>(z.block_size) * z.padded_dim;
  for (int32_t h = w.proxy_head * z.group; h < (w.proxy_head + 1) * z.group;) {
    const Segment s = segment_at(z, w.proxy_head, h);
    if (a.need_dk)
      add(a.dk, s.kv_head, z.dim, z.padded_dim);
    from += step;
    if (a.need_dv)
      add(a.dv, s.kv_head, z.dim, z.padded_dim);
    from += step;
    h = s.head_end;
  }
  if (a.need_dk_proxy)
    add(a.dk_proxy, proxy_kv_of(z, w.proxy_head), z.proxy_dim, z.padded_proxy_dim);
}

template <class In>
void combine(const BackwardArgs& a, const Window& w, int32_t begin, int32_t end) {
  using T = Acc<In>;
  const Sizes& z = a.sizes;
  const int32_t widest = z.padded_dim > z.padded_proxy_dim ? z.padded_dim : z.padded_proxy_dim;
  T* row = static_cast<T*>(__builtin_alloca(static_cast<size_t>(widest) * sizeof(T)));
  auto add_slots = [&](const void* partial, int64_t first_row, int64_t step, const uint8_t* used,
                       int32_t padded, double scale) {
    for (int32_t i = 0; i < padded; ++i)
      row[i] = 0;
    for (int32_t s = 0; s < a.slots; ++s)
      if (used[s])
        add_row(row, static_cast<const T*>(partial) + (first_row + s * step) * padded, padded);
    for (int32_t i = 0; i < padded; ++i)
      row[i] *= static_cast<T>(scale);
  };
  for (int32_t t = begin; t < end; ++t) {
    const int64_t item = static_cast<int64_t>(t) * a.slots, token = w.token0 + t;
    const uint8_t* used = w.used + item;
    for (int32_t g = 0; a.need_dq && g < z.group; ++g) {
      add_slots(a.partial_dq, item * z.group + g, z.group, used, z.padded_dim, z.softmax_scale);
      store_row<In>(at<In>(a.dq, token, w.proxy_head * z.group + g), row, z.dim);
    }
    if (a.need_dq_proxy) {
      add_slots(a.partial_dq_proxy, item, 1, used, z.padded_proxy_dim, z.proxy_scale);
      store_row<In>(at<In>(a.dq_proxy, token, w.proxy_head), row, z.proxy_dim);
    }
    if (a.need_kl) {
      T kl = 0;
      for (int32_t s = 0; s < a.slots; ++s)
        if (used[s])
          kl += static_cast<const T*>(a.partial_kl)[item + s];
      *at<T>(a.kl, token, w.proxy_head) = kl;
    }
  }
}

template <class In>
void store_rows(const View& to, const View& from, int64_t begin, int64_t end, int32_t heads,
                int32_t dim) {
  for (int64_t row = begin; row < end; ++row)
    for (int32_t h = 0; h < heads; ++h)
      store_row<In>(at<In>(to, row, h), at<const Acc<In>>(from, row, h), dim);
}

template <class In>
size_t backward_scratch(const Sizes& z, const Tiling& t) {
  Scratch counter(nullptr);
  Buffers<Acc<In>> buffers(counter, z, t);
  return counter.used();
}

template <class In>
void fill(Kernels* table) {
  table->backward_scratch = backward_scratch<In>;
  table->backward_delta = delta<In>;
  table->backward = backward<In>;
  table->backward_reset = reset<Acc<In>>;
  table->backward_reduce = reduce<Acc<In>>;
  table->backward_combine = combine<In>;
  table->store_rows = store_rows<In>;
}

} // namespace

void fill_backward(Kernels* tables) {
  fill<float>(&tables[0]);
  fill<double>(&tables[1]);
  fill<BFloat16>(&tables[2]);
  fill<Float16>(&tables[3]);
}

} // namespace thresher::cpu::THRESHER_ISA
