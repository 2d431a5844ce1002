// Driver of the forward: windows of query tokens, one proxy head at a time. Work is SparseWork
// (selected blocks) or DenseWork (warm-up).
#include "cpu/passes.h"

#include "core/backend.h"
#include "cpu/call.h"
#include "cpu/check.h"
#include "cpu/dispatch.h"
#include "cpu/work.h"

namespace thresher::cpu {
namespace {

template <class Work>
struct Memory {
  Arena arena;
  Sizes sizes;
  Tiling tiling;
  AttendArgs args{};
  Geometry geometry;
  int64_t window;
  Work work;
  Threads threads;

  Memory(const ForwardParams& p, const Shapes& s, const Workspace& w)
      : arena(w.data), sizes(sizes_of(p.problem, s)), tiling(tiling_of(sizes)),
        geometry(arena, p.problem, s), window(window_of(s)),
        work(arena, geometry, sizes, tiling, window),
        threads(take_partials(p, s),
                kernels_for(s.dtype).attend_scratch(sizes, tiling, Work::slots(sizes)), w.bytes) {}

  int64_t window_of(const Shapes& s) const {
    const double per_slot = static_cast<double>(sizes.group) * (sizes.padded_dim + 2) + 2;
    const double size = static_cast<double>(element_size(accumulation_type(s.dtype)));
    return window_tokens(Work::slots(sizes) * per_slot * size, Work::slots(sizes), s.tokens);
  }

  Arena& take_partials(const ForwardParams& p, const Shapes& s) {
    const auto size = static_cast<int64_t>(element_size(accumulation_type(s.dtype)));
    args.sizes = sizes;
    args.tiling = tiling;
    args.slots = Work::slots(sizes);
    args.accumulate = Work::kAccumulate;
    args.q = token_tensor(p.q);
    args.k = token_tensor(p.k);
    args.v = token_tensor(p.v);
    args.out = token_tensor(p.out);
    args.lse = row_tensor(p.lse);
    args.proxy = static_cast<bool>(p.proxy_lse);
    if (args.proxy) {
      args.q_proxy = token_tensor(p.q_proxy);
      args.k_proxy = token_tensor(p.k_proxy);
      args.proxy_lse = row_tensor(p.proxy_lse);
    }
    const int64_t items = window * args.slots;
    args.partial_out = arena.take_bytes({items, sizes.group, sizes.padded_dim}, size);
    args.partial_max = arena.take_bytes({items, sizes.group}, size);
    args.partial_sum = arena.take_bytes({items, sizes.group}, size);
    args.partial_proxy_max = arena.take_bytes({items}, size);
    args.partial_proxy_sum = arena.take_bytes({items}, size);
    return arena;
  }
};

} // namespace

template <class Work>
size_t forward_workspace_size(const ForwardParams& p, const Shapes& s) {
  return Memory<Work>(p, s, {}).arena.used();
}

template <class Work>
void forward(const ForwardParams& p, const Shapes& s, const Workspace& workspace) {
  Memory<Work> m(p, s, workspace);
  const Kernels& kernels = kernels_for(s.dtype);
  const Geometry& g = m.geometry;
  m.geometry.build(p.problem, s);
  View indices{};
  if (p.block_indices) {
    indices = index_tensor(p.block_indices);
    check_indices(m.threads, g, indices, s);
  }

  constexpr int64_t kPiece = 64;
  Window w{};
  for (int32_t head = 0; head < m.sizes.proxy_heads; ++head)
    for (int64_t begin = 0; begin < g.real_tokens; begin += m.window) {
      m.work.build(&w, begin, std::min(g.real_tokens, begin + m.window), head, indices);
      if (Work::kAccumulate)
        m.threads.for_ranges(w.tokens, kPiece, [&](int64_t from, int64_t to) {
          kernels.attend_reset(m.args, w, static_cast<int32_t>(from), static_cast<int32_t>(to));
        });
      m.threads.for_each(m.work.task_count(), [&](int64_t task, void* scratch) {
        m.work.for_each_chunk(task, [&](const Chunk& c) { kernels.attend(m.args, w, c, scratch); });
      });
      m.threads.for_ranges(w.tokens, kPiece, [&](int64_t from, int64_t to, void* scratch) {
        kernels.attend_combine(m.args, w, static_cast<int32_t>(from), static_cast<int32_t>(to),
                               scratch);
      });
    }

  zero_rows(m.threads, m.args.out, s.dtype, g.real_tokens, s.tokens, s.q_heads, s.dim);
  fill_lse(m.args.lse, s.dtype, g.real_tokens, s.tokens, s.q_heads);
  if (m.args.proxy)
    fill_lse(m.args.proxy_lse, s.dtype, g.real_tokens, s.tokens, s.proxy_heads);
}

template size_t forward_workspace_size<SparseWork>(const ForwardParams&, const Shapes&);
template size_t forward_workspace_size<DenseWork>(const ForwardParams&, const Shapes&);
template void forward<SparseWork>(const ForwardParams&, const Shapes&, const Workspace&);
template void forward<DenseWork>(const ForwardParams&, const Shapes&, const Workspace&);

size_t sparse_forward_workspace_size(const ForwardParams& p, const Shapes& s, const Device&) {
  return forward_workspace_size<SparseWork>(p, s);
}
void sparse_forward(const ForwardParams& p, const Shapes& s, const Workspace& w, const Device&) {
  forward<SparseWork>(p, s, w);
}

} // namespace thresher::cpu
