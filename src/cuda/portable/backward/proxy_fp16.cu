#include "cuda/portable/backward/proxy.cuh"

namespace thresher::cuda::portable::backward {
template struct ProxyKernel<fp16, 64>;
template struct ProxyKernel<fp16, 128>;
template struct ProxyKernel<fp16, 256>;
} // namespace thresher::cuda::portable::backward
