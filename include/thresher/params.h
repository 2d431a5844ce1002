// Plain structs that describe a problem. No ownership, no framework.
//
// Names of sizes (see docs/design.md):
//   T, Tk     query tokens, key tokens            Hq, Hkv   main query heads, key/value heads
//   Hp, Hpk   proxy query heads, proxy key heads  D, Dp     head dimension, main and proxy
//   B         block size in keys                  K         top_k_blocks
//   G         Hq / Hp, main query heads that share one proxy head's selection
#pragma once

#include <cstddef>
#include <cstdint>

namespace thresher {

enum class DType : int32_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3, kInt32 = 4 };

enum class DeviceType : int32_t { kCpu = 0, kCuda = 1 };

// Where an operation runs. `stream` is a cudaStream_t (null: the default stream); the CPU ignores
// it.
struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;
  void* stream = nullptr;
};

// A strided view. Strides are in elements and may be any 64-bit value, 0 included for inputs.
//
// Token tensors come in two forms, which a call may not mix:
//   packed   rank 3 [T, heads, dim]
//   batched  rank 4 [N, S, heads, dim]; token t is row t / S, position t % S, and T = N * S.
// The last dimension must be contiguous. Layouts such as [N, H, S, D] are the same data under other
// strides. `data == nullptr` means "not given".
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int32_t rank = 0;
  int64_t shape[4] = {0, 0, 0, 0};
  int64_t stride[4] = {0, 0, 0, 0};

  explicit operator bool() const noexcept { return data != nullptr; }
};

// The batch as runs of consecutive queries of one document. Query i of fragment f is token
// q_begin[f] + i and has position k_len[f] - (q_begin[f+1] - q_begin[f]) + i in its document, whose
// keys start at key row k_begin[f]; it sees keys 0..position. Several fragments may share a k_begin
// (context parallelism). Arrays live on the device of the tensors.
//   plain packed batch      q_begin = cu_seqlens, k_begin = k_len = nullptr
//   no fragments (count 0)  rank 3: one document; rank 4: every batch row is a document
// Tokens from q_begin[count] on are padding: never read, their results are zero (lse -inf, ids -1).
struct Fragments {
  int64_t count = 0;
  const int32_t* q_begin = nullptr; // [count + 1], non-decreasing, q_begin[0] == 0
  const int32_t* k_begin = nullptr; // [count]; null: q_begin[f]
  const int32_t* k_len = nullptr;   // [count]; null: q_begin[f + 1] - q_begin[f]
};

struct Problem {
  Fragments fragments;
  int32_t block_size = 128;   // B: 1 .. 1024 on the CPU
  int32_t top_k_blocks = 16;  // K, forced blocks included; init_blocks + local_blocks <= K
  int32_t init_blocks = 0;    // first blocks of a document that every token keeps
  int32_t local_blocks = 1;   // last visible blocks that every token keeps, its own included
  double softmax_scale = 0;   // used as given; the usual value is D ** -0.5
  double proxy_scale = 0;     // used as given; the usual value is Dp ** -0.5
  bool deterministic = false; // bitwise equal from run to run; the CPU always is
};

// Scratch memory on the device, given by the caller; its size comes from *_workspace_size with the
// same params. 256-byte aligned. Contents need not survive between calls.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// Results shaped per token and head have rank 2 [T, heads] (packed) or 3 [N, S, heads] (batched).
// They are fp32, or fp64 when the inputs are fp64 ("accumulation dtype").

struct SelectParams {
  Problem problem;
  Tensor q_proxy;       // [T, Hp, Dp]
  Tensor k_proxy;       // [Tk, Hpk, Dp]
  Tensor block_indices; // out, int32 [Hp, T, K] (batched [N, Hp, S, K]); ascending, -1 to the right
};

struct ForwardParams {
  Problem problem;
  Tensor q;             // [T, Hq, D]
  Tensor k;             // [Tk, Hkv, D]
  Tensor v;             // [Tk, Hkv, D]
  Tensor q_proxy;       // [T, Hp, Dp]; optional together with k_proxy and proxy_lse
  Tensor k_proxy;       // [Tk, Hpk, Dp]
  Tensor block_indices; // int32 [Hp, T, K]; absent in warmup_forward
  Tensor out;           // out, [T, Hq, D], dtype of q
  Tensor lse;           // out, [T, Hq], accumulation dtype, natural logarithm
  Tensor proxy_lse;     // out, [T, Hp], accumulation dtype; over the same keys as lse
};

struct KlParams {
  Problem problem;
  Tensor q;             // [T, Hq, D]
  Tensor k;             // [Tk, Hkv, D]
  Tensor q_proxy;       // [T, Hp, Dp]
  Tensor k_proxy;       // [Tk, Hpk, Dp]
  Tensor block_indices; // int32 [Hp, T, K]; absent: all visible keys (warm-up)
  Tensor lse;           // [T, Hq]
  Tensor proxy_lse;     // [T, Hp]
  Tensor kl;            // out, [T, Hp], accumulation dtype; 0 for padding and rows without a key
};

// A gradient that is absent is not computed, and the work that only it needs is skipped.
// dout absent: no main gradients. dkl absent: no proxy gradients. kl: see KlParams; may be given
// with or without dkl.
struct BackwardParams {
  Problem problem;
  Tensor q, k, v;          // as in ForwardParams
  Tensor q_proxy, k_proxy; // needed when dkl or kl is given
  Tensor block_indices;    // absent in warmup_backward
  Tensor out;              // [T, Hq, D], needed with dout
  Tensor lse;              // [T, Hq]
  Tensor proxy_lse;        // [T, Hp], needed when dkl or kl is given
  Tensor dout;             // [T, Hq, D], gradient of out
  Tensor dkl;              // [T, Hp], gradient of kl, accumulation dtype
  Tensor dq;               // out, [T, Hq, D]
  Tensor dk, dv;           // out, [Tk, Hkv, D]
  Tensor dq_proxy;         // out, [T, Hp, Dp]
  Tensor dk_proxy;         // out, [Tk, Hpk, Dp]
  Tensor kl;               // out, optional, [T, Hp]
};

} // namespace thresher
