// Work units: what part of a work item a CTA takes next, and the shared memory that holds it.
#pragma once

#include "cuda/portable/forward/config.h"
#include "cuda/portable/forward/heads.h"

namespace thresher::cuda::portable::forward {

struct Unit {
  int32_t heads; // query heads, from first_head on; 0: no work is left
  int32_t first_head, kv_head;
  int32_t key_begin, key_count; // key rows of the unit; key_count may be 0
  int32_t position;             // of its first key in the document
  int32_t key_tile;
  int32_t first_token; // of the window, in the pass
  int32_t entry_count;
  const Entry* entries;
  int32_t entry_step, head_step; // from a row to the one kWarps tiles on
};

template <class C>
struct PartialShared {
  alignas(128) uint8_t k[C::kBlockTileBytes];
  alignas(128) uint8_t v[C::kValues ? C::kBlockTileBytes : 128];
  alignas(128) uint8_t q[C::kWarps][C::kRowTileBytes];
  uint32_t bad_values[(C::kKeys + 31) / 32]; // keys whose V row is not finite, one bit each
  Unit units[2];                             // being worked on, next
};

// Called by one thread.
template <class C, class T>
__device__ __forceinline__ void take_unit(const PartialParams<T>& p, Unit& unit) {
  const BlockIndex& index = p.index;
  const int32_t units = p.parts * p.key_tiles;
  const int32_t first_item = __ldg(index.segment_items + p.first_segment);
  const int32_t end_item = __ldg(index.segment_items + p.last_segment);
  int32_t ticket, number;
  HeadSpan span;
  WorkItem item;
  do { // a proxy head may be on fewer kv heads than others
    ticket = atomicAdd(p.ticket, 1);
    number = first_item + ticket / units;
    if (number >= end_item) {
      unit.heads = 0;
      return;
    }
    item = index.items[number];
    span = head_span(p.q_heads, p.kv_heads, index.proxy_heads, item.proxy_head,
                     ticket % units / p.key_tiles);
  } while (span.count == 0);
  unit.heads = span.count;
  unit.first_head = span.first;
  unit.kv_head = span.kv_head;
  unit.key_tile = ticket % p.key_tiles;
  const int32_t offset = unit.key_tile * C::kKeys;
  unit.key_begin = item.key_begin + offset;
  unit.key_count = max(0, min(C::kKeys, item.key_count - offset));
  unit.position = item.block_begin + offset;
  unit.first_token = item.window * index.window_tokens - p.first_token;
  unit.entry_count = item.entry_count;
  unit.entries = index.item_entries(item);
  constexpr int kStep = C::kWarps * C::kRows;
  unit.entry_step = kStep / span.count;
  unit.head_step = kStep - unit.entry_step * span.count;
}

} // namespace thresher::cuda::portable::forward
