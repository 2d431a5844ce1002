// The reverse index: which tokens chose a block. Built on the device from block_indices, without a
// host synchronisation, the same bits from run to run.
//
// Lists. Queries are cut into windows of `window_tokens` packed tokens. For every (window, proxy
// head, block row) there is one list of entries, ascending by token. An id that is negative, of a
// later block, out of range, or a repetition of an earlier slot of its row has no entry. The other
// ids of a (proxy head, token) are numbered 0 .. slot_count - 1 in slot order: the entry carries
// that number, so partial results need no second look at block_indices.
//
// Block rows number the blocks of all documents: row = k_begin / B + (documents before) + block.
// Rows are unique, and there are fewer than Tk / B + fragments + 1 of them; some stay empty.
//
// Work items cut the lists into pieces of at most `max_entries`. They are stored segment by
// segment, segment = window * Hp + proxy head, longest first within a segment. Kernels launch a
// grid that depends on shapes alone, read the number of items on the device and take items in
// order, so that one window and head is worked on at a time (its Q, partials or dQ stay in L2).
#pragma once

#include "cuda/common/workspace.h"
#include "cuda/index/geometry.h"

#include <cuda_runtime_api.h>

namespace thresher::cuda {

struct WorkItem { // 32 bytes: two 16-byte loads
  int32_t proxy_head;
  int32_t window;
  int32_t row;          // block row
  int32_t block_begin;  // position of the block's first key in its document (block id * B)
  int32_t key_begin;    // key row of the block's first key
  int32_t key_count;    // keys of the block that exist in the document, 1 .. B
  uint32_t entry_begin; // within the segment
  int32_t entry_count;  // 1 .. max_entries
};
static_assert(sizeof(WorkItem) == 32);

// One (token, slot) of a list: slot in the top 8 bits (K <= 128), token minus the window's first
// token below.
using Entry = uint32_t;
inline constexpr int kEntryTokenBits = 24;

struct IndexOptions {
  int32_t window_tokens = 4096; // <= 2^24; see suggested_window()
  int32_t max_entries = 1024;   // longest work item
  bool ordered = false;         // fill `order` (deterministic accumulation)
};

// Where the keys of a block row lie. All zero: no such block.
struct BlockRow {
  int32_t key_begin;   // key row of the block's first key
  int32_t key_count;   // keys of the block that exist in the document, 1 .. B
  int32_t block_begin; // position of the block's first key in its document
  int32_t unused;
};

inline constexpr int kIndexRowTile = 4096; // block rows that a CTA counts at a time

// What only build_index uses.
struct IndexScratch {
  // A window and head is the work of this many CTAs, each with part_tokens of its tokens.
  int32_t parts = 1, part_tokens = 0;
  char* cleared = nullptr; // start of what must be zero before the first kernel
  size_t cleared_bytes = 0;
  int32_t* ticket = nullptr;         // [1] next part of a segment to build
  uint32_t* segment_state = nullptr; // [windows * Hp] items so far, for the look-back
  int32_t* part_ready = nullptr;     // [windows * Hp, parts] counts are there; only if parts > 1
  int32_t* part_counts = nullptr;    // [windows * Hp, parts, rows]; only if parts > 1
  uint32_t* key_starts = nullptr;    // [Tk / 32 + 1] one bit a document start; only with k_begin
  int32_t* fragment_row = nullptr;   // [fragments] block row of block 0; only with k_begin or k_len
  int2* pieces = nullptr;            // [max_items] {piece, pieces} of the list; only if ordered
  int32_t* turns = nullptr;          // [2, Hp, rows] counters behind `order`; only if ordered
};

// Passed to kernels by value.
struct BlockIndex {
  int32_t tokens = 0, keys = 0, proxy_heads = 0, top_k = 0, block_size = 0;
  int32_t window_tokens = 0, windows = 0, max_entries = 0;
  int32_t rows = 0;                 // block rows
  int32_t max_items = 0;            // bound from shapes: sizes queues
  int32_t* position = nullptr;      // [T] position in the document; -1: padding or no visible key
  int32_t* row_base = nullptr;      // [T] block row of block 0 of the token's document
  uint8_t* slot_count = nullptr;    // [Hp, T] valid ids of the token, 0 .. K
  BlockRow* block_rows = nullptr;   // [rows]
  int32_t* key_row = nullptr;       // [Tk] block row + 1 of a key row; 0: key of no document
  int32_t* row_items = nullptr;     // [Hp, rows] work items of the row, all windows together
  Entry* entries = nullptr;         // [windows * Hp][window_tokens * K]
  int32_t* segment_items = nullptr; // [windows * Hp + 1] first item of a segment; last: item count
  WorkItem* items = nullptr;        // [max_items]
  // With IndexOptions::ordered: rank of the item, in list order, among the items that add to the
  // same dK/dV rows (x: same kv head) and to the same dK_proxy rows (y: same proxy key head).
  // Waiting for one's turn cannot deadlock when items are taken in list order.
  int2* order = nullptr; // [max_items]
  // Kernels that build or read this index do nothing where it points at zero; null: they always
  // work.
  const int32_t* gate = nullptr;
  IndexScratch scratch;

#if defined(__CUDACC__)
  __device__ __forceinline__ bool idle() const { return gate && *gate == 0; }
  __device__ __forceinline__ int32_t item_count() const {
    return __ldg(segment_items + windows * proxy_heads);
  }
  // Entries of an item, ascending by token.
  __device__ __forceinline__ const Entry* item_entries(const WorkItem& item) const {
    const int64_t segment = static_cast<int64_t>(item.window) * proxy_heads + item.proxy_head;
    return entries + segment * window_tokens * top_k + item.entry_begin;
  }
  static __device__ __forceinline__ int32_t entry_slot(Entry entry) {
    return static_cast<int32_t>(entry >> kEntryTokenBits);
  }
  static __device__ __forceinline__ int32_t entry_offset(Entry entry) { // token within the window
    return static_cast<int32_t>(entry & ((1u << kEntryTokenBits) - 1));
  }
  __device__ __forceinline__ int32_t entry_token(const WorkItem& item, Entry entry) const {
    return item.window * window_tokens + entry_offset(entry);
  }
  // Work items that add to a block row through proxy heads [first, first + count): 0: its gradient
  // rows must be written as zeros; 1: the only item may store them directly; more: accumulate.
  __device__ __forceinline__ int32_t items_of(int32_t row, int32_t first, int32_t count) const {
    int32_t sum = 0;
    for (int32_t head = first; head < first + count; ++head)
      sum += __ldg(row_items + static_cast<int64_t>(head) * rows + row);
    return sum;
  }
#endif
};

// Window that keeps a head's rows of a window in L2 and the index kernels parallel. A function of
// shapes alone.
int32_t suggested_window(const Shapes& shapes);

// Proxy heads, one after the other, whose items add to the accumulators of one owner (kv head or
// proxy key head); all of them when groups cross the borders of owners. `order` counts within them.
int32_t heads_sharing(int32_t proxy_heads, int32_t owners);

// Takes the index's arrays out of the workspace (or measures them) and fills in the sizes.
BlockIndex carve_index(const Problem& problem, const Shapes& shapes, const IndexOptions& options,
                       WorkspaceCarver& workspace);

// Enqueues the kernels that fill it: a clear and two kernels, one more each with k_begin or k_len
// given and if ordered.
void build_index(const BlockIndex& index, const Problem& problem, const Shapes& shapes,
                 const Tensor& block_indices, cudaStream_t stream);

} // namespace thresher::cuda
