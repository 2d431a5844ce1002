#include "cuda/index/index.h"

#include "cuda/common/launch.h"
#include "cuda/index/lists.h"
#include "cuda/index/tokens.h"

#include <algorithm>

namespace thresher::cuda {
namespace {

// Most items that a batch of these shapes can have: one a nonempty list, and the extra pieces of
// lists that are cut.
int64_t item_bound(const Problem& problem, const BlockIndex& index, int64_t fragments) {
  const int64_t window_entries = static_cast<int64_t>(index.window_tokens) * index.top_k;
  const bool own_keys = problem.fragments.k_begin || problem.fragments.k_len;
  int64_t lists = own_keys ? 0 : fragments;
  for (int64_t window = 0; window < index.windows; ++window) {
    // Keys stored like the queries: the window sees whole blocks of the keys up to its end, and
    // one partial block a document; documents that end in it were counted above.
    const int64_t visible =
        own_keys ? index.rows : (window + 1) * index.window_tokens / index.block_size + 2;
    lists += std::min(window_entries, visible);
  }
  const int64_t entries = static_cast<int64_t>(index.tokens) * index.top_k;
  const int64_t pieces = 2 * ceil_div<int64_t>(entries, index.max_entries);
  return index.proxy_heads * (std::min(lists, entries) + pieces);
}

// CTAs a segment: few segments leave SMs idle. All rows must fit in shared memory at once, and a
// part should be worth its start.
int32_t part_count(const BlockIndex& index, int64_t segments) {
  constexpr int64_t kWantedParts = 264; // two CTAs for each of 132 SMs
  constexpr int32_t kMostParts = 16, kLeastTokens = 64;
  if (index.rows > kIndexRowTile)
    return 1;
  return static_cast<int32_t>(std::clamp<int64_t>(
      kWantedParts / std::max<int64_t>(segments, 1), 1,
      std::clamp<int32_t>(std::min(index.window_tokens, index.tokens) / kLeastTokens, 1,
                          kMostParts)));
}

} // namespace

int32_t heads_sharing(int32_t proxy_heads, int32_t owners) {
  if (owners > 0 && proxy_heads % owners == 0)
    return proxy_heads / owners;
  if (owners > 0 && owners % proxy_heads == 0)
    return 1;
  return proxy_heads; // groups cross the borders of owners: one order for all
}

int32_t suggested_window(const Shapes& shapes) {
  int32_t window = 2048;
  while (window < 8192 && shapes.tokens >= int64_t{16} * window)
    window *= 2;
  return window;
}

BlockIndex carve_index(const Problem& problem, const Shapes& shapes, const IndexOptions& options,
                       WorkspaceCarver& workspace) {
  const int64_t fragments = fragment_count(problem, shapes);
  const bool own_keys = problem.fragments.k_begin || problem.fragments.k_len;
  BlockIndex index;
  index.tokens = static_cast<int32_t>(shapes.tokens);
  index.keys = static_cast<int32_t>(shapes.keys);
  index.proxy_heads = shapes.proxy_heads;
  index.top_k = shapes.top_k;
  index.block_size = shapes.block_size;
  index.window_tokens = options.window_tokens;
  index.windows = ceil_div(index.tokens, index.window_tokens);
  // A segment must not be cut into more pieces than its 16-bit class counts hold.
  const int64_t window_entries = static_cast<int64_t>(index.window_tokens) * index.top_k;
  index.max_entries = static_cast<int32_t>(
      std::max<int64_t>(options.max_entries, ceil_div<int64_t>(window_entries, 16384)));
  const int64_t rows = shapes.keys / shapes.block_size + fragments + 1;
  index.rows = static_cast<int32_t>(rows);
  const int64_t segments = static_cast<int64_t>(index.windows) * index.proxy_heads;
  const int64_t max_items = item_bound(problem, index, fragments);
  if (max_items >= (int64_t{1} << 30) || rows * index.proxy_heads >= (int64_t{1} << 40))
    throw Error(ErrorCode::kNotSupported, "block_indices",
                "the reverse index of " + std::to_string(shapes.tokens) + " tokens with " +
                    std::to_string(index.proxy_heads) + " proxy heads has more than 2^30 items");
  index.max_items = static_cast<int32_t>(max_items);

  IndexScratch& scratch = index.scratch;
  scratch.parts = part_count(index, segments);
  scratch.part_tokens = ceil_div(std::min(index.window_tokens, index.tokens), scratch.parts);
  const size_t cleared_from = workspace.bytes();
  index.row_items = workspace.take<int32_t>(index.proxy_heads * rows);
  index.block_rows = workspace.take<BlockRow>(rows);
  index.key_row = workspace.take<int32_t>(index.keys);
  scratch.ticket = workspace.take<int32_t>(1);
  scratch.segment_state = workspace.take<uint32_t>(segments);
  if (scratch.parts > 1)
    scratch.part_ready = workspace.take<int32_t>(segments * scratch.parts);
  if (own_keys)
    scratch.key_starts = workspace.take<uint32_t>(index.keys / 32 + 1);
  if (options.ordered)
    scratch.turns = workspace.take<int32_t>(2 * index.proxy_heads * rows);
  scratch.cleared = reinterpret_cast<char*>(index.row_items);
  scratch.cleared_bytes = workspace.bytes() - cleared_from;

  index.position = workspace.take<int32_t>(index.tokens);
  index.row_base = workspace.take<int32_t>(index.tokens);
  index.slot_count =
      workspace.take<uint8_t>(static_cast<int64_t>(index.proxy_heads) * index.tokens);
  if (own_keys)
    scratch.fragment_row = workspace.take<int32_t>(fragments);
  if (scratch.parts > 1)
    scratch.part_counts = workspace.take<int32_t>(segments * scratch.parts * rows);
  index.segment_items = workspace.take<int32_t>(segments + 1);
  index.entries = workspace.take<Entry>(segments * window_entries);
  index.items = workspace.take<WorkItem>(max_items);
  if (options.ordered) {
    index.order = workspace.take<int2>(max_items);
    scratch.pieces = workspace.take<int2>(max_items);
  }
  return index;
}

void build_index(const BlockIndex& index, const Problem& problem, const Shapes& shapes,
                 const Tensor& block_indices, cudaStream_t stream) {
  check(cudaMemsetAsync(index.scratch.cleared, 0, index.scratch.cleared_bytes, stream),
        "clear index");
  const Geometry geometry = make_geometry(problem, shapes);
  describe_tokens(index, geometry, stream);
  build_lists(index, block_ids_view<const int32_t>(block_indices), stream);
  if (index.order)
    order_items(index, heads_sharing(shapes.proxy_heads, shapes.kv_heads),
                heads_sharing(shapes.proxy_heads, shapes.proxy_kv_heads), stream);
}

} // namespace thresher::cuda
