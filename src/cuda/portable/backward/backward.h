// Portable backward of main attention and proxy KL, sparse and dense (warm-up). The operations are
// portable::sparse_backward and portable::warmup_backward of cuda/kernel.h; this is what they are
// made of. See docs/kernels/backward_portable.md.
//
// Tokens are worked on in passes, so that what is kept of them is bounded:
//   prepare_rows, prepare_proxy_rows   lse, delta; clears dQ
//   main                               dK, dV, dQ, teacher's rows
//   proxy                              dK_proxy, dQ_proxy, partial sums of the KL rows
//   finish_rows, finish_kl             sums and converts what belongs to the pass's tokens
// and finish_keys after the last one.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/index/geometry.h"
#include "cuda/portable/backward/config.h"

namespace thresher::cuda::portable::backward {

// Explicitly instantiated in main_*.cu and proxy_*.cu.
template <class T, int kDim>
struct MainKernel {
  static KernelPlan plan();
  static void run(const MainParams<T>& params, const KernelPlan& plan, cudaStream_t stream);
};
template <class T, int kDim>
struct ProxyKernel {
  static KernelPlan plan();
  static void run(const ProxyParams<T>& params, const KernelPlan& plan, cudaStream_t stream);
};

template <class Kernel>
KernelPlan plan_kernel(Kernel kernel, int threads, size_t shared_bytes, int keys, int max_heads) {
  KernelPlan plan;
  plan.threads = threads;
  plan.keys = keys;
  plan.max_heads = max_heads;
  plan.shared_bytes = shared_bytes;
  if (shared_bytes <= static_cast<size_t>(device_facts().shared_bytes_per_block))
    plan.blocks = device_facts().sm_count * resident_blocks(kernel, threads, shared_bytes);
  return plan;
}

// --- row constants
// ----------------------------------------------------------------------------------
struct PrepareRows {
  BlockIndex index;
  int32_t first_token, tokens, heads, dim;
  TensorView<const float> lse;
  RowConstants* constants; // [tokens, heads]
  float* clear;            // [tokens, heads, padded_dim], set to 0; null: nothing
  int32_t padded_dim;
};
// out, dout: may be absent.
template <class T>
void prepare_rows(const PrepareRows& args, const TensorView<const T>& q,
                  const TensorView<const T>& out, const TensorView<const T>& dout,
                  cudaStream_t stream);

struct PrepareProxyRows {
  BlockIndex index;
  int32_t first_token, tokens, heads, dim, group; // group: G
  TensorView<const float> lse, dkl;               // dkl may be absent
  const RowConstants* main;                       // [tokens, heads * group]
  const float* dkl_bound;                         // max |dkl|; null: dkl is taken as it is
  ProxyConstants* constants;                      // [tokens, heads]
  float* clear; // [tokens, heads, padded_dim], set to 0; null: nothing
  int32_t padded_dim;
};
template <class T>
void prepare_proxy_rows(const PrepareProxyRows& args, const TensorView<const T>& q,
                        cudaStream_t stream);

// bound = max |dkl| over finite values of tokens with a key. Zero before.
void bound_dkl(const TensorView<const float>& dkl, const BlockIndex& index, int32_t heads,
               float* bound, cudaStream_t stream);

// Zeros, unless the index is idle.
void clear_sums(const BlockIndex& index, void* from, size_t bytes, cudaStream_t stream);

// The power of two that brings dkl times a difference of probabilities into the middle of fp16's
// range, from max |dkl|.
THRESHER_HOST_DEVICE float common_scale(float bound) {
  if (!(bound > 0.f))
    return 1.f;
  int exponent;
  frexpf(bound, &exponent); // bound < 2^exponent
  const int wanted = 14 - exponent;
  return ldexpf(1.f, wanted < -100 ? -100 : wanted > 100 ? 100 : wanted);
}

// --- results
// ----------------------------------------------------------------------------------------
// How many partial sums a (token, head) has: all visible blocks of a dense pass, or the token's
// slots; times key tiles. slots 1: one, where reductions met.
struct PartialCount {
  int32_t slots = 1, key_tiles = 1;
  bool dense = false;
};

struct FinishRows {
  BlockIndex index;
  int32_t first_token, tokens, heads, dim, padded_dim;
  int32_t heads_per_proxy; // heads that share a proxy head's slots
  PartialCount count;
  const float* partial; // [slots * key_tiles, tokens, heads, padded_dim]
  float scale;
  const float* dkl_bound; // see PrepareProxyRows; null: none
};
template <class T>
void finish_rows(const FinishRows& args, const TensorView<T>& to, cudaStream_t stream);

struct FinishKl {
  BlockIndex index;
  int32_t first_token, tokens, proxy_heads;
  PartialCount count;
  const float* partial; // [tokens, Hp, slots, key_tiles]
  TensorView<float> kl;
};
void finish_kl(const FinishKl& args, cudaStream_t stream);

struct FinishKeys {
  BlockIndex index;
  int32_t keys, owners, dim, padded_dim; // owners: kv heads or proxy key heads
  int32_t q_heads, proxy_heads;          // see proxies_of; for proxy key heads q_heads = Hp
  bool always_accumulate;                // the accumulator holds all; otherwise row_items decides
  const float* accumulator;              // [keys, owners, padded_dim]
  float scale;
  const float* dkl_bound;
};
template <class T>
void finish_keys(const FinishKeys& args, const TensorView<T>& to, cudaStream_t stream);

// --- dense lists
// -------------------------------------------------------------------------------------
// The warm-up's work, one pass of tokens at a time: for every proxy head, fragment and block that a
// token of the pass sees, an item with the consecutive tokens that see it. entry_begin is the first
// of them, counted from first_token; pairs of an item are as many as the fragment has tokens in the
// pass.
struct DenseItems {
  WorkItem* items;     // [dense_item_bound()]
  int64_t* pair_begin; // [dense_item_bound()]
  int32_t* count;      // [1]
  int32_t* tickets;    // [2] set to 0
  int32_t* item_base;  // [fragments + 1] of one proxy head
  int64_t* pair_base;  // [fragments + 1]
  int32_t proxy_heads, block_size;
};
// Most items of one proxy head in a pass.
int64_t dense_item_bound(const Problem& problem, const Shapes& shapes, int32_t block_size);
// window: number of the pass, whose tokens are one window of the index.
void list_dense_items(const Geometry& geometry, const DenseItems& to, int32_t first_token,
                      int32_t tokens, int32_t window, cudaStream_t stream);

// --- the operation
// -----------------------------------------------------------------------------------
// How another kernel embeds the call: as its way out for inputs that are not finite.
struct Embedding {
  const BlockIndex* index = nullptr; // already built, and read only; null: the call builds its own
  const int32_t* gate = nullptr;     // no result is touched where it points at zero
  int64_t pass_bytes = int64_t{3} << 28; // of what is kept of a pass's tokens: 768 MiB
};
size_t backward_workspace_size(const BackwardParams& params, const Shapes& shapes,
                               const Embedding& embedding);
void run_backward(const BackwardParams& params, const Shapes& shapes, const Workspace& workspace,
                  const Embedding& embedding, cudaStream_t stream);

} // namespace thresher::cuda::portable::backward
