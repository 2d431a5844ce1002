// Finds inputs that are not finite. The WGMMA kernels let 0 * NaN through where a query does not
// see all keys of a block; if anything is tainted, the portable kernels, which keep such values
// with the rows that read them, do the work again. The host does not know: they are launched all
// the same and leave at once where the gate is zero.
#pragma once

#include "cuda/common/finite.cuh"
#include "cuda/common/view.h"
#include "cuda/index/index.h"

namespace thresher::cuda::sm90 {

__device__ __forceinline__ void taint(int32_t* gate, bool tainted) {
  if (tainted)
    *gate = 1; // whoever writes, writes the same
}

// Rows of a [Tk, heads, dim] tensor whose key belongs to a document. 16 bytes a thread.
template <class T>
__global__ void __launch_bounds__(256)
    taint_keys_kernel(TensorView<const T> tensor, const int32_t* key_row, int32_t keys,
                      int32_t heads, int32_t dim, int32_t* gate) {
  const int chunks = dim / 8;
  const int64_t count = static_cast<int64_t>(keys) * heads * chunks;
  bool tainted = false;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    const int64_t row = i / chunks;
    const int key = static_cast<int>(row / heads);
    if (__ldg(key_row + key) == 0)
      continue;
    const uint4 x =
        __ldg(reinterpret_cast<const uint4*>(tensor.at(key, static_cast<int>(row % heads))) +
              (i - row * chunks));
    tainted |= not_finite<T>(x);
  }
  taint(gate, tainted);
}

// lse or proxy_lse of tokens that see a key: a query that is not finite shows here.
template <class T> // of the tensors only
__global__ void __launch_bounds__(256)
    taint_rows_kernel(TensorView<const float> lse, const int32_t* position, int32_t tokens,
                      int32_t heads, int32_t* gate) {
  const int64_t count = static_cast<int64_t>(tokens) * heads;
  bool tainted = false;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    const int token = static_cast<int>(i / heads);
    if (__ldg(position + token) >= 0)
      tainted |= isnan(*lse.at(token, static_cast<int>(i % heads)));
  }
  taint(gate, tainted);
}

} // namespace thresher::cuda::sm90
