// The batch as kernels see it: fragments (runs of consecutive queries of one document) and what can
// be derived from them without a scan. See include/thresher/params.h for the meaning of the arrays.
#pragma once

#include "cuda/common/view.h"

namespace thresher::cuda {

struct Geometry {
  const int32_t* q_begin_array = nullptr; // [fragments + 1]; null: equal rows of tokens_per_row
  const int32_t* k_begin_array = nullptr; // [fragments]; null: keys are stored like the queries
  const int32_t* k_len_array = nullptr;   // [fragments]; null: as many as queries
  int32_t fragments = 0;
  int32_t tokens = 0, keys = 0; // T, Tk
  int32_t tokens_per_row = 0, keys_per_row = 0;

#if defined(__CUDACC__)
  __device__ __forceinline__ int32_t q_begin(int32_t f) const {
    return q_begin_array ? __ldg(q_begin_array + f) : f * tokens_per_row;
  }
  __device__ __forceinline__ int32_t q_end(int32_t f) const { return q_begin(f + 1); }
  __device__ __forceinline__ int32_t k_begin(int32_t f) const {
    if (k_begin_array)
      return __ldg(k_begin_array + f);
    return q_begin_array ? __ldg(q_begin_array + f) : f * keys_per_row;
  }
  __device__ __forceinline__ int32_t k_len(int32_t f) const {
    if (k_len_array)
      return __ldg(k_len_array + f);
    return q_begin_array ? q_end(f) - q_begin(f) : keys_per_row;
  }
  // Tokens from here on are padding.
  __device__ __forceinline__ int32_t real_tokens() const { return q_begin(fragments); }

  // Position in its document of query `token` of fragment f; negative: it sees no key.
  __device__ __forceinline__ int32_t position(int32_t f, int32_t token) const {
    return k_len(f) - (q_end(f) - token);
  }

  // The fragment that holds `token`, or -1 for padding. Empty fragments hold nothing.
  __device__ __forceinline__ int32_t fragment_of(int32_t token) const {
    if (!q_begin_array)
      return token / tokens_per_row;
    if (fragments == 0)
      return -1;
    int32_t low = 0, high = fragments; // largest f with q_begin(f) <= token
    while (high - low > 1) {
      const int32_t middle = (low + high) >> 1;
      if (__ldg(q_begin_array + middle) <= token)
        low = middle;
      else
        high = middle;
    }
    return token < __ldg(q_begin_array + low + 1) ? low : -1;
  }
#endif
};

// Tiles of at most `tile` queries of one fragment, found without a scan: fragment f owns the slots
// from q_begin[f] / tile + f on, which leaves room for ceil(len / tile) tiles; the slots that this
// leaves over are empty. A kernel launches tile_slots() tiles and skips the empty ones.
inline int64_t tile_slots(const Geometry& geometry, int32_t tile) {
  return geometry.tokens / tile + geometry.fragments + 1;
}

#if defined(__CUDACC__)
struct QueryTile {
  int32_t fragment = -1; // -1: empty slot
  int32_t first_token = 0, tokens = 0;
  int32_t first_position = 0; // of first_token; negative: no key visible
  int32_t k_begin = 0;        // key row of position 0
};

__device__ __forceinline__ QueryTile query_tile(const Geometry& geometry, int32_t slot,
                                                int32_t tile) {
  int32_t low = 0, high = geometry.fragments; // largest f whose first slot is <= slot
  while (high - low > 1) {
    const int32_t middle = (low + high) >> 1;
    if (geometry.q_begin(middle) / tile + middle <= slot)
      low = middle;
    else
      high = middle;
  }
  QueryTile result;
  if (geometry.fragments == 0)
    return result;
  const int32_t begin = geometry.q_begin(low), end = geometry.q_end(low);
  const int64_t first = begin + static_cast<int64_t>(slot - begin / tile - low) * tile;
  if (first < begin || first >= end)
    return result;
  result.fragment = low;
  result.first_token = static_cast<int32_t>(first);
  result.tokens = min(tile, end - result.first_token);
  result.first_position = geometry.position(low, result.first_token);
  result.k_begin = geometry.k_begin(low);
  return result;
}
#endif

inline Geometry make_geometry(const Problem& problem, const Shapes& shapes) {
  Geometry geometry;
  geometry.q_begin_array = problem.fragments.q_begin;
  geometry.k_begin_array = problem.fragments.k_begin;
  geometry.k_len_array = problem.fragments.k_len;
  geometry.fragments = static_cast<int32_t>(fragment_count(problem, shapes));
  geometry.tokens = static_cast<int32_t>(shapes.tokens);
  geometry.keys = static_cast<int32_t>(shapes.keys);
  geometry.tokens_per_row = static_cast<int32_t>(shapes.tokens_per_row);
  geometry.keys_per_row = static_cast<int32_t>(shapes.keys_per_row);
  return geometry;
}

} // namespace thresher::cuda
