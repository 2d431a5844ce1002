// Tiles of 16-bit rows in shared memory, swizzled so that ldmatrix and 16-byte copies meet no bank
// conflicts, and their asynchronous loads.
#pragma once

#include "cuda/common/ptx.cuh"

namespace thresher::cuda {

// A tile of rows of kDim 16-bit values without padding. Within a group of eight 16-byte chunks
// (four where kDim is an odd multiple of 32: such rows already alternate between the halves of the
// banks) chunk c of row r lies at place c ^ flip(r): eight consecutive rows then use all 32 banks.
template <int kDim>
struct Tile {
  static_assert(kDim % 32 == 0, "rows must be whole groups of four 16-byte chunks");
  static constexpr int kChunks = kDim / 8;
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : 4;

  __device__ static __forceinline__ int flip(int row) {
    return kGroup == 8 ? (row & 7) : ((row >> 1) & 3);
  }
  __device__ static __forceinline__ uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ flip(row)) << 4));
  }
};

// A lane's ldmatrix_x4 addresses in a tile, for 16 rows from a multiple of 8 and 16 columns from
// 16 * k: `operator()(k)`, plus row * Tile::kRowBytes, plus the tile's base. What depends on the
// lane is computed once; the rest folds into the instruction's immediate offset.
template <int kDim>
class TileLane {
  static constexpr int kVariants = Tile<kDim>::kGroup / 2;

 public:
  __device__ __forceinline__ TileLane(int lane_row, int lane_chunk) {
#pragma unroll
    for (int i = 0; i < kVariants; ++i)
      at_[i] = Tile<kDim>::offset(lane_row, 2 * i + lane_chunk);
  }
  // Operand A (16 rows x 16 columns) of mma.
  __device__ static __forceinline__ TileLane a(int lane) { return {lane & 15, lane >> 4}; }
  // Operand B of two neighbouring mma, for B^T stored by rows (row = n, column = k): r[0], r[1]
  // belong to rows 0-7, r[2], r[3] to rows 8-15.
  __device__ static __forceinline__ TileLane bt(int lane) {
    return {(lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1};
  }
  // Operand B of two neighbouring mma, for B stored by rows (row = k, column = n), read by
  // ldmatrix_x4_trans: r[0], r[1] belong to columns 0-7, r[2], r[3] to columns 8-15.
  __device__ static __forceinline__ TileLane b(int lane) { return {lane & 15, lane >> 4}; }
  // Operand A = the transpose of what is stored (row = k, column = m), by ldmatrix_x4_trans.
  __device__ static __forceinline__ TileLane at(int lane) {
    return {(lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1};
  }

  __device__ __forceinline__ uint32_t operator()(int k) const {
    return at_[k % kVariants] + (k / kVariants) * (Tile<kDim>::kGroup * 16);
  }

 private:
  uint32_t at_[kVariants];
};

// The same addresses from one register: within a swizzle group, k only flips address bits. For
// kernels that are short of registers. Tiles of whole groups only.
template <int kDim>
class PieceLane {
  static constexpr int kVariants = Tile<kDim>::kGroup / 2;

 public:
  __device__ __forceinline__ PieceLane(uint32_t tile, int lane_row, int lane_chunk)
      : at_(tile + Tile<kDim>::offset(lane_row, lane_chunk)) {}
  __device__ static __forceinline__ PieceLane a(uint32_t tile, int lane) {
    return {tile, lane & 15, lane >> 4};
  }
  __device__ static __forceinline__ PieceLane bt(uint32_t tile, int lane) {
    return {tile, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1};
  }
  __device__ static __forceinline__ PieceLane b(uint32_t tile, int lane) { return a(tile, lane); }

  // The same place in a tile that lies `bytes` (a multiple of 128) further on.
  __device__ __forceinline__ PieceLane operator+(uint32_t bytes) const {
    PieceLane moved = *this;
    moved.at_ += bytes;
    return moved;
  }

  __device__ __forceinline__ uint32_t operator()(int k) const {
    return (at_ ^ (k % kVariants << 5)) + (k / kVariants) * (Tile<kDim>::kGroup * 16);
  }

 private:
  uint32_t at_;
};

// Enqueues cp.async of kRows rows by kThreads threads. source(row) gives the row's address or null
// (the row becomes zeros); columns from `dim` on become zeros too. dim is a multiple of 8.
template <int kDim, int kRows, int kThreads, class T, class Source>
__device__ __forceinline__ void load_rows_async(uint32_t base, int thread, int dim, const T* any,
                                                Source&& source) {
  constexpr int kChunks = Tile<kDim>::kChunks;
#pragma unroll
  for (int i = thread; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i - row * kChunks;
    const T* from = source(row);
    const bool valid = from != nullptr && chunk * 8 < dim;
    ptx::copy_async_16(base + Tile<kDim>::offset(row, chunk), valid ? from + chunk * 8 : any,
                       valid);
  }
}

} // namespace thresher::cuda
