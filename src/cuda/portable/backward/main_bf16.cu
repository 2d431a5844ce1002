#include "cuda/portable/backward/main.cuh"

namespace thresher::cuda::portable::backward {
template struct MainKernel<bf16, 64>;
template struct MainKernel<bf16, 128>;
template struct MainKernel<bf16, 256>;
} // namespace thresher::cuda::portable::backward
