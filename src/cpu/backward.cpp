// Driver of the backward: main gradients, proxy gradients and KL rows in one pass over the chunks.
// The exact KL of the forward (proxy_kl) is the same pass with the KL as its only result.
#include "core/backend.h"
#include "cpu/call.h"
#include "cpu/check.h"
#include "cpu/dispatch.h"
#include "cpu/passes.h"
#include "cpu/work.h"

namespace thresher::cpu {
namespace {

// An accumulator of key gradients: the output itself, or an array of the workspace if the output is
// of a 16-bit type.
struct KeyGradient {
  View output{}, accumulator{};
  int32_t heads = 0, dim = 0;
  bool needed = false, separate = false;

  KeyGradient() = default;
  KeyGradient(Arena& arena, const Tensor& tensor, bool is_needed, const Shapes& s,
              int32_t head_count, int32_t head_dim)
      : heads(head_count), dim(head_dim), needed(is_needed),
        separate(needed && accumulation_type(s.dtype) != s.dtype) {
    if (!tensor)
      return;
    output = accumulator = token_tensor(tensor);
    if (!separate)
      return;
    accumulator.data = arena.take<float>({s.keys, heads, dim});
    accumulator.batch = 0;
    accumulator.token = static_cast<int64_t>(heads) * dim;
    accumulator.head = dim;
    accumulator.per_row = std::max<int64_t>(s.keys, 1);
  }
};

int32_t segments_per_proxy_head(const Sizes& z) {
  int32_t most = 0;
  for (int32_t p = 0; p < z.proxy_heads; ++p) {
    const int32_t per_kv = z.q_heads / z.kv_heads;
    const int32_t first = p * z.group / per_kv, last = ((p + 1) * z.group - 1) / per_kv;
    most = std::max(most, last - first + 1);
  }
  return most;
}

template <class Work>
struct Memory {
  Arena arena;
  Sizes sizes;
  Tiling tiling;
  BackwardArgs args{};
  Geometry geometry;
  int64_t window = 0;
  KeyGradient dk, dv, dk_proxy;
  Work work;
  Threads threads;

  Memory(const BackwardParams& p, const Shapes& s, const Workspace& w)
      : arena(w.data), sizes(sizes_of(p.problem, s)), tiling(tiling_of(sizes)),
        geometry(arena, p.problem, s), window(plan(p, s)),
        dk(arena, p.dk, args.need_dk, s, s.kv_heads, s.dim),
        dv(arena, p.dv, args.need_dv, s, s.kv_heads, s.dim),
        dk_proxy(arena, p.dk_proxy, args.need_dk_proxy, s, s.proxy_kv_heads, s.proxy_dim),
        work(arena, geometry, sizes, tiling, window),
        threads(take_partials(s), kernels_for(s.dtype).backward_scratch(sizes, tiling), w.bytes) {}

  // Sets the arguments except for arrays of the workspace; returns the window size.
  int64_t plan(const BackwardParams& p, const Shapes& s) {
    args.sizes = sizes;
    args.tiling = tiling;
    args.slots = Work::slots(sizes);
    args.accumulate = Work::kAccumulate;
    const bool main = static_cast<bool>(p.dout), proxy = static_cast<bool>(p.dkl);
    args.need_dq = main && p.dq;
    args.need_dk = main && p.dk;
    args.need_dv = main && p.dv;
    args.need_dq_proxy = proxy && p.dq_proxy;
    args.need_dk_proxy = proxy && p.dk_proxy;
    args.need_kl = static_cast<bool>(p.kl);
    auto token = [](const Tensor& t) { return t ? token_tensor(t) : View{}; };
    auto row = [](const Tensor& t) { return t ? row_tensor(t) : View{}; };
    args.q = token(p.q);
    args.k = token(p.k);
    args.v = token(p.v);
    args.q_proxy = token(p.q_proxy);
    args.k_proxy = token(p.k_proxy);
    args.out = token(p.out);
    args.lse = row(p.lse);
    args.proxy_lse = row(p.proxy_lse);
    args.dout = token(p.dout);
    args.dkl = row(p.dkl);
    args.dq = token(p.dq);
    args.dq_proxy = token(p.dq_proxy);
    args.kl = row(p.kl);

    const int64_t main_part = 2 * static_cast<int64_t>(segments_per_proxy_head(sizes)) *
                              sizes.block_size * sizes.padded_dim;
    args.key_partial_size =
        main_part + static_cast<int64_t>(sizes.block_size) * sizes.padded_proxy_dim;
    const double per_slot =
        static_cast<double>(sizes.group) * sizes.padded_dim + sizes.padded_proxy_dim + 1;
    const double values =
        args.slots * per_slot + sizes.group +
        Work::partials_per_token(sizes, tiling) * static_cast<double>(args.key_partial_size);
    return window_tokens(values * static_cast<double>(value_size(s)), args.slots, s.tokens);
  }

  static size_t value_size(const Shapes& s) { return element_size(accumulation_type(s.dtype)); }

