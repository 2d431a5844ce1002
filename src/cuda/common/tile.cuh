// Tiles of 16-bit rows in shared memory, swizzled so that ldmatrix and 16-byte copies meet no bank
// conflicts, and their asynchronous loads.
#pragma once

#include "cuda/common/ptx.cuh"

namespace thresher::cuda {

// A tile of rows of kDim 16-bit values without padding. 16-byte chunk c of row r lies where chunk
// c ^ s(r) of an unswizzled row would: eight consecutive rows then use all 32 banks.
template <int kDim>
struct Tile {
  static_assert(kDim % 32 == 0, "rows must be whole groups of four 16-byte chunks");
  static constexpr int kChunks = kDim / 8;
  static constexpr int kRowBytes = kDim * 2;

  __device__ static __forceinline__ uint32_t offset(int row, int chunk) {
    // Rows of an odd multiple of 64 bytes already alternate between the halves of the banks.
    const int flip = kChunks % 8 == 0 ? (row & 7) : ((row >> 1) & 3);
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ flip) << 4));
  }

  // Operand A (16 rows from `row`, 16 columns from 16 * k) of mma: a lane's ldmatrix_x4 address.
  __device__ static __forceinline__ uint32_t a_address(uint32_t base, int row, int k, int lane) {
    return base + offset(row + (lane & 15), 2 * k + (lane >> 4));
  }
  // Operand B of two neighbouring mma, for B^T stored by rows (n index = row, 16 rows from `row`,
  // k index = column, 16 columns from 16 * k): r[0], r[1] for rows 0-7, r[2], r[3] for rows 8-15.
  __device__ static __forceinline__ uint32_t bt_address(uint32_t base, int row, int k, int lane) {
    return base + offset(row + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1));
  }
  // Operand B of two neighbouring mma, for B stored by rows (k index = row, 16 rows from `row`, n
  // index = column, 16 columns from 16 * n), with ldmatrix_x4_trans: r[0], r[1] for columns 0-7.
  __device__ static __forceinline__ uint32_t b_address(uint32_t base, int row, int n, int lane) {
    return base + offset(row + (lane & 15), 2 * n + (lane >> 4));
  }
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
