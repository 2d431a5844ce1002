// Stands in for src/cuda/common/ptx.cuh where kernels are emulated.
#pragma once

namespace thresher::cuda::ptx {
inline void wait_for_predecessor() {}
} // namespace thresher::cuda::ptx
