// Strided views that kernels take by value: pointer and 64-bit strides, rows found as core's
// TokenView finds them (token t is (t / per_row, t % per_row)).
#pragma once

#include "core/shapes.h"

#include <cstdint>

namespace thresher::cuda {

#if defined(__CUDACC__)
#define THRESHER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define THRESHER_HOST_DEVICE inline
#endif

// [T, heads, dim], [T, heads] and their batched forms. Strides in elements; dim is contiguous.
template <class T>
struct TensorView {
  T* data = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
  int32_t per_row = 0; // 0: packed, so that no division is spent on it

  THRESHER_HOST_DEVICE T* row(int32_t token) const {
    if (per_row == 0)
      return data + token * token_stride;
    const int32_t batch = token / per_row;
    return data + batch * batch_stride + (token - batch * per_row) * token_stride;
  }
  THRESHER_HOST_DEVICE T* at(int32_t token, int32_t head) const {
    return row(token) + head * head_stride;
  }
};

// block_indices: [Hp, T, K] or [N, Hp, S, K], K contiguous.
template <class T>
struct BlockIdsView {
  T* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;
  int32_t per_row = 0; // 0: packed

  THRESHER_HOST_DEVICE T* at(int32_t head, int32_t token) const {
    T* base = data + head * head_stride;
    if (per_row == 0)
      return base + token * token_stride;
    const int32_t batch = token / per_row;
    return base + batch * batch_stride + (token - batch * per_row) * token_stride;
  }
};

// has_dim: [.., heads, dim]; otherwise [.., heads].
template <class T>
TensorView<T> tensor_view(const Tensor& tensor, bool has_dim = true) {
  TensorView<T> view;
  view.data = static_cast<T*>(tensor.data);
  if (!view.data)
    return view;
  const int heads_axis = has_dim ? tensor.rank - 2 : tensor.rank - 1;
  view.head_stride = tensor.stride[heads_axis];
  view.token_stride = tensor.stride[heads_axis - 1];
  // Batch rows that follow each other in memory are one packed row.
  if (heads_axis == 2 && tensor.shape[0] > 1 &&
      tensor.stride[0] != tensor.shape[1] * tensor.stride[1]) {
    view.batch_stride = tensor.stride[0];
    view.per_row = static_cast<int32_t>(tensor.shape[1]);
  }
  return view;
}

template <class T>
BlockIdsView<T> block_ids_view(const Tensor& tensor) {
  BlockIdsView<T> view;
  view.data = static_cast<T*>(tensor.data);
  if (!view.data)
    return view;
  const int token_axis = tensor.rank - 2;
  view.token_stride = tensor.stride[token_axis];
  view.head_stride = tensor.stride[token_axis - 1];
  if (token_axis == 2) {
    view.batch_stride = tensor.stride[0];
    view.per_row = static_cast<int32_t>(tensor.shape[2]);
  }
  return view;
}

} // namespace thresher::cuda
