/// \file
/// Plain structs that describe a problem. No ownership, no framework.
///
/// Names of sizes (see docs/design.md):
/// - T, Tk: query tokens, key tokens; Hq, Hkv: main query heads, key/value heads
/// - Hp, Hpk: proxy query heads, proxy key heads; D, Dp: head dimension, main and proxy
/// - B: block size in keys; K: top_k_blocks
/// - G = Hq / Hp: main query heads that share one proxy head's selection
///
/// Hkv divides Hq, Hp divides Hq, Hpk divides Hp. Scores and logarithms (lse, kl) are in natural
/// units (nats); scales multiply dot products.
#pragma once

#include <cstddef>
#include <cstdint>

/// MiniMax Sparse Attention: selection of key blocks by a proxy, attention over them, and the
/// proxy's loss. See msa.h.
namespace thresher {

/// Type of a tensor's elements.
enum class DType : int32_t {
  kFloat32 = 0,  ///< CPU only
  kFloat64 = 1,  ///< CPU only
  kBFloat16 = 2, ///< every device
  kFloat16 = 3,  ///< every device
  kInt32 = 4     ///< block ids
};

/// Kind of device.
enum class DeviceType : int32_t {
  kCpu = 0, ///< this process's processor and memory
  kCuda = 1 ///< an NVIDIA GPU
};

/// Where an operation runs.
struct Device {
  DeviceType type = DeviceType::kCpu; ///< Kind of device.
  int32_t index = 0;                  ///< Which GPU; not negative.
  void* stream = nullptr; ///< A cudaStream_t (null: the default stream); the CPU ignores it.
};

/// A strided view. Strides are in elements and may be any 64-bit value, 0 included for inputs;
/// offsets are computed in 64 bits, and a view that leaves them is refused.
///
/// Token tensors come in two forms, which a call may not mix:
/// - packed: rank 3 [T, heads, dim]
/// - batched: rank 4 [N, S, heads, dim]; token t is row t / S, position t % S, and T = N * S.
///
/// The last dimension must be contiguous. Layouts such as [N, H, S, D] are the same data under
/// other strides.
struct Tensor {
  void* data = nullptr;             ///< First element; null: "not given" (or no elements).
  DType dtype = DType::kFloat32;    ///< Type of the elements.
  int32_t rank = 0;                 ///< Number of dimensions, 0 to 4.
  int64_t shape[4] = {0, 0, 0, 0};  ///< Sizes of the first `rank` dimensions.
  int64_t stride[4] = {0, 0, 0, 0}; ///< Steps in elements of the first `rank` dimensions.