  Arena& take_partials(const Shapes& s) {
    args.dk = dk.accumulator;
    args.dv = dv.accumulator;
    args.dk_proxy = dk_proxy.accumulator;
    auto take = [&](bool needed, std::initializer_list<int64_t> extents) {
      return needed ? arena.take_bytes(extents, value_size(s)) : nullptr;
    };
    const int64_t items = window * args.slots;
    args.delta = take(args.need_dq || args.need_dk, {window, sizes.group});
    args.partial_dq = take(args.need_dq, {items, sizes.group, sizes.padded_dim});
    args.partial_dq_proxy = take(args.need_dq_proxy, {items, sizes.padded_proxy_dim});
    args.partial_kl = take(args.need_kl, {items});
    const int64_t partials = Work::kAccumulate ? 0 : items / tiling.chunk_tokens;
    args.partial_keys =
        take(args.need_dk || args.need_dv || args.need_dk_proxy, {partials, args.key_partial_size});
    return arena;
  }
};

} // namespace

template <class Work>
size_t backward_workspace_size(const BackwardParams& p, const Shapes& s) {
  return Memory<Work>(p, s, {}).arena.used();
}

template <class Work>
void backward(const BackwardParams& p, const Shapes& s, const Workspace& workspace) {
  Memory<Work> m(p, s, workspace);
  const Kernels& kernels = kernels_for(s.dtype);
  const Geometry& g = m.geometry;
  const BackwardArgs& a = m.args;
  m.geometry.build(p.problem, s);
  View indices{};
  if (p.block_indices) {
    indices = index_tensor(p.block_indices);
    check_indices(m.threads, g, indices, s);
  }

  for (const KeyGradient* key : {&m.dk, &m.dv, &m.dk_proxy}) {
    const DType dtype = key->separate ? DType::kFloat32 : s.dtype;
    zero_rows(m.threads, key->accumulator, dtype, 0, s.keys, key->heads, key->dim);
  }
  zero_rows(m.threads, a.dq, s.dtype, a.need_dq ? g.real_tokens : 0, s.tokens, s.q_heads, s.dim);
  zero_rows(m.threads, a.dq_proxy, s.dtype, a.need_dq_proxy ? g.real_tokens : 0, s.tokens,
            s.proxy_heads, s.proxy_dim);
  zero_rows(m.threads, a.kl, accumulation_type(s.dtype), g.real_tokens, s.tokens, s.proxy_heads, 1);

  constexpr int64_t kPiece = 64;
  const bool main = a.need_dq || a.need_dk || a.need_dv;
  const bool any = main || a.need_dq_proxy || a.need_dk_proxy || a.need_kl;
  Window w{};
  for (int32_t head = 0; any && head < m.sizes.proxy_heads; ++head)
    for (int64_t begin = 0; begin < g.real_tokens; begin += m.window) {
      m.work.build(&w, begin, std::min(g.real_tokens, begin + m.window), head, indices);
      m.threads.for_ranges(w.tokens, kPiece, [&](int64_t from, int64_t to) {
        const auto first = static_cast<int32_t>(from), last = static_cast<int32_t>(to);
        if (a.delta)
          kernels.backward_delta(a, w, first, last);
        if (Work::kAccumulate)
          kernels.backward_reset(a, w, first, last);
      });
      m.threads.for_each(m.work.task_count(), [&](int64_t task, void* scratch) {
        m.work.for_each_chunk(task, [&](const Chunk& c) { kernels.backward(a, w, c, scratch); });
      });
      m.threads.for_each(a.partial_keys ? m.work.reduce_count() : 0, [&](int64_t i, void*) {
        m.work.for_each_partial(i, [&](const Chunk& c) { kernels.backward_reduce(a, w, c); });
      });
      m.threads.for_ranges(w.tokens, kPiece, [&](int64_t from, int64_t to) {
        kernels.backward_combine(a, w, static_cast<int32_t>(from), static_cast<int32_t>(to));
      });
    }

  for (const KeyGradient* key : {&m.dk, &m.dv, &m.dk_proxy}) {
    if (!key->separate)
      continue;
    m.threads.for_ranges(s.keys, 1024, [&](int64_t from, int64_t to) {
      kernels.store_rows(key->output, key->accumulator, from, to, key->heads, key->dim);
    });
  }
}

template size_t backward_workspace_size<SparseWork>(const BackwardParams&, const Shapes&);
template size_t backward_workspace_size<DenseWork>(const BackwardParams&, const Shapes&);
template void backward<SparseWork>(const BackwardParams&, const Shapes&, const Workspace&);
template void backward<DenseWork>(const BackwardParams&, const Shapes&, const Workspace&);

size_t sparse_backward_workspace_size(const BackwardParams& p, const Shapes& s, const Device&) {
  return backward_workspace_size<SparseWork>(p, s);
}
void sparse_backward(const BackwardParams& p, const Shapes& s, const Workspace& w, const Device&) {
  backward<SparseWork>(p, s, w);
}

namespace {

BackwardParams only_kl(const KlParams& p) {
  BackwardParams b{};
  b.problem = p.problem;
  b.q = p.q;
  b.k = p.k;
  b.q_proxy = p.q_proxy;
  b.k_proxy = p.k_proxy;
  b.block_indices = p.block_indices;
  b.lse = p.lse;
  b.proxy_lse = p.proxy_lse;
  b.kl = p.kl;
  return b;
}

} // namespace

size_t proxy_kl_workspace_size(const KlParams& p, const Shapes& s, const Device&) {
  return p.block_indices ? backward_workspace_size<SparseWork>(only_kl(p), s)
                         : backward_workspace_size<DenseWork>(only_kl(p), s);
}
void proxy_kl(const KlParams& p, const Shapes& s, const Workspace& w, const Device&) {
  p.block_indices ? backward<SparseWork>(only_kl(p), s, w) : backward<DenseWork>(only_kl(p), s, w);
}

} // namespace thresher::cpu
