// Matrix products on packed row-major tiles. The number of rows of C must be a multiple of
// kGemmRows in nt and nn (pad the tile): then no row's result depends on its place in the tile.
#pragma once

#include <cstdint>

namespace thresher::cpu::THRESHER_ISA {

constexpr int kGemmRows = 4;

// A tile with its row length.
template <class T>
struct Tile {
  T* data;
  int64_t stride;
  T* row(int64_t i) const { return data + i * stride; }
};

// C[m, n] = A[m, k] B[n, k]^T
void gemm_nt(Tile<float> c, Tile<const float> a, Tile<const float> b, int64_t m, int64_t n,
             int64_t k);
void gemm_nt(Tile<double> c, Tile<const double> a, Tile<const double> b, int64_t m, int64_t n,
             int64_t k);
// C[m, n] = A[m, k] B[k, n]
void gemm_nn(Tile<float> c, Tile<const float> a, Tile<const float> b, int64_t m, int64_t n,
             int64_t k);
void gemm_nn(Tile<double> c, Tile<const double> a, Tile<const double> b, int64_t m, int64_t n,
             int64_t k);
// C[m, n] += A[k, m]^T B[k, n]
void gemm_tn_add(Tile<float> c, Tile<const float> a, Tile<const float> b, int64_t m, int64_t n,
                 int64_t k);
void gemm_tn_add(Tile<double> c, Tile<const double> a, Tile<const double> b, int64_t m, int64_t n,
                 int64_t k);

} // namespace thresher::cpu::THRESHER_ISA
