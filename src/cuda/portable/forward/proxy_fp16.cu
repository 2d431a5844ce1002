#include "cuda/portable/forward/partial.cuh"

namespace thresher::cuda::portable::forward {
template struct PartialKernel<fp16, 64, 128, false>;
template struct PartialKernel<fp16, 128, 128, false>;
template struct PartialKernel<fp16, 256, 64, false>;
} // namespace thresher::cuda::portable::forward
