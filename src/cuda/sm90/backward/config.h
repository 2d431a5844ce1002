// Constants of the Hopper backward: tile shapes, shared-memory map, barriers, named barriers.
#pragma once

#include "cuda/common/view.h"
#include "cuda/index/index.h"
#include "cuda/sm90/backward/turns.cuh"

#include <cstdint>

namespace thresher::cuda::sm90::backward {

// A tile is 64 rows of (token, main head): 64 / kHeads tokens of one list, kHeads heads each. Its
// products with a block of 128 keys are computed with keys on M (S^T, dP^T), so that P^T and dS^T
// leave the accumulators as the register operands of dV and dK.
struct Config {
  static constexpr int kDim = 128;
  static constexpr int kKeys = 128;
  static constexpr int kRows = 64;
  static constexpr int kMostTokens = kRows / 4; // of a tile: the fewest heads are 4
  static constexpr int kStages = 2;             // tiles of Q and dO in flight
  static constexpr int kBlocks =
      2; // blocks of K and V: the next item's arrive under this one's work
  static constexpr int kConsumers = 2; // warpgroups; each owns 64 of the 128 keys
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  // The CTA owns what its launch bound leaves each thread (168); a larger sum waits for ever.
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 168);

  static constexpr int kHalf = 64;                          // columns of a 128-byte swizzled row
  static constexpr int kRowTileBytes = kRows * kDim * 2;    // Q or dO of a tile
  static constexpr int kBlockTileBytes = kKeys * kDim * 2;  // K or V of a block
  static constexpr int kScoreTileBytes = kKeys * kRows * 2; // dS^T
};

// What a consumer needs to know of a tile's rows, filled in by the producer.
struct RowConstants {
  float minus_lse[Config::kRows];   // -lse * log2(e)
  float minus_delta[Config::kRows]; // -<dout, out>
  int16_t last_key[Config::kRows];  // last visible key of the block; -1: none (row of padding)
  uint16_t token[Config::kRows];    // by token of the tile: token minus first token of the pass
  int8_t exponent[Config::kRows];   // dQ is accumulated as fp16, scaled by 2^exponent
};

struct ItemSlot {
  int32_t pairs; // tokens in the list; 0: no more work
  int32_t block_begin, key_begin, key_count;
  int32_t kv_head, first_head; // main heads [first_head, first_head + kHeads)
  int32_t part;                // which kv head of the proxy head
  uint32_t first_pair;         // of the pass, for the teacher's rows
};

struct Shared {
  alignas(1024) uint8_t blocks[Config::kBlocks][2][Config::kBlockTileBytes]; // K, V
  alignas(1024) uint8_t rows[Config::kStages][2][Config::kRowTileBytes];     // Q, dO
  alignas(1024) uint8_t scores[2][Config::kScoreTileBytes];                  // dS^T, by tile parity
  alignas(256) uint8_t head_mean[4][256]; // constant operand that averages a token's heads
  alignas(16) RowConstants constants[Config::kStages];
  alignas(16) ItemSlot items[Config::kBlocks];
  alignas(8) uint64_t block_full[Config::kBlocks], block_empty[Config::kBlocks];
  uint64_t rows_full[Config::kStages], rows_empty[Config::kStages];
  int32_t ticket[Config::kBlocks];
  int32_t masked[Config::kStages]; // the tile has a key that some row must not see
  // Deterministic only.
  Turn turns[Config::kBlocks];
  // By token of the tile, of its first head (see Params::dq); -1: filling.
  int32_t pieces[Config::kStages][Config::kMostTokens];
};
static_assert(sizeof(Shared) <= 232448, "shared memory of sm_90: 227 KB a CTA");

// Heads of a piece of partial dQ: an accumulator's 8 rows, or all that a token has.
template <int kHeads>
inline constexpr int kPieceRows = kHeads < 8 ? kHeads : 8;

// Named barriers (0 is __syncthreads).
enum NamedBarrier { kScoresWritten = 1, kTailCleared, kTicket };

struct Params {
  BlockIndex index;
  int32_t first_segment, last_segment; // work of this pass: segments [first, last)
  int32_t first_token;                 // of the pass; accumulators and row constants start there
  int32_t token_rows;                  // tokens of a batch row (packed: T), for TMA coordinates
  int32_t key_rows;                    // keys of a batch row
  int32_t q_heads, kv_heads, proxy_heads;
  int32_t parts;          // kv heads of one proxy head (1 unless Hp < Hkv)
  int32_t* next_item;     // work counter, zero at launch
  const float* minus_lse; // [tokens of the pass, Hq]
  const float* minus_delta;
  const int8_t* exponent;
  // Scaled, columns permuted (see epilogue.cuh): sums [tokens of the pass, Hq, 128]. Deterministic:
  // partial results, in pieces of the kPieceRows heads that a warp stores together,
  //   piece = (token of the pass * Hq + head) / kPieceRows * K + slot
  // and within a piece [128 / 32][kPieceRows][32].
  __half* dq;
  float* dk; // [Tk, Hkv, 128] accumulators, columns permuted; without softmax_scale
  float* dv;
  __half* teacher; // [parts][pairs of the pass][128] mean over heads of P; null: not wanted
  int64_t teacher_part_stride;
  float score_scale; // softmax_scale * log2(e)
  int32_t* turns;    // deterministic only: counters of (kv head, block row, warp)
};

} // namespace thresher::cuda::sm90::backward
