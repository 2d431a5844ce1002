// Which problems the Hopper KV-major kernels take; the others go to the portable ones.
#pragma once

#include "core/shapes.h"

#include <algorithm>
#include <cstdint>

namespace thresher::cuda::sm90 {

// Rows a token on one (proxy head, kv head); 0 when the heads do not nest.
inline int rows_per_token(const Shapes& s) {
  const int finer = std::max(s.proxy_heads, s.kv_heads);
  const int coarser = std::min(s.proxy_heads, s.kv_heads);
  return finer % coarser == 0 ? s.q_heads / finer : 0;
}

// Bulk tensor copies want 16-byte strides below 2^40.
inline bool strides_fit(const Tensor& t) {
  for (int axis = 0; axis + 1 < t.rank; ++axis)
    if (t.shape[axis] > 1 &&
        (t.stride[axis] <= 0 || t.stride[axis] % 8 != 0 || t.stride[axis] >= (int64_t(1) << 38)))
      return false;
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

// kHeads of the kernels that exist.
inline bool has_row_kernel(int rows) {
  return rows == 4 || rows == 8 || rows == 16;
}

template <class F>
void with_heads(int heads, F&& f) {
  if (heads == 16)
    f.template operator()<16>();
  else if (heads == 8)
    f.template operator()<8>();
  else
    f.template operator()<4>();
}

} // namespace thresher::cuda::sm90
