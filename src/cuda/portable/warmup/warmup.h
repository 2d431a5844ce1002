// Portable warm-up forward, portable::warmup_forward of cuda/kernel.h: dense causal attention
// within documents, queries outside, keys streamed (the online softmax of FlashAttention). The
// proxy's lse is the same without values. See docs/kernels/forward_portable.md.
#pragma once

#include "cuda/index/geometry.h"

#include <cuda_runtime_api.h>

namespace thresher::cuda::portable::warmup {

// Query heads are main heads, or proxy heads with proxy key heads for kv heads.
template <class T>
struct DenseParams {
  Geometry geometry;
  int32_t heads, kv_heads;
  int32_t dim;       // as given
  float score_scale; // |scale| * log2(e)
  bool negate;       // the scale is negative
  TensorView<const T> q, k, v;
  TensorView<T> out; // absent without values
  TensorView<float> lse;
};

// Explicitly instantiated in dense_*.cu.
template <class T, int kDim, bool kValues>
struct DenseKernel {
  static void run(const DenseParams<T>& params, cudaStream_t stream);
};

// Results of tokens behind the last document: out 0, lse -inf.
template <class T>
void clear_padding(const DenseParams<T>& params, cudaStream_t stream);

} // namespace thresher::cuda::portable::warmup
