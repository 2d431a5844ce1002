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
// Shapes fit 99 KB of shared memory (sm_86, sm_89, sm_120), two CTAs an SM where there is more.
template <int kDim_>
struct MainConfig {
  static constexpr int kDim = kDim_;
  static_assert(kDim == 64 || kDim == 128 || kDim == 256, "other dimensions are padded to these");
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;
  static constexpr int kRows = 32;
  static constexpr int kWarps = kKeys == 32 ? 4 : 8, kThreads = 32 * kWarps;
  static constexpr int kStages = kDim == 256 ? 1 : 2; // tiles of Q and dO in flight
  static constexpr int kCtas = 2;                     // an SM, by registers

  static constexpr int kScoreRowWarps = 2, kScoreKeyWarps = kWarps / kScoreRowWarps;
  static constexpr int kScoreKeys = kKeys / kScoreKeyWarps;
  static constexpr int kScoreRows = kRows / kScoreRowWarps;
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

  static constexpr int kBlockTileBytes = kKeys * kDim * 2;  // K or V
  static constexpr int kRowTileBytes = kRows * kDim * 2;    // Q or dO
  static constexpr int kScoreTileBytes = kKeys * kRows * 2; // P^T or dS^T
};

// The proxy's kernel: rows are tokens, and S = Q K^T has them on the rows of the products, as the
// teacher's rows lie in memory. dQ = dS K and dK += dS^T Q follow.
template <int kDim_>
struct ProxyConfig {
  static constexpr int kDim = kDim_;
  static_assert(kDim == 64 || kDim == 128 || kDim == 256, "other dimensions are padded to these");
  static constexpr int kKeys = 64, kRows = 32;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kStages = 2;
  static constexpr int kCtas = 2;

  static constexpr int kScoreRowWarps = 2, kScoreKeyWarps = 4;
  static constexpr int kScoreRows = kRows / kScoreRowWarps, kScoreKeys = kKeys / kScoreKeyWarps;
  static constexpr int kKeyWarps = kKeys / 32, kColumnWarps = kWarps / kKeyWarps;
  static constexpr int kColumns = kDim / kColumnWarps;
  static constexpr int kRowWarps = 2, kQueryColumnWarps = 4;
  static constexpr int kQueryRows = kRows / kRowWarps, kQueryColumns = kDim / kQueryColumnWarps;
};

// A row's facts, packed. Tokens are counted from the first of the pass.
inline constexpr int32_t kTokenMask = (1 << 24) - 1;
inline constexpr int32_t kQueryBad = 1 << 24;  // Q row or lse not finite: taken as 0, P is NaN
inline constexpr int32_t kOutputBad = 1 << 25; // dO row not finite: taken as 0, dS and P are NaN
inline constexpr int32_t kNoRow = -1;

// The rows of three tiles: being worked on, being loaded, being described.
template <int kRows, class Constants>
struct RowRing {
  alignas(16) Constants constants[3][kRows];
  int32_t token[3][kRows];  // token of the pass with flags, or kNoRow
  uint16_t reach[3][kRows]; // visible keys of the unit, and slot << 8
  uint8_t head[kRows];      // of a row, from the unit's first
};

template <class C>
struct MainShared {
  alignas(128) uint8_t k[C::kBlockTileBytes];
  alignas(128) uint8_t v[C::kBlockTileBytes];
  alignas(128) uint8_t q[C::kStages][C::kRowTileBytes];
  alignas(128) uint8_t dout[C::kStages][C::kRowTileBytes];
  alignas(128) uint8_t probability[C::kScoreTileBytes]; // P^T, [key][row]
  alignas(128) uint8_t gradient[C::kScoreTileBytes];    // dS^T
  RowRing<C::kRows, float2> rows;                       // see RowConstants
  uint32_t bad_keys[4]; // keys whose K row is not finite, one bit each
  int32_t next_ticket;
};

