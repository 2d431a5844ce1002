// Constants of the portable sparse forward: tile shapes, shared-memory map, what the kernels are
// told.
#pragma once

#include "cuda/common/view.h"
#include "cuda/index/index.h"

namespace thresher::cuda::portable::forward {

// A unit of work keeps kKeys keys of a block in shared memory, and each warp takes 16 (token, head)
// rows of its list at a time from Q to the stored partial result, without a word to the others.
// kValues: attention; otherwise only the softmax statistics (proxy_lse).
template <int kDim_, int kKeys_, bool kValues_>
struct PartialConfig {
  static constexpr int kDim = kDim_, kKeys = kKeys_;
  static constexpr bool kValues = kValues_;
  static_assert(kDim == 64 || kDim == 128 || kDim == 256, "other dimensions are padded to these");
  static_assert(kKeys % 32 == 0 && kKeys <= 128, "the scores of a row tile stay in registers");

  static constexpr int kWarps = kDim <= 128 ? 8 : 4, kThreads = 32 * kWarps;
  static constexpr int kCtas = 2;     // an SM, by registers
  static constexpr int kRows = 16;    // of a warp
  static constexpr int kColumns = 64; // of the output that a warp has in registers at a time

  static constexpr int kRowTileBytes = kRows * kDim * 2;
  static constexpr int kBlockTileBytes = kKeys * kDim * 2;
};

// Query heads are main heads, or proxy heads with proxy key heads for kv heads.
template <class T>
struct PartialParams {
  BlockIndex index;
  int32_t first_segment, last_segment; // segments of this pass
  int32_t first_token;                 // of the pass
  int32_t q_heads, kv_heads;
  int32_t parts;     // kv heads that a proxy head's query heads are spread over, at most
  int32_t key_tiles; // units that a block's keys are cut into
  int32_t dim;       // as given
  float score_scale; // |scale| * log2(e)
  bool negate;       // the scale is negative
  TensorView<const T> q, k, v;
  int32_t* ticket; // work counter, zero at launch
  // Partial results of the pass, row (token of the pass * q_heads + head) * slots() + slot *
  // key_tiles + key tile:
  T* partial;         // [rows, padded dim], normalised; columns permuted, see partial_column
  float2* statistics; // [rows] offset m (log2 units; -inf: no key) and l = sum of exp2(score - m)

  THRESHER_HOST_DEVICE int32_t slots() const { return index.top_k * key_tiles; }
};

// Of 32 columns, a lane of an mma quad holds 2 c, 2 c + 1 of every eight; they lie side by side in
// a partial result, so that the lane stores 16 bytes at a time. Column of the pair `i` of the
// 16-byte chunk `chunk`:
THRESHER_HOST_DEVICE constexpr int partial_column(int chunk, int i) {
  return chunk / 4 * 32 + i * 8 + chunk % 4 * 2;
}

} // namespace thresher::cuda::portable::forward
