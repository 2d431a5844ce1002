#include "cuda/common/dtype.h"
#include "cuda/common/launch.h"
#include "cuda/portable/warmup/warmup.h"

#include <algorithm>
#include <cmath>

namespace thresher::cuda::portable::warmup {
namespace {

constexpr int kThreads = 256;

// One thread 16 bytes of a row of out.
template <class T>
__global__ void __launch_bounds__(kThreads)
    clear_padding_kernel(const __grid_constant__ DenseParams<T> p) {
  const int32_t first = p.geometry.real_tokens(), chunks = p.out.data ? p.dim / 8 : 1;
  const int64_t count = static_cast<int64_t>(p.geometry.tokens - first) * p.heads * chunks;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = i / chunks;
    const auto chunk = static_cast<int32_t>(i - row * chunks);
    const auto token = static_cast<int32_t>(first + row / p.heads);
    const auto head = static_cast<int32_t>(row % p.heads);
    if (p.out.data)
      *reinterpret_cast<uint4*>(p.out.at(token, head) + chunk * 8) = make_uint4(0, 0, 0, 0);
    if (chunk == 0)
      *p.lse.at(token, head) = -INFINITY;
  }
}

} // namespace

template <class T>
void clear_padding(const DenseParams<T>& params, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(params.geometry.tokens) * params.heads;
  const int64_t blocks =
      std::min<int64_t>(ceil_div<int64_t>(rows, kThreads), 4 * device_facts().sm_count);
  launch("warmup clear_padding", clear_padding_kernel<T>, dim3(static_cast<unsigned>(blocks)),
         dim3(kThreads), 0, stream, params);
}
template void clear_padding(const DenseParams<bf16>&, cudaStream_t);
template void clear_padding(const DenseParams<fp16>&, cudaStream_t);

} // namespace thresher::cuda::portable::warmup