template <class C>
struct ProxyShared {
  alignas(128) uint8_t k[C::kKeys * C::kDim * 2];
  alignas(128) uint8_t q[C::kStages][C::kRows * C::kDim * 2];
  alignas(128) uint8_t gradient[C::kRows * C::kKeys * 2]; // dS, [token][key]
  RowRing<C::kRows, float4> rows;                         // see ProxyConstants
  float kl[C::kScoreKeyWarps][C::kRows];
  uint32_t bad_keys[4];
  int32_t next_ticket;
};

// The teacher's rows are stored as floats times this.
inline constexpr float kTeacherScale = 32768.f;
// Probabilities are summed over heads as the sum of two fp16 numbers, times this.
inline constexpr float kPackScale = 16384.f;

// lse of a row with a bad query: NaN. delta of a row with a bad dO: infinity (a NaN delta comes
// from out alone).
using RowConstants = float2;

// What a pass works on: tokens [first_token, first_token + tokens) and the items of its segments.
struct PassRange {
  int32_t first_token = 0, tokens = 0;
  const int32_t* first_item = nullptr; // null: 0
  const int32_t* last_item = nullptr;
};

// What the main and the proxy kernel have in common.
struct WorkParams {
  BlockIndex index;
  PassRange pass;
  const int64_t* pair_begin =
      nullptr;               // dense lists: the item's first pair; null: lists of the index
  int32_t* ticket = nullptr; // work counter, zero at launch
  int32_t key_tiles = 1;     // units that a block's keys are cut into
  int32_t dim = 0;           // as given
  // Rows of dQ: 1: reductions; otherwise each of this many slots and key tiles has its own place.
  int32_t slots = 1;
  // Turns taken per (group of proxy heads, block row) for sums in a fixed order; null: any order.
  int32_t* turns = nullptr;
  int32_t turn_group = 1;
  bool always_accumulate = false; // several passes or units share a block, whatever row_items says
};

// In both, a null gradient is not wanted. Accumulators are fp32 with padded head dimension and
// permuted columns (see permuted_column).
template <class T>
struct MainParams : WorkParams {
  int32_t q_heads, kv_heads, proxy_heads;
  int32_t parts;             // groups of heads that a proxy head is cut into, at most
  int32_t chunks, max_heads; // a kv head's heads of a proxy head come in chunks of max_heads
  TensorView<const T> q, k, v, dout;
  const RowConstants* constants; // [tokens of the pass, Hq]
  float score_scale;             // softmax_scale * log2(e)

  float* dq;                    // [slots][tokens of the pass][Hq][kDim]
  float *dk, *dv;               // [Tk][Hkv][kDim]
  TensorView<T> dk_out, dv_out; // where the only unit of a block stores directly
  float dk_scale;               // softmax_scale

  float* teacher;              // [parts][pairs of the pass][B], keys permuted; null: not wanted
  int64_t teacher_part_stride; // elements
  float teacher_scale;         // kTeacherScale / (kPackScale * G)
};

// proxy_lse * log2(e) (NaN: the query is bad), dkl times a common scale, 0 or NaN to add to the
// teacher.
using ProxyConstants = float4;

template <class T>
struct ProxyParams : WorkParams {
  int32_t proxy_heads, proxy_kv_heads;
  int32_t parts;
  TensorView<const T> q, k;
  const ProxyConstants* constants; // [tokens of the pass, Hp]
  float score_scale;               // proxy_scale * log2(e)

  const float* teacher;
  int64_t teacher_part_stride;

  bool gradients;         // dkl is given
  float* dq;              // [slots][tokens of the pass][Hp][kDim]
  float* dk;              // [Tk][Hpk][kDim]
  TensorView<T> dk_out;   // where the only unit of a block stores directly
  float dk_scale;         // proxy_scale
  const float* dkl_bound; // see PrepareProxyRows; null: none

  float* kl_partial; // [tokens of the pass][Hp][kl_slots][key_tiles]; null: not wanted
  int32_t kl_slots;
};

// How a kernel is launched on this device.
struct KernelPlan {
  int32_t blocks = 0; // 0: it needs more shared memory than there is
  int32_t threads = 0, keys = 0, max_heads = 1;
  size_t shared_bytes = 0;
};

} // namespace thresher::cuda::portable::backward
