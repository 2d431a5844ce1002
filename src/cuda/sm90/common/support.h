// Which problems the Hopper KV-major kernels take; the others go to the portable ones.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/index/index.h"

#include "core/shapes.h"

#include <algorithm>
#include <cstdint>
#include <string>

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

// Why the KV-major kernels do not take a problem; empty if they do.
inline std::string refuses_attention(const Shapes& s, const DeviceFacts& device) {
  if (device.major != 9)
    return "needs compute capability 9.0";
  if (s.keys == 0)
    return "needs a key"; // bulk copies have no descriptor of nothing
  if (s.dim != 128 || s.block_size != 128)
    return "needs head dimension 128 and block size 128";
  const int rows = rows_per_token(s); // kHeads of the kernels that exist
  if (rows != 4 && rows != 8 && rows != 16)
    return "needs 4, 8 or 16 main heads on one (proxy head, kv head)";
  return "";
}
inline bool has_proxy_kernel(const Shapes& s) {
  return s.proxy_dim == 64 || s.proxy_dim == 128;
}
inline constexpr const char* kProxyDims = "needs a proxy head dimension of 64 or 128";
inline constexpr const char* kUnproven =
    "has not run on a GPU yet; build with -DTHRESHER_UNPROVEN=ON to try it";
inline constexpr const char* kStrides = "needs positive 16-byte strides";

// Work items of the KV-major kernels. 64 tiles of rows: a block's keys, and what is flushed at the
// item's end, then cost little beside its rows; fewer where that would leave SMs idle at the end.
inline IndexOptions index_options(const Shapes& s, int tile_rows) {
  IndexOptions options;
  options.window_tokens = suggested_window(s);
  const int tokens = tile_rows / rows_per_token(s); // of a tile
  const int64_t items = int64_t{16} * device_facts().sm_count;
  options.max_entries = static_cast<int32_t>(
      std::clamp<int64_t>(s.tokens * s.proxy_heads * s.top_k / items, 32 * tokens, 64 * tokens));
  return options;
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
