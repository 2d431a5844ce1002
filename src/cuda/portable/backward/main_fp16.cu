#include "cuda/portable/backward/main.cuh"

namespace thresher::cuda::portable::backward {
template struct MainKernel<fp16, 64>;
template struct MainKernel<fp16, 128>;
template struct MainKernel<fp16, 256>;
} // namespace thresher::cuda::portable::backward
