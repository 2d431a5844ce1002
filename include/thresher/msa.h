// MiniMax Sparse Attention (arXiv 2606.13392): one function an operation.
//
// All functions check their arguments first and throw thresher::Error before anything is written.
// On CUDA they only enqueue work on device.stream: no allocation, no host synchronisation.
#pragma once

#include <thresher/error.h>
#include <thresher/params.h>

#include <string>

#if defined(_WIN32)
#define THRESHER_API
#else
#define THRESHER_API __attribute__((visibility("default")))
#endif

namespace thresher {

// Proxy scores, block maximum and exact top-k.
//   score[t, p, b] = max over visible j in block b of proxy_scale <q_proxy[t, p], k_proxy[j, p /
//   (Hp/Hpk)]>
// Keeps init_blocks, local_blocks and the best others, K in all; ties go to the lower id; NaN ranks
// below every number. Ids are local to the document, ascending, -1 to the right.
THRESHER_API size_t select_blocks_workspace_size(const SelectParams& params, const Device& device);
THRESHER_API void select_blocks(const SelectParams& params, const Workspace& workspace,
                                const Device& device);

// Attention over the keys of the selected blocks: out, lse and (if the proxy is given) proxy_lse.
//   P = softmax_j(softmax_scale <q, k_j>), out = sum_j P_j v_j, lse = ln sum_j exp(softmax_scale
//   <q, k_j>)
THRESHER_API size_t sparse_forward_workspace_size(const ForwardParams& params,
                                                  const Device& device);
THRESHER_API void sparse_forward(const ForwardParams& params, const Workspace& workspace,
                                 const Device& device);

// Gradients of the main attention and of the proxy's KL in one pass.
//   dS = P (<dout, v_j> - <dout, out>);  dS_proxy = dkl (student - teacher)
//   teacher = mean over the G heads of P, student = exp(s_proxy - proxy_lse)
THRESHER_API size_t sparse_backward_workspace_size(const BackwardParams& params,
                                                   const Device& device);
THRESHER_API void sparse_backward(const BackwardParams& params, const Workspace& workspace,
                                  const Device& device);

// The same two over all visible keys (dense causal attention; trains the proxy before its selection
// can be trusted). block_indices must be absent.
THRESHER_API size_t warmup_forward_workspace_size(const ForwardParams& params,
                                                  const Device& device);
THRESHER_API void warmup_forward(const ForwardParams& params, const Workspace& workspace,
                                 const Device& device);
THRESHER_API size_t warmup_backward_workspace_size(const BackwardParams& params,
                                                   const Device& device);
THRESHER_API void warmup_backward(const BackwardParams& params, const Workspace& workspace,
                                  const Device& device);

// Exact rows KL[t, p] = sum_j teacher_j (ln teacher_j - ln student_j), in the log domain, over the
// selected keys (or all visible ones without block_indices).
THRESHER_API size_t proxy_kl_workspace_size(const KlParams& params, const Device& device);
THRESHER_API void proxy_kl(const KlParams& params, const Workspace& workspace,
                           const Device& device);

// Validates block_indices given from outside: an id out of range, of a later block, or twice in a
// row throws an Error that names the first offending (head, token, slot). On CUDA this synchronises
// the stream; the operations themselves never do, and treat such an entry as -1. The CPU operations
// always validate. Uses problem, q, k and block_indices of the params.
THRESHER_API size_t check_block_indices_workspace_size(const ForwardParams& params,
                                                       const Device& device);
THRESHER_API void check_block_indices(const ForwardParams& params, const Workspace& workspace,
                                      const Device& device);

// Version and what this build supports, as a JSON object (see `thresher.info()`).
THRESHER_API std::string info_json();
THRESHER_API const char* version();

} // namespace thresher
