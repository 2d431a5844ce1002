// Matrix products of one warp between swizzled tiles in shared memory (tile.cuh), on mma.sync.
#pragma once

#include "cuda/common/tile.cuh"

namespace thresher::cuda::portable::backward {

// Which 8x8 matrices of a 16x16 piece the lanes of an ldmatrix_x4 point at: lane l gives row
// (l & 15) and chunk l >> 4 of the piece, or row (l & 7) + 8 (l >> 4) and chunk (l >> 3) & 1.
//   operand A as stored, operand B stored [k][n] and read transposed   -> kRowsFirst
//   operand A read transposed from [k][m], operand B stored [n][k]     -> kChunksFirst
enum class Lanes { kRowsFirst, kChunksFirst };

// A lane's addresses in a tile of rows of kDim values. The 16 columns from 16 * piece on of the
// rows from a multiple of 16: at(piece) + row * kRowBytes. Within a swizzle group the piece only
// flips address bits, so one register serves all of them.
template <int kDim, Lanes kLanes>
class LaneAddress {
  using T = Tile<kDim>;
  static constexpr int kPieces = T::kGroup / 2; // pieces in a swizzle group

 public:
  static constexpr int kRowBytes = T::kRowBytes;

  __device__ __forceinline__ LaneAddress(uint32_t tile, int first_row, int first_piece, int lane) {
    const int row = kLanes == Lanes::kRowsFirst ? lane & 15 : (lane & 7) + ((lane >> 4) << 3);
    const int chunk = kLanes == Lanes::kRowsFirst ? lane >> 4 : (lane >> 3) & 1;
    at_ = tile + T::offset(first_row + row, 2 * first_piece + chunk);
  }
  // The same place in a tile that lies `bytes` (a multiple of 128) further on.
  __device__ __forceinline__ LaneAddress operator+(uint32_t bytes) const {
    LaneAddress moved = *this;
    moved.at_ += bytes;
    return moved;
  }
  // piece: a constant after unrolling; first_piece + piece must not carry out of the swizzle group
  // unless first_piece is a multiple of it.
  __device__ __forceinline__ uint32_t operator()(int piece) const {
    return (at_ ^ ((piece % kPieces) << 5)) + (piece / kPieces) * (T::kGroup * 16);
  }

 private:
  uint32_t at_;
};

// acc (16 kM rows x 16 kN columns) += A B over 16 kK. a(m, k) and b(n, k) are the lane's addresses
// of the 16x16 pieces.
template <class T, int kM, int kN, int kK, bool kTransposeA, bool kTransposeB, class A, class B>
__device__ __forceinline__ void multiply(float (&acc)[kM][2 * kN][4], A&& a, B&& b) {
#pragma unroll
  for (int k = 0; k < kK; ++k) {
    uint32_t left[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
      if constexpr (kTransposeA)
        ptx::ldmatrix_x4_trans(left[m], a(m, k));
      else
        ptx::ldmatrix_x4(left[m], a(m, k));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      uint32_t right[4];
      if constexpr (kTransposeB)
        ptx::ldmatrix_x4_trans(right, b(n, k));
      else
        ptx::ldmatrix_x4(right, b(n, k));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma<T>(acc[m][2 * n], left[m], right[0], right[1]);
        ptx::mma<T>(acc[m][2 * n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        acc[m][n][i] = 0.f;
}

} // namespace thresher::cuda::portable::backward
