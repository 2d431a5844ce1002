// A problem with all tensors of all operations, each in a heap block of exactly its size, so that
// AddressSanitizer sees a step beyond it.
#pragma once

#include <thresher/msa.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bytes.h"
#include "core/shapes.h"

namespace fuzz {

using thresher::DType;
using thresher::Tensor;

enum Name {
  kQ,
  kK,
  kV,
  kQProxy,
  kKProxy,
  kIndices,
  kOut,
  kLse,
  kProxyLse,
  kKl,
  kDout,
  kDkl,
  kDq,
  kDk,
  kDv,
  kDqProxy,
  kDkProxy,
  kTensors
};

struct Sizes {
  bool batched = false;
  int64_t batch = 1, tokens = 1, keys = 1; // tokens and keys of one row
  int64_t q_heads = 1, kv_heads = 1, proxy_heads = 1, proxy_kv_heads = 1;
  int64_t dim = 1, proxy_dim = 1, top_k = 1;
  DType dtype = DType::kFloat32;
  bool head_major = false;
};

struct Case {
  thresher::Problem problem;
  thresher::Device device;
  Tensor tensor[kTensors];
  std::vector<char> memory[kTensors];
  std::vector<int32_t> q_begin, k_begin, k_len; // exactly as long as count says

  // The tensors of a problem without memory: strides of one of two layouts.
  void describe(const Sizes& s) {
    const DType acc = s.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    for (Name n : {kQ, kOut, kDout, kDq})
      token_tensor(n, s, s.dtype, s.tokens, s.q_heads, s.dim);
    for (Name n : {kK, kV, kDk, kDv})
      token_tensor(n, s, s.dtype, s.keys, s.kv_heads, s.dim);
    for (Name n : {kQProxy, kDqProxy})
      token_tensor(n, s, s.dtype, s.tokens, s.proxy_heads, s.proxy_dim);
    for (Name n : {kKProxy, kDkProxy})
      token_tensor(n, s, s.dtype, s.keys, s.proxy_kv_heads, s.proxy_dim);
    token_tensor(kLse, s, acc, s.tokens, s.q_heads, 0);
    for (Name n : {kProxyLse, kKl, kDkl})
      token_tensor(n, s, acc, s.tokens, s.proxy_heads, 0);
    Tensor& ids = tensor[kIndices];
    ids.dtype = DType::kInt32;
    // Heads before tokens: [N, Hp, S, K].
    set(ids, s.batched, {s.batch, s.proxy_heads, s.tokens, s.top_k},
        {product({s.proxy_heads, s.tokens, s.top_k}), product({s.tokens, s.top_k}), s.top_k, 1}, 4);
  }

  // Gives every tensor a block of its own, `shift` bytes off its alignment if it is the odd one.
  void allocate(int odd = -1, size_t shift = 0) {
    for (int n = 0; n < kTensors; ++n) {
      Tensor& t = tensor[n];
      int64_t count = 1;
      for (int axis = 0; axis < t.rank; ++axis)
        count *= t.shape[axis];
      const size_t offset = n == odd ? shift : 0;
      memory[n].assign(static_cast<size_t>(count) * thresher::element_size(t.dtype) + offset, 0);
      memory[n].shrink_to_fit();
      t.data = count ? memory[n].data() + offset : nullptr; // what torch gives for empty tensors
    }
  }

  // Every element of every given tensor lies in its block: a call may be run.
  bool honest() const {
    for (int n = 0; n < kTensors; ++n)
      if (tensor[n] && !honest(n))
        return false;
    return true;
  }

  void point_fragments() {
    thresher::Fragments& f = problem.fragments;
    f.count = static_cast<int64_t>(q_begin.size()) - 1;
    f.q_begin = q_begin.data();
    f.k_begin = k_begin.empty() ? nullptr : k_begin.data();
    f.k_len = k_len.empty() ? nullptr : k_len.data();
  }

  thresher::SelectParams select() const {
    return {problem, tensor[kQProxy], tensor[kKProxy], tensor[kIndices]};
  }
  thresher::ForwardParams forward(bool sparse) const {
    return {problem,
            tensor[kQ],
            tensor[kK],
            tensor[kV],
            tensor[kQProxy],
            tensor[kKProxy],
            sparse ? tensor[kIndices] : Tensor{},
            tensor[kOut],
            tensor[kLse],
            tensor[kProxyLse]};
  }
  thresher::KlParams kl(bool sparse) const {
    return {problem,         tensor[kQ],        tensor[kK],
            tensor[kQProxy], tensor[kKProxy],   sparse ? tensor[kIndices] : Tensor{},
            tensor[kLse],    tensor[kProxyLse], tensor[kKl]};
  }
  thresher::BackwardParams backward(bool sparse) const {
    thresher::BackwardParams b;
    b.problem = problem;
    b.q = tensor[kQ], b.k = tensor[kK], b.v = tensor[kV];
    b.q_proxy = tensor[kQProxy], b.k_proxy = tensor[kKProxy];
    b.block_indices = sparse ? tensor[kIndices] : Tensor{};
    b.out = tensor[kOut], b.lse = tensor[kLse], b.proxy_lse = tensor[kProxyLse];
    b.dout = tensor[kDout], b.dkl = tensor[kDkl], b.kl = tensor[kKl];
    b.dq = tensor[kDq], b.dk = tensor[kDk], b.dv = tensor[kDv];
    b.dq_proxy = tensor[kDqProxy], b.dk_proxy = tensor[kDkProxy];
    return b;
  }

 private:
  // Wraps around: sizes may be anything.
  static int64_t product(std::initializer_list<int64_t> factors) {
    uint64_t p = 1;
    for (int64_t f : factors)
      p *= static_cast<uint64_t>(f);
    return static_cast<int64_t>(p);
  }
  static void set(Tensor& t, bool batched, std::array<int64_t, 4> shape,
                  std::array<int64_t, 4> stride, int rank) {
    const int skip = batched ? 0 : 1; // the batch
    t.rank = rank - skip;
    for (int axis = 0; axis < t.rank; ++axis) {
      t.shape[axis] = shape[static_cast<size_t>(axis + skip)];
      t.stride[axis] = stride[static_cast<size_t>(axis + skip)];
    }
  }
  void token_tensor(Name n, const Sizes& s, DType dtype, int64_t tokens, int64_t heads,
                    int64_t dim) {
    tensor[n].dtype = dtype;
    const int64_t d = dim ? dim : 1;
    const int64_t row = product({tokens, heads, d});
    const int64_t token = s.head_major ? d : product({heads, d});
    const int64_t head = s.head_major ? product({tokens, d}) : d;
    set(tensor[n], s.batched, {s.batch, tokens, heads, dim}, {row, token, head, 1}, dim ? 4 : 3);
  }

  bool honest(int n) const {
    const Tensor& t = tensor[n];
    if (t.rank < 0 || t.rank > 4)
      return true; // refused before anybody reads it
    __int128 low = 0, high = 0;
    for (int axis = 0; axis < t.rank; ++axis) {
      if (t.shape[axis] < 1)
        return true;
      const __int128 reach = static_cast<__int128>(t.shape[axis] - 1) * t.stride[axis];
      (reach < 0 ? low : high) += reach;
    }
    const auto size = static_cast<__int128>(thresher::element_size(t.dtype));
    const auto start = static_cast<const char*>(t.data) - memory[n].data();
    return start + low * size >= 0 &&
           start + (high + 1) * size <= static_cast<__int128>(memory[n].size());
  }
};

} // namespace fuzz
