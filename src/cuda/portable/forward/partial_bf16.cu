#include "cuda/portable/forward/partial.cuh"

namespace thresher::cuda::portable::forward {
template struct PartialKernel<bf16, 64, 64, true>;
template struct PartialKernel<bf16, 64, 128, true>;
template struct PartialKernel<bf16, 128, 64, true>;
template struct PartialKernel<bf16, 128, 128, true>;
template struct PartialKernel<bf16, 256, 64, true>;
} // namespace thresher::cuda::portable::forward
