// How an implementation of an operation presents itself to the dispatch table in backend.cpp.
//
// An implementation defines one `extern const Kernel<Params>` in its folder, under the name
// declared here, and checks nothing that backend.cpp has checked already: dtypes bf16/fp16, head
// dimensions a multiple of 8 up to 256, block size 32/64/128/256, K <= 128, 16-byte aligned rows,
// sizes below 2^31. The device is current, T > 0, the workspace is large enough.
#pragma once

#include "cuda/common/launch.h"

#include "core/shapes.h"

namespace thresher::cuda {

template <class Params>
struct Kernel {
  const char* name; // "sm90", "portable"
  // Empty: this implementation takes the problem. Otherwise why not, as the rest of a sentence
  // ("needs compute capability 9.0"). A function of params' shapes, dtypes and strides alone.
  std::string (*refuses)(const Params&, const Shapes&, const DeviceFacts&);
  size_t (*workspace_size)(const Params&, const Shapes&);
  void (*run)(const Params&, const Shapes&, const Workspace&, cudaStream_t);
};

// For sm_80 and everything after it; take every problem of the contract.
namespace portable {
extern const Kernel<SelectParams> select_blocks;
extern const Kernel<ForwardParams> sparse_forward;
extern const Kernel<BackwardParams> sparse_backward;
extern const Kernel<ForwardParams> warmup_forward;
extern const Kernel<BackwardParams> warmup_backward;
extern const Kernel<KlParams> proxy_kl;
} // namespace portable

// WGMMA and TMA; need compute capability 9.0.
namespace sm90 {
extern const Kernel<SelectParams> select_blocks;
extern const Kernel<ForwardParams> sparse_forward;
extern const Kernel<BackwardParams> sparse_backward;
extern const Kernel<KlParams> proxy_kl;
} // namespace sm90

} // namespace thresher::cuda
