// Selection: proxy scores of a tile of rows against runs of keys, the maximum over each block, and
// an exact top-k kept as a heap per row. Scores lie key-major, so the maximum runs across vectors.
#include "cpu/kernels/table.h"
#include "cpu/kernels/tile.h"

namespace thresher::cpu::THRESHER_ISA {
namespace {

// A block that is a candidate; `order` is the score's bits made monotonic, NaN below everything.
template <class T>
struct Candidate {
  Int<T> order;
  int32_t block;
  bool worse_than(const Candidate& o) const {
    return order != o.order ? order < o.order : block > o.block;
  }
};

template <class T>
Int<T> order_of(T score) {
  constexpr Int<T> lowest = Int<T>(1) << (8 * sizeof(T) - 1);
  if (score != score)
    return lowest;
  const T no_negative_zero = score + T(0);
  const Int<T> b = __builtin_bit_cast(Int<T>, no_negative_zero);
  return b >= 0 ? b : static_cast<Int<T>>(lowest - b); // negative numbers: larger bits are lower
}

// Heap whose root is the worst of the kept candidates.
template <class T>
void sift_down(Candidate<T>* heap, int32_t size, int32_t i) {
  const Candidate<T> moving = heap[i];
  for (;;) {
    int32_t child = 2 * i + 1;
    if (child >= size)
      break;
    if (child + 1 < size && heap[child + 1].worse_than(heap[child]))
      ++child;
    if (!heap[child].worse_than(moving))
      break;
    heap[i] = heap[child];
    i = child;
  }
  heap[i] = moving;
}
template <class T>
void sift_up(Candidate<T>* heap, int32_t i) {
  const Candidate<T> moving = heap[i];
  while (i > 0) {
    const int32_t parent = (i - 1) / 2;
    if (!moving.worse_than(heap[parent]))
      break;
    heap[i] = heap[parent];
    i = parent;
  }
  heap[i] = moving;
}

template <class T>
struct Buffers {
  Tile<T> q, k, scores;
  T *best, *probe, *threshold;
  bool* has_nan;
  int64_t* position;
  int32_t *candidates_end, *places, *kept;
  Candidate<T>* heaps;

  Buffers(Scratch& s, const Sizes& z) {
    q = s.tile<T>(kSelectRows, z.padded_proxy_dim);
    k = s.tile<T>(kSelectKeys, z.padded_proxy_dim);
    scores = s.tile<T>(kSelectKeys, kSelectRows);
    best = s.take<T>(kSelectRows);
    probe = s.take<T>(kSelectRows);
    threshold = s.take<T>(kSelectRows);
    has_nan = s.take<bool>(kSelectRows);
    position = s.take<int64_t>(kSelectRows);
    candidates_end = s.take<int32_t>(kSelectRows);
    places = s.take<int32_t>(kSelectRows);
    kept = s.take<int32_t>(kSelectRows);
    heaps = s.take<Candidate<T>>(static_cast<int64_t>(kSelectRows) * z.top_k);
  }
};

template <class In>
struct Select {
  using T = Acc<In>;
  const SelectArgs& a;
  const Sizes& z;
  const SelectTile& tile;
  Buffers<T> b;
  const int32_t heads; // proxy heads on this key head

  Select(const SelectArgs& args, const SelectTile& t, Scratch& scratch)
      : a(args), z(args.sizes), tile(t), b(scratch, args.sizes),
        heads(args.sizes.proxy_heads / args.sizes.proxy_kv_heads) {}

  int64_t token(int32_t r) const { return tile.run.q_begin + (tile.first_row + r) / heads; }
  int32_t head(int32_t r) const {
    return tile.proxy_kv_head * heads + static_cast<int32_t>((tile.first_row + r) % heads);
  }
  Candidate<T>* heap(int32_t r) const { return b.heaps + static_cast<int64_t>(r) * z.top_k; }

  void run() {
    int32_t scored_end = 0; // blocks from here on are nobody's candidates
    for (int32_t r = 0; r < tile.rows; ++r) {
      const int64_t position = tile.run.first_position + (tile.first_row + r) / heads;
      const int64_t visible = position < 0 ? 0 : position / z.block_size + 1;
      b.position[r] = position;
      b.kept[r] = 0;
      b.places[r] = z.top_k - a.init_blocks - a.local_blocks;
      // All visible blocks fit: nothing to compare.
      const bool choose = visible > z.top_k && b.places[r] > 0;
      b.candidates_end[r] = choose ? static_cast<int32_t>(visible - a.local_blocks) : 0;
      b.threshold[r] = choose ? static_cast<T>(__builtin_nan("")) : kInfinity<T>;
      if (b.candidates_end[r] > scored_end)
        scored_end = b.candidates_end[r];
    }
    if (scored_end > a.init_blocks)
      score_blocks(a.init_blocks, scored_end);
    for (int32_t r = 0; r < tile.rows; ++r)
      write_row(r);
  }

