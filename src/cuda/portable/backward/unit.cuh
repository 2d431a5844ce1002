// Work units: what part of an item a CTA works on, and who else adds to the same gradients.
#pragma once

#include "cuda/portable/backward/config.h"
#include "cuda/portable/forward/heads.h"

namespace thresher::cuda::portable::backward {

// The main heads that proxy head `proxy_head` shares with one kv head, cut into chunks: part number
// -> heads. A proxy head may span several kv heads, nested or not.
struct HeadRange {
  int32_t kv_head = 0, first = 0, count = 0; // count 0: no such part
};

THRESHER_HOST_DEVICE HeadRange head_range(int32_t q_heads, int32_t kv_heads, int32_t proxy_heads,
                                          int32_t chunks, int32_t max_heads, int32_t proxy_head,
                                          int32_t part) {
  const forward::HeadSpan span =
      forward::head_span(q_heads, kv_heads, proxy_heads, proxy_head, part / chunks);
  const int32_t skipped = part % chunks * max_heads, left = span.count - skipped;
  HeadRange range;
  range.kv_head = span.kv_head;
  range.first = span.first + skipped;
  range.count = left < 0 ? 0 : left < max_heads ? left : max_heads;
  return range;
}

// Proxy heads [first, first + count) whose main heads include some of an owner's (a kv head's).
struct ProxyRange {
  int32_t first, count;
};
THRESHER_HOST_DEVICE ProxyRange proxies_of(int32_t q_heads, int32_t owners, int32_t proxy_heads,
                                           int32_t owner) {
  const int32_t group = q_heads / proxy_heads, per_owner = q_heads / owners;
  const int32_t first = owner * per_owner / group;
  return {first, ((owner + 1) * per_owner - 1) / group - first + 1};
}

struct Unit {
  int32_t proxy_head, part;     // part: group of heads
  int32_t key_head;             // kv head, or proxy key head
  int32_t first_head, heads;    // query heads that stream past; heads 0: nothing to do
  int32_t key_begin, key_count; // key rows of the unit; key_count may be 0
  int32_t position;             // of its first key in the document
  int32_t key_tile, key_offset; // which part of the block, its first key in the block
  int32_t row;                  // block row
  int32_t count;                // tokens that stream past
  const Entry* entries;         // null: consecutive tokens
  int32_t first_token;          // of the pass: what entries count from, or the first of all
  int32_t slot;                 // dense lists: slot of all tokens
  int64_t first_pair;           // of the pass
  int32_t turn, turn_counter;   // units that add to dK, dV before
  bool only_owner;              // nobody else adds to dK, dV
};

// Reads what unit `ticket` works on; false: no work left. kProxy: for the proxy's gradients.
template <int kKeys, bool kProxy>
__device__ __forceinline__ bool take_unit(const WorkParams& p, int32_t ticket, int32_t parts,
                                          Unit& unit) {
  const BlockIndex& index = p.index;
  const int32_t units = parts * p.key_tiles, within = ticket % units;
  const int32_t number = (p.pass.first_item ? __ldg(p.pass.first_item) : 0) + ticket / units;
  if (number >= __ldg(p.pass.last_item))
    return false;
  const WorkItem item = index.items[number];
  unit.proxy_head = item.proxy_head;
  unit.part = within / p.key_tiles;
  unit.key_tile = within - unit.part * p.key_tiles;
  unit.key_offset = unit.key_tile * kKeys;
  unit.key_begin = item.key_begin + unit.key_offset;
  unit.key_count = max(0, min(kKeys, item.key_count - unit.key_offset));
  unit.position = item.block_begin + unit.key_offset;
  unit.row = item.row;
  unit.count = item.entry_count;
  unit.first_token = item.window * index.window_tokens - p.pass.first_token;
  if (p.pair_begin) {
    unit.entries = nullptr;
    unit.first_token += static_cast<int32_t>(item.entry_begin);
    unit.first_pair = p.pair_begin[number];
    unit.slot = item.block_begin / index.block_size;
  } else {
    unit.entries = index.item_entries(item);
    unit.slot = 0;
    // Segments of the pass lie one after the other.
    const int64_t segment =
        static_cast<int64_t>(item.window - p.pass.first_token / index.window_tokens) *
            index.proxy_heads +
        item.proxy_head;
    unit.first_pair = segment * index.window_tokens * index.top_k + item.entry_begin;
  }
  unit.turn = unit.turn_counter = 0;
  if (p.turns && p.pair_begin) {
    unit.turn = ticket; // one order for all
  } else if (p.turns) {
    const int32_t group = item.proxy_head / p.turn_group;
    unit.turn_counter = group * index.rows + item.row;
    const int2 order = index.order[number];
    unit.turn = (kProxy ? order.y : order.x) * units + within;
  }
  return true;
}

// Whether the items of proxy heads [first, first + count) are one.
__device__ __forceinline__ bool is_only_owner(const WorkParams& p, int32_t row, int32_t first,
                                              int32_t count) {
  return !p.always_accumulate && p.index.items_of(row, first, count) == 1;
}

// Waits until all earlier units of the row have added theirs. Units are taken in list order, so
// whoever is waited for is at work. Called by all threads.
__device__ __forceinline__ void wait_for_turn(const int32_t* turns, int32_t counter, int32_t turn) {
  if (threadIdx.x == 0)
    while (ptx::load_acquire(turns + counter) != turn)
      ;
  __syncthreads();
}
__device__ __forceinline__ void pass_turn(int32_t* turns, int32_t counter, int32_t turn) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0)
    ptx::store_release(turns + counter, turn + 1);
}

// Accumulators keep, of 16 columns, the four that a lane holds of an mma pair side by side: 16
// bytes for one vector reduction. Place of column c in its group of 16:
THRESHER_HOST_DEVICE constexpr int permuted_column(int c) {
  return (c & 7) / 2 * 4 + (c >> 3) * 2 + (c & 1);
}

} // namespace thresher::cuda::portable::backward
