/// \file
/// MiniMax Sparse Attention: one function an operation. Source of the formulas, unless another is
/// named: the MSA paper, arXiv 2606.13392.
///
/// All functions check their arguments first and throw thresher::Error before anything is written:
/// - kInvalidValue: a shape, stride, head ratio, count or number that is wrong, or a tensor missing
/// - kInvalidType: a dtype or device that is not taken
/// - kNotSupported: a legal problem that this backend has no kernel for
/// - kOutOfMemory: a workspace that is too small, or sizes that 64 bits cannot count
/// - kDeviceFailure: what CUDA reported
///
/// The error's argument() is the name of the member of the params struct. On CUDA the functions
/// only enqueue work on device.stream: no allocation, no host synchronisation.
#pragma once

#include <thresher/error.h>
#include <thresher/export.h>
#include <thresher/params.h>

#include <string>

namespace thresher {

/// Bytes of scratch memory that select_blocks() needs.
/// \param params the same as in the call
/// \param device where it will run
/// \return bytes
/// \throws Error as select_blocks()
THRESHER_API size_t select_blocks_workspace_size(const SelectParams& params, const Device& device);

/// Proxy scores, block maximum and exact top-k.
///
///     score[t, p, b] = proxy_scale max_j <q_proxy[t, p], k_proxy[j, p']>   visible j in block b
///     p' = p / (Hp / Hpk)
///
/// Keeps init_blocks, local_blocks and the best others, K in all; ties go to the lower id; NaN
/// ranks below every number. Ids are local to the document, ascending, -1 to the right.
/// \param params q_proxy [T, Hp, Dp] and k_proxy [Tk, Hpk, Dp] give block_indices [Hp, T, K]
/// \param workspace of select_blocks_workspace_size() bytes
/// \param device where the tensors are
/// \throws Error before anything is written, see msa.h
THRESHER_API void select_blocks(const SelectParams& params, const Workspace& workspace,
                                const Device& device);

/// Bytes of scratch memory that sparse_forward() needs.
/// \param params the same as in the call
/// \param device where it will run
/// \return bytes
/// \throws Error as sparse_forward()
THRESHER_API size_t sparse_forward_workspace_size(const ForwardParams& params,
                                                  const Device& device);

/// Attention over the visible keys of the selected blocks.
///
///     S[t, h, j] = softmax_scale <q[t, h], k[j, h / (Hq / Hkv)]>     j selected for (t, h / G)
///     P = softmax_j(S),  out = sum_j P v_j,  lse = ln sum_j exp(S)
///     proxy_lse[t, p] = ln sum_j exp(proxy_scale <q_proxy[t, p], k_proxy[j, p']>)
///
/// A row without a key has out 0 and lse -inf. On the CPU block_indices are validated, see
/// check_block_indices(); on CUDA a wrong entry counts as -1.
/// \param params q [T, Hq, D], k and v [Tk, Hkv, D] give out [T, Hq, D] and lse [T, Hq] (nats), and
/// with the proxy proxy_lse [T, Hp]
/// \param workspace of sparse_forward_workspace_size() bytes
/// \param device where the tensors are
/// \throws Error before anything is written, see msa.h
THRESHER_API void sparse_forward(const ForwardParams& params, const Workspace& workspace,
                                 const Device& device);

/// Bytes of scratch memory that sparse_backward() needs.
/// \param params the same as in the call: an absent gradient needs no memory
/// \param device where it will run
/// \return bytes
/// \throws Error as sparse_backward()
THRESHER_API size_t sparse_backward_workspace_size(const BackwardParams& params,
                                                   const Device& device);

/// Gradients of the main attention and of the proxy's KL in one pass.
///
///     delta = <dout, out>,  dS = P (<dout, v_j> - delta)
///     dq = softmax_scale sum_j dS k_j,  dk = softmax_scale sum_t,h dS q,  dv = sum_t,h P dout
///     teacher = mean over the G heads of P,  student = exp(s_proxy - proxy_lse)
///     dS_proxy = dkl (student - teacher)
///     dq_proxy = proxy_scale sum_j dS_proxy k_proxy
///     dk_proxy = proxy_scale sum_t,p dS_proxy q_proxy
///
/// The form with delta is that of FlashAttention-2, arXiv 2307.08691. No gradient flows from the KL
/// to the main attention. Rows that nobody reads and padding become exactly 0.
/// \param params inputs and results of the forward, dout [T, Hq, D] and dkl [T, Hp] give the
/// gradients that are present, each of its input's shape, and kl [T, Hp] (nats)
/// \param workspace of sparse_backward_workspace_size() bytes
/// \param device where the tensors are
/// \throws Error before anything is written, see msa.h
THRESHER_API void sparse_backward(const BackwardParams& params, const Workspace& workspace,
                                  const Device& device);

/// Bytes of scratch memory that warmup_forward() needs.
/// \param params the same as in the call
/// \param device where it will run
/// \return bytes
/// \throws Error as warmup_forward()
THRESHER_API size_t warmup_forward_workspace_size(const ForwardParams& params,
                                                  const Device& device);

/// sparse_forward() over all visible keys: dense causal attention, while the proxy is being trained
/// and its selection cannot be trusted yet.
/// \param params as in sparse_forward(), block_indices absent
/// \param workspace of warmup_forward_workspace_size() bytes
/// \param device where the tensors are
/// \throws Error before anything is written, see msa.h
THRESHER_API void warmup_forward(const ForwardParams& params, const Workspace& workspace,
                                 const Device& device);

/// Bytes of scratch memory that warmup_backward() needs.
/// \param params the same as in the call
/// \param device where it will run
/// \return bytes
/// \throws Error as warmup_backward()
THRESHER_API size_t warmup_backward_workspace_size(const BackwardParams& params,
                                                   const Device& device);

/// sparse_backward() over all visible keys.
/// \param params as in sparse_backward(), block_indices absent
/// \param workspace of warmup_backward_workspace_size() bytes
/// \param device where the tensors are
/// \throws Error before anything is written, see msa.h
THRESHER_API void warmup_backward(const BackwardParams& params, const Workspace& workspace,
                                  const Device& device);

/// Bytes of scratch memory that proxy_kl() needs.
/// \param params the same as in the call
/// \param device where it will run
/// \return bytes
/// \throws Error as proxy_kl()
THRESHER_API size_t proxy_kl_workspace_size(const KlParams& params, const Device& device);

/// Exact rows of the proxy's loss, in the log domain.
///
///     KL[t, p] = sum_j teacher_j (ln teacher_j - ln student_j),  0 ln 0 = 0
///
/// over the selected keys, or all visible ones without block_indices; teacher and student as in
/// sparse_backward().
/// \param params inputs, lse and proxy_lse of the forward give kl [T, Hp] (nats)
/// \param workspace of proxy_kl_workspace_size() bytes
/// \param device where the tensors are
/// \throws Error before anything is written, see msa.h
THRESHER_API void proxy_kl(const KlParams& params, const Workspace& workspace,
                           const Device& device);

/// Bytes of scratch memory that check_block_indices() needs.
/// \param params the same as in the call
/// \param device where it will run
/// \return bytes
/// \throws Error if a shape, dtype or device is wrong
THRESHER_API size_t check_block_indices_workspace_size(const ForwardParams& params,
                                                       const Device& device);

/// Validates block_indices given from outside: every id is -1 or a visible block, and none is twice
/// in a row. On CUDA this synchronises the stream; the operations themselves never do, and treat a
/// wrong entry as -1. The CPU operations always validate.
/// \param params problem, q, k and block_indices are used
/// \param workspace of check_block_indices_workspace_size() bytes
/// \param device where the tensors are
/// \throws Error kInvalidValue that names the first offending (head, token, slot)
THRESHER_API void check_block_indices(const ForwardParams& params, const Workspace& workspace,
                                      const Device& device);

/// What this build supports.
/// \return a JSON object (see `thresher.info()` in Python)
THRESHER_API std::string info_json();

/// \return version of the library, "major.minor.patch"
THRESHER_API const char* version();

} // namespace thresher
