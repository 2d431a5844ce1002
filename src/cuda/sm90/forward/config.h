// Constants of the Hopper sparse forward: tile shapes, shared-memory map, barriers.
#pragma once

#include "cuda/common/view.h"
#include "cuda/index/index.h"

#include <cstdint>

namespace thresher::cuda::sm90::forward {

// A tile is 64 rows of (token, main head): 64 / kHeads tokens of one list, kHeads heads each. One
// warpgroup takes it from S to the stored partial result; three warpgroups work on three tiles, so
// that the softmax of one hides behind the products of the others.
struct Config {
  static constexpr int kDim = 128;
  static constexpr int kKeys = 128;
  static constexpr int kRows = 64;
  static constexpr int kConsumers = 3; // warpgroups
  static constexpr int kStages = 6;    // tiles of Q in flight, a multiple of kConsumers
  static constexpr int kBlocks = 2;    // blocks of K and V
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 152, kProducerRegisters = 56;
  // The CTA owns what its launch bound leaves each thread (128); a larger sum waits for ever.
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 128);

  static constexpr int kHalf = 64; // columns of a 128-byte swizzled row
  static constexpr int kRowTileBytes = kRows * kDim * 2;
  static constexpr int kBlockTileBytes = kKeys * kDim * 2;
};

enum TileKind : int32_t { kEnd, kEmpty, kFull, kMasked };

// What a consumer needs to know of a tile, filled in by the producer.
struct TileSlot {
  int32_t kind;
  int32_t item;                    // running number of the work item; its K and V: item % kBlocks
  int16_t last_key[Config::kRows]; // last visible key of the block; -1: filling
  int32_t partial[Config::kRows];  // by token of the tile: its piece of partial results, first head
};

enum NamedBarrier { kTicket = 1 }; // 0 is __syncthreads

struct Shared {
  alignas(1024) uint8_t blocks[Config::kBlocks][2][Config::kBlockTileBytes]; // K, V
  alignas(1024) uint8_t rows[Config::kStages][Config::kRowTileBytes];        // Q
  alignas(16) TileSlot tiles[Config::kStages];
  alignas(8) uint64_t block_full[Config::kBlocks], block_empty[Config::kBlocks];
  uint64_t rows_full[Config::kStages], rows_empty[Config::kStages];
  int32_t ticket[2]; // by parity of the item
  uint64_t tail;     // K and V of a document's last block have landed and wait for their cleaning
};
static_assert(sizeof(Shared) <= 232448, "shared memory of sm_90: 227 KB a CTA");

// Heads of a piece of partial results: an mma fragment's 8 rows, or all that a token has.
template <int kHeads>
inline constexpr int kPieceRows = kHeads < 8 ? kHeads : 8;

struct Params {
  BlockIndex index;
  int32_t first_segment, last_segment; // work of this pass
  int32_t first_token;
  int32_t token_rows, key_rows; // tokens and keys of a batch row, for TMA coordinates
  int32_t q_heads, kv_heads;
  int32_t parts;      // kv heads of one proxy head (1 unless Hp < Hkv)
  int32_t* next_item; // work counter, zero at launch
  // Partial results of a pass, in pieces of the kPieceRows heads that a warp stores together:
  //   piece = (token of the pass * Hq + head) / kPieceRows * K + slot
  void* partial;      // [pieces][4][kPieceRows][4] x 16 bytes, see store_partial
  float2* statistics; // [pieces][kPieceRows] offset m and sum l of exp2(score - m)
  float score_scale;  // softmax_scale * log2(e)
};

} // namespace thresher::cuda::sm90::forward
