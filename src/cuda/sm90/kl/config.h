// Constants of the Hopper KL rows: tile shapes, shared-memory map, barriers.
#pragma once

#include "cuda/common/view.h"
#include "cuda/index/index.h"

#include <cstdint>

namespace thresher::cuda::sm90::kl {

// A tile is 128 rows of (token, main head) of one list and one proxy row for each of its tokens.
// The products with a block of 128 keys have keys on M, so that the heads of a token, and the
// tokens of the proxy, lie within four lanes.
template <int kHeadsOfToken, int kWidth>
struct Config {
  static constexpr int kHeads = kHeadsOfToken; // main heads of a token: 4, 8 or 16
  static constexpr int kDim = 128;
  static constexpr int kProxyDim = kWidth; // 64 or 128
  static constexpr int kKeys = 128;
  static constexpr int kRows = 128;
  static constexpr int kTokens = kRows / kHeads;
  // What fits beside the keys; the tile in hand and two under way are enough for the L2's latency.
  static constexpr int kStages = kHeads == 4 ? 3 : 4;
  static constexpr int kConsumers = 2;   // warpgroups; each owns 64 of the 128 keys
  static constexpr int kProducers = 128; // threads
  static constexpr int kThreads = 128 * kConsumers + kProducers;
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
  // The CTA owns what its launch bound leaves each thread (168); a larger sum waits for ever.
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 168);

  static constexpr int kHalf = 64; // columns of a 128-byte swizzled row
  static constexpr int kKeyHalfBytes = kKeys * 128, kRowHalfBytes = kRows * 128;
  static constexpr int kProxyRowHalfBytes = kTokens * 128;
  static constexpr int kProxyHalves = kProxyDim / kHalf;
};

// Partial sums of a (token, slot): one for each warp's 16 keys, so that no warp waits for another.
inline constexpr int kPartials = 8;

// Where a token of a tile stands among the proxy's rows. The sum over a token's heads leaves token
// 4 m + 2 (c & 1) + (c >> 1) with lane c of a quad; as row 8 (m / 2) + 2 c + m % 2 of its tile, the
// lane that holds its teacher holds its student too. (Within eight: the three bits reversed.)
THRESHER_HOST_DEVICE int place_of(int token) {
  return (token & ~7) | (token & 1) << 2 | (token & 2) | (token >> 2 & 1);
}

// What the consumers need to know of a tile.
template <class C>
struct TileFacts {
  float lse[C::kRows]; // natural, by row
  // By place.
  float proxy_lse[C::kTokens];
  int32_t last_key[C::kTokens]; // last visible key of the block; -1: past the end of the list
  int64_t pair[C::kTokens];     // of kl_partial; -1: past the end of the list
};

template <class C>
struct Shared {
  alignas(1024) uint8_t keys[2 * C::kKeyHalfBytes];
  alignas(1024) uint8_t proxy_keys[C::kProxyHalves * C::kKeyHalfBytes];
  alignas(1024) uint8_t rows[C::kStages][2 * C::kRowHalfBytes];
  alignas(1024) uint8_t proxy_rows[C::kStages][C::kProxyHalves * C::kProxyRowHalfBytes];
  alignas(16) TileFacts<C> facts[C::kStages];
  alignas(8) uint64_t keys_full, keys_empty;
  uint64_t rows_full[C::kStages], rows_empty[C::kStages];
  int32_t tiles;     // of the item whose keys are there; 0: no more work
  int32_t ticket[2]; // by parity of the item
};
static_assert(sizeof(Shared<Config<4, 128>>) <= 232448, "shared memory of sm_90: 227 KB a CTA");
static_assert(sizeof(Shared<Config<8, 128>>) <= 232448);
static_assert(sizeof(Shared<Config<16, 128>>) <= 232448);

enum NamedBarrier { kTicket = 1 }; // 0 is __syncthreads

template <class T>
struct Params {
  BlockIndex index;
  int32_t first_segment, last_segment; // work of this pass: segments [first, last)
  int32_t first_token;                 // of the pass
  int32_t token_rows, key_rows;        // of a batch row, for TMA coordinates
  int32_t kv_heads, proxy_heads, proxy_kv_heads;
  int32_t* next_item; // work counter, zero at launch
  TensorView<const T> q_proxy;
  TensorView<const float> lse, proxy_lse;
  float* kl_partial;                    // [tokens of the pass, Hp, K, kPartials]
  float score_scale, proxy_score_scale; // times log2(e)
};

} // namespace thresher::cuda::sm90::kl
