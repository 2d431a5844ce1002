// The sizes of one call, read off its tensors and checked once. Everything below the checks works
// with Shapes and raw pointers and trusts them.
#pragma once

#include <thresher/params.h>

#include <numeric>

namespace thresher {

inline size_t element_size(DType dtype) {
  switch (dtype) {
  case DType::kFloat64:
    return 8;
  case DType::kFloat32:
  case DType::kInt32:
    return 4;
  case DType::kBFloat16:
  case DType::kFloat16:
    return 2;
  }
  return 0;
}

struct Shapes {
  int64_t batch = 1;  // N; 1 for packed tensors
  int64_t tokens = 0; // T = batch * tokens_per_row
  int64_t keys = 0;   // Tk = batch * keys_per_row
  int64_t tokens_per_row = 0;
  int64_t keys_per_row = 0;
  int32_t q_heads = 0, kv_heads = 0;           // Hq, Hkv; 0 in a selection
  int32_t proxy_heads = 0, proxy_kv_heads = 0; // Hp, Hpk (Hpk 0: no proxy tensors given)
  int32_t dim = 0, proxy_dim = 0;              // D, Dp
  int32_t block_size = 0, top_k = 0;           // B, K
  DType dtype = DType::kFloat32;

  int32_t group() const { return q_heads / proxy_heads; } // G
  int32_t kv_of(int32_t q_head) const { return q_head / (q_heads / kv_heads); }
  int32_t proxy_of(int32_t q_head) const { return q_head / group(); }
  int32_t proxy_kv_of(int32_t proxy_head) const {
    return proxy_head / (proxy_heads / proxy_kv_heads);
  }
};

// Number of fragments, the implicit ones (one a batch row) included.
inline int64_t fragment_count(const Problem& problem, const Shapes& shapes) {
  return problem.fragments.q_begin ? problem.fragments.count : shapes.batch;
}

// A token tensor ([T, H, D] or [N, S, H, D]) or a per-head result ([T, H], [N, S, H]) as base
// pointer and 64-bit strides: row (n, s), head h is at data + n * batch_stride + s * token_stride +
// h * head_stride.
template <class T>
struct TokenView {
  T* data = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
  int64_t per_row = 1; // S: token t is (t / S, t % S)

  T* at(int64_t token, int64_t head) const {
    return data + (token / per_row) * batch_stride + (token % per_row) * token_stride +
           head * head_stride;
  }
  explicit operator bool() const { return data != nullptr; }
};

// has_dim: the tensor's last dimension is the head dimension ([.., H, D]); otherwise [.., H].
template <class T>
TokenView<T> token_view(const Tensor& tensor, bool has_dim = true) {
  const int heads_axis = has_dim ? tensor.rank - 2 : tensor.rank - 1;
  TokenView<T> view;
  view.data = static_cast<T*>(tensor.data);
  if (!view.data)
    return view;
  const bool batched = heads_axis == 2;
  view.head_stride = tensor.stride[heads_axis];
  view.token_stride = tensor.stride[heads_axis - 1];
  view.batch_stride = batched ? tensor.stride[0] : 0;
  view.per_row = batched ? (tensor.shape[1] > 0 ? tensor.shape[1] : 1)
                         : (tensor.shape[0] > 0 ? tensor.shape[0] : 1);
  return view;
}

} // namespace thresher