  /// \return true if the tensor is given
  explicit operator bool() const noexcept { return data != nullptr; }
};

/// The batch as runs of consecutive queries of one document. Query i of fragment f is token
/// q_begin[f] + i and has position k_len[f] - (q_begin[f+1] - q_begin[f]) + i in its document,
/// whose keys start at key row k_begin[f]; it sees keys 0..position. Several fragments may share a
/// k_begin (context parallelism). Arrays live on the device of the tensors.
/// - plain packed batch: q_begin = cu_seqlens, k_begin = k_len = nullptr
/// - no fragments (count 0): rank 3: one document; rank 4: every batch row is a document
///
/// Tokens from q_begin[count] on are padding: never read, their results are zero (lse -inf, ids
/// -1).
struct Fragments {
  int64_t count = 0;                ///< Number of fragments, at most 2^31 - 1.
  const int32_t* q_begin = nullptr; ///< [count + 1], non-decreasing, q_begin[0] == 0.
  const int32_t* k_begin = nullptr; ///< [count]; null: q_begin[f].
  const int32_t* k_len = nullptr;   ///< [count]; null: q_begin[f + 1] - q_begin[f].
};

/// What all operations share.
struct Problem {
  Fragments fragments;        ///< Documents, and which of their tokens are queries.
  int32_t block_size = 128;   ///< B: 1 .. 1024 on the CPU.
  int32_t top_k_blocks = 16;  ///< K >= init_blocks + local_blocks, forced blocks included.
  int32_t init_blocks = 0;    ///< First blocks of a document that every token keeps.
  int32_t local_blocks = 1;   ///< Last visible blocks that every token keeps, its own included.
  double softmax_scale = 0;   ///< Used as given; the usual value is D ** -0.5.
  double proxy_scale = 0;     ///< Used as given; the usual value is Dp ** -0.5.
  bool deterministic = false; ///< Bitwise equal from run to run; the CPU always is.
};

/// Scratch memory on the device, given by the caller; its size comes from the operation's
/// ..._workspace_size with the same params. Contents need not survive between calls.
struct Workspace {
  void* data = nullptr; ///< 256-byte aligned.
  size_t bytes = 0;     ///< At least what ..._workspace_size said.
};

// Results shaped per token and head have rank 2 [T, heads] (packed) or 3 [N, S, heads] (batched).
// They are fp32, or fp64 when the inputs are fp64 ("accumulation dtype").

/// Tensors of select_blocks().
struct SelectParams {
  Problem problem;      ///< Uses fragments, block_size, top_k, init and local blocks, proxy_scale.
  Tensor q_proxy;       ///< [T, Hp, Dp]
  Tensor k_proxy;       ///< [Tk, Hpk, Dp]
  Tensor block_indices; ///< Out, int32 [Hp, T, K] (batched [N, Hp, S, K]); ascending, then -1.
};

/// Tensors of sparse_forward(), warmup_forward() and check_block_indices().
struct ForwardParams {
  Problem problem;      ///< Uses fragments, block_size, top_k_blocks and both scales.
  Tensor q;             ///< [T, Hq, D]
  Tensor k;             ///< [Tk, Hkv, D]
  Tensor v;             ///< [Tk, Hkv, D]
  Tensor q_proxy;       ///< [T, Hp, Dp]; optional together with k_proxy and proxy_lse.
  Tensor k_proxy;       ///< [Tk, Hpk, Dp]
  Tensor block_indices; ///< int32 [Hp, T, K]; absent in warmup_forward().
  Tensor out;           ///< Out, [T, Hq, D], dtype of q.
  Tensor lse;           ///< Out, [T, Hq], accumulation dtype, natural logarithm.
  Tensor proxy_lse;     ///< Out, [T, Hp], accumulation dtype; over the same keys as lse.
};

/// Tensors of proxy_kl().
struct KlParams {
  Problem problem;      ///< Uses fragments, block_size, top_k_blocks and both scales.
  Tensor q;             ///< [T, Hq, D]
  Tensor k;             ///< [Tk, Hkv, D]
  Tensor q_proxy;       ///< [T, Hp, Dp]
  Tensor k_proxy;       ///< [Tk, Hpk, Dp]
  Tensor block_indices; ///< int32 [Hp, T, K]; absent: all visible keys (warm-up).
  Tensor lse;           ///< [T, Hq], from the forward.
  Tensor proxy_lse;     ///< [T, Hp], from the forward.
  Tensor kl;            ///< Out, [T, Hp], nats, accumulation dtype; 0 for rows without a key.
};

/// Tensors of sparse_backward() and warmup_backward().
///
/// A gradient that is absent is not computed, and the work that only it needs is skipped.
/// dout absent: no main gradients. dkl absent: no proxy gradients. kl may be given with or without
/// dkl.
struct BackwardParams {
  Problem problem;      ///< As in the forward.
  Tensor q;             ///< [T, Hq, D]
  Tensor k;             ///< [Tk, Hkv, D]
  Tensor v;             ///< [Tk, Hkv, D]
  Tensor q_proxy;       ///< [T, Hp, Dp], needed when dkl or kl is given.
  Tensor k_proxy;       ///< [Tk, Hpk, Dp], needed when dkl or kl is given.
  Tensor block_indices; ///< int32 [Hp, T, K]; absent in warmup_backward().
  Tensor out;           ///< [T, Hq, D], needed with dout.
  Tensor lse;           ///< [T, Hq]
  Tensor proxy_lse;     ///< [T, Hp], needed when dkl or kl is given.
  Tensor dout;          ///< [T, Hq, D], gradient of out.
  Tensor dkl;           ///< [T, Hp], gradient of kl, accumulation dtype.
  Tensor dq;            ///< Out, [T, Hq, D]
  Tensor dk;            ///< Out, [Tk, Hkv, D]
  Tensor dv;            ///< Out, [Tk, Hkv, D]
  Tensor dq_proxy;      ///< Out, [T, Hp, Dp]
  Tensor dk_proxy;      ///< Out, [Tk, Hpk, Dp]
  Tensor kl;            ///< Out, optional, [T, Hp]: what proxy_kl() gives.
};

} // namespace thresher
