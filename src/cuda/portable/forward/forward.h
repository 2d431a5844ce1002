// Portable sparse forward: portable::sparse_forward of cuda/kernel.h, and what it is made of. See
// docs/kernels/forward_portable.md.
//
// Tokens are worked on in passes, so that the partial results are bounded:
//   partials           partial result and softmax statistics of every (token, head, slot)
//   combine            out, lse
//   proxy statistics   the same lists with q_proxy and k_proxy
//   combine_statistics proxy_lse
#pragma once

#include "cuda/common/launch.h"
#include "cuda/portable/forward/config.h"

namespace thresher::cuda::portable::forward {

// Explicitly instantiated in partial_*.cu and proxy_*.cu.
template <class T, int kDim, int kKeys, bool kValues>
struct PartialKernel {
  static void run(const PartialParams<T>& params, cudaStream_t stream);
};

struct CombineParams {
  BlockIndex index;
  int32_t first_token, tokens; // of the pass
  int32_t heads, group;        // query heads; those of one proxy head
  int32_t key_tiles;
  int32_t dim, padded_dim;
  const float2* statistics; // as in PartialParams
};
template <class T>
void combine(const CombineParams& params, const T* partial, const TensorView<T>& out,
             const TensorView<float>& lse, cudaStream_t stream);
void combine_statistics(const CombineParams& params, const TensorView<float>& lse,
                        cudaStream_t stream);

// Head dimension that a smaller one runs in, zero-filled.
inline int tile_dim(int dim) {
  return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

// Cuts passes smaller than they would be, for tests.
struct ForwardOptions {
  int64_t pass_bytes = 0; // partial results of a pass; 0: the usual bound
};
size_t forward_workspace_size(const ForwardParams& params, const Shapes& shapes,
                              const ForwardOptions& options);
void run_forward(const ForwardParams& params, const Shapes& shapes, const Workspace& workspace,
                 const ForwardOptions& options, cudaStream_t stream);

} // namespace thresher::cuda::portable::forward
