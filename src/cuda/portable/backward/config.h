// Constants of the portable backward: tile shapes, how warps share them, shared-memory map, and
// what the kernels are told.
#pragma once

#include "cuda/common/tile.cuh"
#include "cuda/common/view.h"
#include "cuda/index/index.h"

namespace thresher::cuda::portable::backward {

// A unit of work keeps kKeys keys of a block (K, V, and their gradients in registers) and streams
// the (token, head) rows that chose it past them, kRows at a time. Five products a tile:
//   S^T = K Q^T        dP^T = V dO^T       keys x rows, kScoreKeyWarps x kScoreRowWarps warps
//   dV += P^T dO       dK += dS^T Q        keys x columns, kKeyWarps x kColumnWarps warps
//   dQ = dS K                              rows x columns, kRowWarps x kQueryColumnWarps warps
// kWide: as many keys as registers hold; otherwise what 99 KB of shared memory hold.
template <int kDim_, bool kWide_>
struct MainConfig {
  static constexpr int kDim = kDim_;
  static constexpr bool kWide = kWide_;
  static_assert(kDim == 64 || kDim == 128 || kDim == 256, "other dimensions are padded to these");
  static constexpr int kKeys = kWide ? (kDim <= 128 ? 128 : 64) : (kDim <= 128 ? 64 : 32);
  static constexpr int kRows = kWide ? 64 : 32;
  static constexpr int kWarps = kKeys == 32 ? 4 : 8, kThreads = 32 * kWarps;
  static constexpr int kStages = !kWide && kDim == 256 ? 1 : 2; // tiles of Q and dO in flight
  // CTAs an SM, by registers. The narrow shapes leave room for two.
  static constexpr int kCtas = kWide ? 1 : 2;

  static constexpr int kScoreRowWarps = 2, kScoreKeyWarps = kWarps / kScoreRowWarps;
  static constexpr int kScoreKeys = kKeys / kScoreKeyWarps; // of a warp: 16 or 32
  static constexpr int kScoreRows = kRows / kScoreRowWarps; // of a warp: 16 or 32
  static constexpr int kKeyWarps = kKeys / 32, kColumnWarps = kWarps / kKeyWarps;
  static constexpr int kColumns = kDim / kColumnWarps;
  static constexpr int kRowWarps = kWarps == 8 ? 2 : 1, kQueryColumnWarps = kWarps / kRowWarps;
  static constexpr int kQueryRows = kRows / kRowWarps;
  static constexpr int kQueryColumns = kDim / kQueryColumnWarps;
  static_assert(kScoreKeys % 16 == 0 && kScoreRows % 16 == 0 && kColumns % 16 == 0 &&
                    kQueryRows % 16 == 0 && kQueryColumns % 16 == 0,
                "a warp works on whole 16x16 pieces");
  static_assert(kDim / 16 % 4 == 0 && kColumns / 16 <= 4 && kQueryColumns / 16 <= 4,
                "pieces of a warp stay in one swizzle group (see LaneAddress)");

  // The heads of a token stay within one warp's rows of S^T, which sums over them.
  static constexpr int kMaxHeads = kScoreRows;

  static constexpr int kBlockTileBytes = kKeys * kDim * 2; // K or V
  static constexpr int kRowTileBytes = kRows * kDim * 2;   // Q or dO
  static constexpr int kScoreTileBytes = kKeys * kRows * 2; // P^T or dS^T
};

// Largest number of heads on one tile row group, whatever the configuration.
inline constexpr int kHeadsOfWide = 32, kHeadsOfNarrow = 16;

// A row's facts, packed. Tokens are counted from the first of the pass.
inline constexpr int32_t kTokenMask = (1 << 24) - 1;
inline constexpr int32_t kQueryBad = 1 << 24;  // Q row or lse not finite: taken as 0, P is NaN
inline constexpr int32_t kOutputBad = 1 << 25; // dO row not finite: taken as 0, dS and P are NaN
inline constexpr int32_t kNoRow = -1;

template <class C>
struct MainShared {
  alignas(128) uint8_t k[C::kBlockTileBytes];
  alignas(128) uint8_t v[C::kBlockTileBytes];
  alignas(128) uint8_t q[C::kStages][C::kRowTileBytes];
  alignas(128) uint8_t dout[C::kStages][C::kRowTileBytes];
  alignas(128) uint8_t probability[C::kScoreTileBytes]; // P^T, [key][row]
  alignas(128) uint8_t gradient[C::kScoreTileBytes];    // dS^T
  // Rows of three tiles: being worked on, being loaded, being described.
  alignas(16) float2 constants[3][C::kRows]; // lse * log2(e), delta; see RowConstants
  int32_t token[3][C::kRows];                // token of the pass with flags, or kNoRow
  uint16_t reach[3][C::kRows];               // visible keys of the unit, and slot << 8
  uint8_t head[C::kRows];                    // of a row, from the unit's first
  uint32_t bad_keys[4];                      // keys whose K row is not finite, one bit each
  int32_t next_ticket;
};

// The teacher's rows are stored as fp16, times this: P >= 2^-39 / G does not vanish.
inline constexpr float kTeacherScale = 32768.f;

// lse of a row with a bad query: NaN. delta of a row with a bad dO: infinity (a NaN delta comes
// from out alone).
using RowConstants = float2;

// What a pass works on: tokens [first_token, first_token + tokens) and the items of its segments.
struct PassRange {
  int32_t first_token = 0, tokens = 0;
  const int32_t* first_item = nullptr; // null: 0
  const int32_t* last_item = nullptr;
};

template <class T>
struct MainParams {
  BlockIndex index;
  PassRange pass;
  const int64_t* pair_begin; // dense lists: the item's first pair; null: lists of the index
  int32_t q_heads, kv_heads, proxy_heads, dim;
  int32_t parts;             // kv heads (or groups of heads) that a proxy head is cut into, at most
  int32_t chunks, max_heads; // a kv head's heads of a proxy head come in chunks of max_heads
  int32_t key_tiles;         // units that a block's keys are cut into
  TensorView<const T> q, k, v, dout;
  const RowConstants* constants; // [tokens of the pass, Hq]
  int32_t* ticket;               // work counter, zero at launch
  float score_scale;             // softmax_scale * log2(e)

  // Gradients; a null pointer: not wanted. Accumulators are fp32 with padded head dimension and
  // permuted columns (see permuted_column).
  float* dq;        // [slots][tokens of the pass][Hq][kDim]
  int32_t dq_slots; // 1: reductions; otherwise every (slot, key tile) has a place of its own
  float *dk, *dv;   // [Tk][Hkv][kDim]
  TensorView<T> dk_out, dv_out; // where the only unit of a block stores directly
  float dk_scale;               // softmax_scale
  bool always_accumulate;       // dense lists: row_items does not count them

  __half* teacher;             // [parts][pairs of the pass][B], key pairs permuted; null: not wanted
  int64_t teacher_part_stride; // elements
  float teacher_scale;

  // Deterministic accumulation of dK and dV: turns taken per (group of proxy heads, block row).
  int32_t* turns; // null: any order
  int32_t turn_group;
};

} // namespace thresher::cuda::portable::backward
