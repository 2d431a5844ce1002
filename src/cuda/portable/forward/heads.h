// Head maps that need not nest: a proxy head's query heads may lie on several kv heads.
#pragma once

#include "cuda/common/view.h"

namespace thresher::cuda::portable::forward {

// Query heads that a proxy head and one kv head share.
struct HeadSpan {
  int32_t kv_head, first, count;
};

// The `part`-th kv head of a proxy head; count 0: it has fewer.
THRESHER_HOST_DEVICE HeadSpan head_span(int32_t q_heads, int32_t kv_heads, int32_t proxy_heads,
                                        int32_t proxy_head, int32_t part) {
  const int32_t group = q_heads / proxy_heads, per_kv = q_heads / kv_heads;
  const int32_t begin = proxy_head * group, end = begin + group;
  HeadSpan span;
  span.kv_head = begin / per_kv + part;
  const int32_t from = span.kv_head * per_kv, to = from + per_kv;
  span.first = begin > from ? begin : from;
  const int32_t last = end < to ? end : to;
  span.count = last > span.first ? last - span.first : 0;
  return span;
}

// Most kv heads that a proxy head has.
inline int32_t most_parts(int32_t q_heads, int32_t kv_heads, int32_t proxy_heads) {
  int32_t most = 1;
  for (int32_t head = 0; head < proxy_heads; ++head) {
    int32_t parts = 0;
    while (head_span(q_heads, kv_heads, proxy_heads, head, parts).count > 0)
      ++parts;
    most = parts > most ? parts : most;
  }
  return most;
}

} // namespace thresher::cuda::portable::forward
