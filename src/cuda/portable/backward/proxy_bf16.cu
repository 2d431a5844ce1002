#include "cuda/portable/backward/proxy.cuh"

namespace thresher::cuda::portable::backward {
template struct ProxyKernel<bf16, 64>;
template struct ProxyKernel<bf16, 128>;
template struct ProxyKernel<bf16, 256>;
} // namespace thresher::cuda::portable::backward
