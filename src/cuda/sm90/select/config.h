// Constants of the Hopper selection: tile shapes, shared-memory map, barriers.
#pragma once

#include "cuda/portable/select/select.h"

#include <cstdint>

namespace thresher::cuda::sm90::select {

// A tile is 256 rows of (token, proxy head) on one proxy key head. Each of two warpgroups takes 128
// of them as two m64 products, so that the maximum of one hides behind the product of the other.
// kDim: Dp padded. kBlock: block size. kPlaces: candidates that a lane keeps of its row (16 to 64).
template <int kDim_, int kBlock_, int kPlaces_>
struct Config {
  static constexpr int kDim = kDim_, kBlock = kBlock_, kPlaces = kPlaces_;
  static constexpr int kRows = 256;
  static constexpr int kKeys = 128; // of a stage
  static constexpr int kConsumers = 2;
  static constexpr int kConsumerRows = kRows / kConsumers;
  static constexpr int kStages = kDim == 128 ? 5 : 8;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  // Both products have accumulators of their own, 64 registers each. Lists of 64 leave one set.
  static constexpr bool kTwoAtATime = kPlaces <= 32;
  // The CTA owns what its launch bound leaves each thread (168); a larger sum waits for ever.
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 168);

  static constexpr int kHalf = 64; // columns of a 128-byte swizzled row
  static constexpr int kQueryHalfBytes = kRows * kHalf * 2, kKeyHalfBytes = kKeys * kHalf * 2;
  static constexpr int kQueryBytes = kQueryHalfBytes * (kDim / kHalf);
  static constexpr int kKeyBytes = kKeyHalfBytes * (kDim / kHalf);

  // Blocks that end in a stage; 1 too where a block takes several.
  static constexpr int kOffers = kBlock < kKeys ? kKeys / kBlock : 1;
  static constexpr int kStagesPerBlock = kBlock > kKeys ? kBlock / kKeys : 1;
};

// What the consumers need to know of a unit of work, filled in by the producer.
struct UnitSlot {
  int32_t stages; // of keys; -1: no unit is left
  int32_t first_token, tokens, first_position;
  int32_t first_head, heads;
  int32_t split, first_block, end_block;
};

template <class C>
struct Shared {
  alignas(1024) uint8_t query[C::kQueryBytes];
  alignas(1024) uint8_t keys[C::kStages][C::kKeyBytes];
  alignas(16) UnitSlot unit;
  alignas(8) uint64_t query_full, query_empty;
  uint64_t keys_full[C::kStages], keys_empty[C::kStages];
  static constexpr int kLimit = 232448; // sm_90: 227 KB a CTA
};

struct Params {
  portable::SelectArgs args;
  // Tokens and keys of a batch row, for TMA coordinates; 0: the tensors are packed.
  int32_t token_rows, key_rows;
};

} // namespace thresher::cuda::sm90::select