  void score_blocks(int32_t block_begin, int32_t block_end) {
    for (int32_t r = 0; r < tile.rows; ++r)
      load_row<In>(b.q.row(r), at<const In>(a.q_proxy, token(r), head(r)), z.proxy_dim,
                   z.padded_proxy_dim, static_cast<T>(z.proxy_scale));
    const int64_t rows = round_up(tile.rows, kSelectRowStep);
    fill_rows(b.q, tile.rows, rows);
    const int64_t size = z.block_size;
    int64_t keys_end = block_end * size;
    if (keys_end > tile.document.k_len)
      keys_end = tile.document.k_len;
    for (int64_t begin = block_begin * size; begin < keys_end;) {
      // Whole blocks as far as they fit, otherwise a piece of one.
      const int64_t block_stop = (begin / size + 1) * size;
      int64_t end = begin + kSelectKeys;
      if (size <= kSelectKeys)
        end = begin + kSelectKeys / size * size;
      else if (end > block_stop)
        end = block_stop;
      if (end > keys_end)
        end = keys_end;
      for (int64_t j = begin; j < end; ++j)
        load_row<In>(b.k.row(j - begin),
                     at<const In>(a.k_proxy, tile.document.k_begin + j, tile.proxy_kv_head),
                     z.proxy_dim, z.padded_proxy_dim);
      gemm_nt(b.scores, readonly(b.k), readonly(b.q), round_up(end - begin, kGemmRows), rows,
              z.proxy_dim);
      for (int64_t j = begin; j < end;) {
        const int32_t block = static_cast<int32_t>(j / size);
        int64_t stop = (block + 1) * size;
        if (stop > end)
          stop = end;
        block_maximum(j - begin, stop - begin, j, j % size == 0, rows);
        if (stop == keys_end || stop % size == 0)
          offer(block);
        j = stop;
      }
      begin = end;
    }
  }

  // Joins score rows [begin, end), whose first key has this position, to the running maximum.
  void block_maximum(int64_t begin, int64_t end, int64_t position, bool fresh, int64_t rows) {
    constexpr int L = kLanes<T>;
    if (position + (end - begin) - 1 > b.position[0])
      mask_future(begin, end, position);
    for (int64_t r = 0; r < rows; r += L) {
      Vec<T> best = fresh ? splat<T>(-kInfinity<T>) : load<T>(b.best + r);
      Vec<T> probe{};
      for (int64_t j = begin; j < end; ++j) {
        const Vec<T> s = load<T>(b.scores.row(j) + r);
        best = vmax<T>(best, s);
        probe += s * T(0); // becomes NaN for NaN, but also for infinity
      }
      store<T>(b.best + r, best);
      store<T>(b.probe + r, probe);
    }
    // A block that holds a NaN scores NaN. Infinities are told apart here.
    for (int64_t r = 0; r < tile.rows; ++r) {
      if (fresh)
        b.has_nan[r] = false;
      if (b.probe[r] == 0)
        continue;
      for (int64_t j = begin; j < end; ++j)
        if (b.scores.row(j)[r] != b.scores.row(j)[r])
          b.has_nan[r] = true;
    }
  }

  void mask_future(int64_t begin, int64_t end, int64_t position) {
    for (int64_t j = begin; j < end; ++j)
      for (int64_t r = 0; r < tile.rows && position + (j - begin) > b.position[r]; ++r)
        b.scores.row(j)[r] = -kInfinity<T>;
  }

  void offer(int32_t block) {
    for (int32_t r = 0; r < tile.rows; ++r) {
      const T score = b.has_nan[r] ? static_cast<T>(__builtin_nan("")) : b.best[r];
      if (score <= b.threshold[r] || block >= b.candidates_end[r])
        continue;
      consider(r, {order_of<T>(score), block});
    }
  }

  void consider(int32_t r, Candidate<T> candidate) {
    Candidate<T>* kept = heap(r);
    if (b.kept[r] < b.places[r]) {
      kept[b.kept[r]] = candidate;
      sift_up(kept, b.kept[r]++);
    } else if (kept[0].worse_than(candidate)) {
      kept[0] = candidate;
      sift_down(kept, b.places[r], 0);
    } else {
      return;
    }
    if (b.kept[r] == b.places[r])
      b.threshold[r] = score_of(kept[0].order);
  }

  static T score_of(Int<T> order) {
    constexpr Int<T> lowest = Int<T>(1) << (8 * sizeof(T) - 1);
    if (order == lowest)
      return static_cast<T>(__builtin_nan(""));
    return __builtin_bit_cast(T, order >= 0 ? order : static_cast<Int<T>>(lowest - order));
  }

  void write_row(int32_t r) {
    int32_t* ids = at<int32_t>(a.indices, token(r), head(r));
    const int64_t position = b.position[r];
    const int32_t visible = position < 0 ? 0 : static_cast<int32_t>(position / z.block_size + 1);
    int32_t n = 0;
    if (visible <= z.top_k) {
      for (; n < visible; ++n)
        ids[n] = n;
    } else {
      for (; n < a.init_blocks; ++n)
        ids[n] = n;
      Candidate<T>* kept = heap(r);
      for (int32_t i = 0; i < b.kept[r]; ++i, ++n) { // insertion by id
        int32_t to = n;
        for (; to > a.init_blocks && ids[to - 1] > kept[i].block; --to)
          ids[to] = ids[to - 1];
        ids[to] = kept[i].block;
      }
      for (int32_t block = visible - a.local_blocks; block < visible; ++block)
        ids[n++] = block;
    }
    for (; n < z.top_k; ++n)
      ids[n] = -1;
  }
};

template <class In>
void select(const SelectArgs& a, const SelectTile& t, void* memory) {
  Scratch scratch(memory);
  Select<In>(a, t, scratch).run();
}
template <class In>
size_t select_scratch(const SelectArgs& a) {
  Scratch counter(nullptr);
  Buffers<Acc<In>> buffers(counter, a.sizes);
  return counter.used();
}
template <class In>
void fill(Kernels* table) {
  table->select_scratch = select_scratch<In>;
  table->select = select<In>;
}

} // namespace

void fill_select(Kernels* tables) {
  fill<float>(&tables[0]);
  fill<double>(&tables[1]);
  fill<BFloat16>(&tables[2]);
  fill<Float16>(&tables[3]);
}

void fill_tables(Kernels* tables) {
  fill_select(tables);
  fill_attend(tables);
  fill_backward(tables);
}

} // namespace thresher::cpu::THRESHER_ISA
