// Constants of the proxy's backward kernel: tile shapes, shared-memory map, barriers.
#pragma once

#include "cuda/common/view.h"
#include "cuda/index/index.h"
#include "cuda/sm90/backward/turns.cuh"

#include <cstdint>

namespace thresher::cuda::sm90::backward {

// A proxy row is one row a token, a sixteenth of the main attention's work at 16 heads. As in the
// main kernel the keys are on M. Everything in [brackets] of 16 keys is in the teacher's order:
// place 4 c + 2 i + e holds key 8 i + 2 c + e (see proxy_key), since the main kernel writes its
// rows so and the order of keys is free as long as all operands agree.
template <int kWidth>
struct ProxyConfig {
  static constexpr int kDim = kWidth; // 64 or 128
  static constexpr int kKeys = 128;
  static constexpr int kTokens = 64; // of a tile
  static constexpr int kStages = 3;
  static constexpr int kBlocks = 2; // blocks of keys: the next item's arrive under this one's work
  static constexpr int kConsumers = 2;   // warpgroups; each owns 64 of the 128 keys
  static constexpr int kProducers = 128; // threads
  static constexpr int kThreads = 128 * kConsumers + kProducers;
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= 3 * 168);

  static constexpr int kHalves = kDim / 64; // 128-byte swizzled rows a row
  static constexpr int kKeyHalfBytes = kKeys * 128, kRowHalfBytes = kTokens * 128;
  static constexpr int kTeacherHalfBytes = kTokens * 128; // 64 of the 128 keys
};

// What the consumers need to know of a tile's tokens.
template <class C>
struct ProxyTokens {
  float minus_lse[C::kTokens]; // -proxy_lse, natural
  float dkl[C::kTokens];
  int32_t last_key[C::kTokens]; // last visible key of the block; -1: past the end of the list
  int32_t row[C::kTokens];      // of dq_proxy and kl_partial: (token - first token) * Hp + head
  int32_t slot[C::kTokens];
};

template <class C>
struct ProxyShared {
  alignas(1024) uint8_t keys[C::kBlocks][C::kHalves * C::kKeyHalfBytes];
  alignas(1024) uint8_t rows[C::kStages][C::kHalves * C::kRowHalfBytes];
  alignas(1024) uint8_t teacher[C::kStages][2 * C::kTeacherHalfBytes]; // [token][key], fp16
  alignas(1024) uint8_t ds[2][C::kKeys * C::kTokens * 2];              // dS^T, by tile parity
  alignas(16) ProxyTokens<C> tokens[C::kStages];
  float kl[2][4 * C::kConsumers][C::kTokens]; // a warp's 16 keys, by tile parity
  alignas(8) uint64_t keys_full[C::kBlocks], keys_empty[C::kBlocks];
  uint64_t rows_full[C::kStages], rows_empty[C::kStages];
  // Deterministic only.
  int32_t ticket[C::kBlocks]; // of the next item, for the producers
  int32_t item[C::kBlocks];   // for the consumers
};
static_assert(sizeof(ProxyShared<ProxyConfig<128>>) <= 232448);

enum ProxyNamedBarrier { kProxyScoresWritten = 1, kProxyTicket };

template <class T>
struct ProxyParams {
  BlockIndex index;
  int32_t first_segment, last_segment, first_token;
  int32_t proxy_heads, proxy_kv_heads;
  TensorView<const T> q_proxy, k_proxy;
  TensorView<const float> proxy_lse, dkl; // dkl.data null: values only
  // Zero at launch, columns permuted as dK's (see epilogue.cuh); null: not wanted.
  float* dq_proxy;   // [tokens of the pass, Hp, Dp]; deterministic: partial, [.., Hp, K, Dp]
  float* dk_proxy;   // [Tk, Hpk, Dp]
  float* kl_partial; // [tokens of the pass, Hp, K]; null: not wanted
  float scale;       // proxy_scale
  // Deterministic only.
  int32_t* next_item; // work counter, zero at launch
  int32_t* turns;     // counters of (proxy key head, block row, warp)

#if defined(__CUDACC__)
  __device__ __forceinline__ int first_item() const {
    return __ldg(index.segment_items + first_segment);
  }
  __device__ __forceinline__ int last_item() const {
    return __ldg(index.segment_items + last_segment);
  }
  // Pair of the pass at which an item's list starts.
  __device__ __forceinline__ int64_t first_pair(const WorkItem& item) const {
    const int64_t segment =
        static_cast<int64_t>(item.window) * index.proxy_heads + item.proxy_head - first_segment;
    return segment * index.window_tokens * index.top_k + item.entry_begin;
  }
  __device__ __forceinline__ int key_head(const WorkItem& item) const {
    return item.proxy_head / (proxy_heads / proxy_kv_heads);
  }
#endif
};

#if defined(__CUDACC__)
// Key of the block at a place of the teacher's order.
__device__ __forceinline__ int proxy_key(int place) {
  return (place & ~15) | (place & 2) << 2 | (place >> 1 & 6) | (place & 1);
}
#endif

} // namespace thresher::cuda::sm90::backward
