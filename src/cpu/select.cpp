// Driver of the selection: tiles of (token, proxy head) rows that share a key head.
#include "core/backend.h"
#include "cpu/dispatch.h"
#include "cpu/geometry.h"
#include "cpu/threads.h"

namespace thresher::cpu {
namespace {

SelectArgs args_of(const SelectParams& p, const Shapes& s) {
  SelectArgs a{};
  Shapes shapes = s;
  shapes.q_heads = s.proxy_heads; // no main heads in a selection
  a.sizes = sizes_of(p.problem, shapes);
  a.q_proxy = token_tensor(p.q_proxy);
  a.k_proxy = token_tensor(p.k_proxy);
  a.indices = index_tensor(p.block_indices);
  a.init_blocks = p.problem.init_blocks;
  a.local_blocks = p.problem.local_blocks;
  return a;
}

struct Memory {
  Arena arena;
  SelectArgs args;
  Geometry geometry;
  int64_t* first_tile; // [runs + 1], of each run for one key head
  Threads threads;

  Memory(const SelectParams& p, const Shapes& s, const Workspace& w)
      : arena(w.data), args(args_of(p, s)), geometry(arena, p.problem, s),
        first_tile(arena.take<int64_t>(fragment_count(p.problem, s) + 1)),
        threads(arena, kernels_for(s.dtype).select_scratch(args), w.bytes) {}
};

} // namespace

size_t select_blocks_workspace_size(const SelectParams& p, const Shapes& s, const Device&) {
  return Memory(p, s, {}).arena.used();
}

void select_blocks(const SelectParams& p, const Shapes& s, const Workspace& workspace,
                   const Device&) {
  Memory m(p, s, workspace);
  const Kernels& kernels = kernels_for(s.dtype);
  const Geometry& g = m.geometry;
  m.geometry.build(p.problem, s);

  const int64_t heads = s.proxy_heads / s.proxy_kv_heads;
  m.first_tile[0] = 0;
  for (int64_t r = 0; r < g.run_count; ++r)
    m.first_tile[r + 1] =
        m.first_tile[r] + (g.runs[r].q_len * heads + kSelectRows - 1) / kSelectRows;
  const int64_t tiles = m.first_tile[g.run_count];

  m.threads.for_each(tiles * s.proxy_kv_heads, [&](int64_t i, void* scratch) {
    // Late tiles see most keys: they go first, so that no thread ends with a long one.
    const int64_t index = tiles - 1 - i / s.proxy_kv_heads;
    const int64_t* run = std::upper_bound(m.first_tile, m.first_tile + g.run_count + 1, index) - 1;
    SelectTile tile{};
    tile.run = g.runs[run - m.first_tile];
    if (tile.run.document >= 0)
      tile.document = g.documents[tile.run.document];
    tile.first_row = (index - *run) * kSelectRows;
    tile.rows = static_cast<int32_t>(
        std::min<int64_t>(kSelectRows, tile.run.q_len * heads - tile.first_row));
    tile.proxy_kv_head = static_cast<int32_t>(i % s.proxy_kv_heads);
    kernels.select(m.args, tile, scratch);
  });

  m.threads.for_ranges(s.tokens - g.real_tokens, 4096, [&](int64_t begin, int64_t end) {
    const View& v = m.args.indices;
    for (int64_t t = g.real_tokens + begin; t < g.real_tokens + end; ++t)
      for (int64_t h = 0; h < s.proxy_heads; ++h)
        std::fill_n(static_cast<int32_t*>(v.data) + t / v.per_row * v.batch +
                        t % v.per_row * v.token + h * v.head,
                    s.top_k, -1);
  });
}

} // namespace thresher::cpu
