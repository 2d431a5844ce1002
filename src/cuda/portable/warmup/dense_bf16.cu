#include "cuda/portable/warmup/dense.cuh"

namespace thresher::cuda::portable::warmup {
template struct DenseKernel<bf16, 64, true>;
template struct DenseKernel<bf16, 128, true>;
template struct DenseKernel<bf16, 256, true>;
template struct DenseKernel<bf16, 64, false>;
template struct DenseKernel<bf16, 128, false>;
template struct DenseKernel<bf16, 256, false>;
} // namespace thresher::cuda::portable::warmup
