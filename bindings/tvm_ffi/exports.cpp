// The functions that Python calls. Each takes tensors, numbers and an optional workspace (see
// size_or_run); the order of the arguments is that of ops.py.
#include "convert.h"

#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

namespace thresher::bindings {
namespace {

using Maybe = Optional<TensorView>;

int64_t select(TensorView q_proxy, TensorView k_proxy, Maybe cu_seqlens, TensorView block_indices,
               int64_t block_size, int64_t init_blocks, int64_t local_blocks, double proxy_scale,
               Maybe workspace) {
  return translated([&] {
    SelectParams p;
    p.problem.fragments = fragments_of(cu_seqlens);
    p.problem.block_size = static_cast<int32_t>(block_size);
    p.problem.top_k_blocks = static_cast<int32_t>(block_indices.size(block_indices.ndim() - 1));
    p.problem.init_blocks = static_cast<int32_t>(init_blocks);
    p.problem.local_blocks = static_cast<int32_t>(local_blocks);
    p.problem.proxy_scale = proxy_scale;
    p.q_proxy = tensor_of("q_proxy", q_proxy);
    p.k_proxy = tensor_of("k_proxy", k_proxy);
    p.block_indices = tensor_of("block_indices", block_indices);
    return size_or_run(p, device_of(q_proxy), workspace, select_blocks_workspace_size,
                       select_blocks);
  });
}

// What forward, backward and KL have in common. local_blocks and init_blocks play no part in them.
Problem attention_problem(const Maybe& cu_seqlens, const Tensor& block_indices, int64_t block_size,
                          double softmax_scale, double proxy_scale, bool deterministic) {
  Problem problem;
  problem.fragments = fragments_of(cu_seqlens);
  problem.block_size = static_cast<int32_t>(block_size);
  if (block_indices)
    problem.top_k_blocks = static_cast<int32_t>(block_indices.shape[block_indices.rank - 1]);
  problem.softmax_scale = softmax_scale;
  problem.proxy_scale = proxy_scale;
  problem.deterministic = deterministic;
  return problem;
}

// Sparse with block_indices, otherwise the warm-up.
int64_t forward(TensorView q, TensorView k, TensorView v, Maybe q_proxy, Maybe k_proxy,
                Maybe block_indices, Maybe cu_seqlens, TensorView out, TensorView lse,
                Maybe proxy_lse, int64_t block_size, double softmax_scale, double proxy_scale,
                bool deterministic, Maybe workspace) {
  return translated([&] {
    ForwardParams p;
    p.block_indices = tensor_of("block_indices", block_indices);
    p.problem = attention_problem(cu_seqlens, p.block_indices, block_size, softmax_scale,
                                  proxy_scale, deterministic);
    p.q = tensor_of("q", q);
    p.k = tensor_of("k", k);
    p.v = tensor_of("v", v);
    p.q_proxy = tensor_of("q_proxy", q_proxy);
    p.k_proxy = tensor_of("k_proxy", k_proxy);
    p.out = tensor_of("out", out);
    p.lse = tensor_of("lse", lse);
    p.proxy_lse = tensor_of("proxy_lse", proxy_lse);
    return p.block_indices ? size_or_run(p, device_of(q), workspace, sparse_forward_workspace_size,
                                         sparse_forward)
                           : size_or_run(p, device_of(q), workspace, warmup_forward_workspace_size,
                                         warmup_forward);
  });
}

int64_t backward(TensorView q, TensorView k, TensorView v, Maybe q_proxy, Maybe k_proxy,
                 Maybe block_indices, Maybe cu_seqlens, Maybe out, TensorView lse, Maybe proxy_lse,
                 Maybe dout, Maybe dkl, Maybe dq, Maybe dk, Maybe dv, Maybe dq_proxy,
                 Maybe dk_proxy, Maybe kl, int64_t block_size, double softmax_scale,
                 double proxy_scale, bool deterministic, Maybe workspace) {
  return translated([&] {
    BackwardParams p;
    p.block_indices = tensor_of("block_indices", block_indices);
    p.problem = attention_problem(cu_seqlens, p.block_indices, block_size, softmax_scale,
                                  proxy_scale, deterministic);
    p.q = tensor_of("q", q);
    p.k = tensor_of("k", k);
    p.v = tensor_of("v", v);
    p.q_proxy = tensor_of("q_proxy", q_proxy);
    p.k_proxy = tensor_of("k_proxy", k_proxy);
    p.out = tensor_of("out", out);
    p.lse = tensor_of("lse", lse);
    p.proxy_lse = tensor_of("proxy_lse", proxy_lse);
    p.dout = tensor_of("dout", dout);
    p.dkl = tensor_of("dkl", dkl);
    p.dq = tensor_of("dq", dq);
    p.dk = tensor_of("dk", dk);
    p.dv = tensor_of("dv", dv);
    p.dq_proxy = tensor_of("dq_proxy", dq_proxy);
    p.dk_proxy = tensor_of("dk_proxy", dk_proxy);
    p.kl = tensor_of("kl", kl);
    return p.block_indices ? size_or_run(p, device_of(q), workspace, sparse_backward_workspace_size,
                                         sparse_backward)
                           : size_or_run(p, device_of(q), workspace, warmup_backward_workspace_size,
                                         warmup_backward);
  });
}

int64_t kl_rows(TensorView q, TensorView k, TensorView q_proxy, TensorView k_proxy,
                Maybe block_indices, Maybe cu_seqlens, TensorView lse, TensorView proxy_lse,
                TensorView kl, int64_t block_size, double softmax_scale, double proxy_scale,
                Maybe workspace) {
  return translated([&] {
    KlParams p;
    p.block_indices = tensor_of("block_indices", block_indices);
    p.problem = attention_problem(cu_seqlens, p.block_indices, block_size, softmax_scale,
                                  proxy_scale, false);
    p.q = tensor_of("q", q);
    p.k = tensor_of("k", k);
    p.q_proxy = tensor_of("q_proxy", q_proxy);
    p.k_proxy = tensor_of("k_proxy", k_proxy);
    p.lse = tensor_of("lse", lse);
    p.proxy_lse = tensor_of("proxy_lse", proxy_lse);
    p.kl = tensor_of("kl", kl);
    return size_or_run(p, device_of(q), workspace, proxy_kl_workspace_size, proxy_kl);
  });
}

int64_t check_indices(TensorView q, TensorView k, TensorView block_indices, Maybe cu_seqlens,
                      int64_t block_size, Maybe workspace) {
  return translated([&] {
    ForwardParams p;
    p.block_indices = tensor_of("block_indices", block_indices);
    p.problem = attention_problem(cu_seqlens, p.block_indices, block_size, 1, 1, false);
    p.q = tensor_of("q", q);
    p.k = tensor_of("k", k);
    return size_or_run(p, device_of(q), workspace, check_block_indices_workspace_size,
                       check_block_indices);
  });
}

tvm::ffi::String info() {
  return translated([] { return tvm::ffi::String(info_json()); });
}

} // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_blocks, select)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, forward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backward, backward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(proxy_kl, kl_rows)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_block_indices, check_indices)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(info, info)

} // namespace thresher::bindings
