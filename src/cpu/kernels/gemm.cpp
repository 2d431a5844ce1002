// The products, by Eigen. Its templates get a namespace of their own for each instruction set:
// otherwise the linker would keep one copy of each for all of them.
#define THRESHER_JOIN_(a, b) a##b
#define THRESHER_JOIN(a, b) THRESHER_JOIN_(a, b)
#define Eigen THRESHER_JOIN(eigen_, THRESHER_ISA)
#define EIGEN_DONT_PARALLELIZE // called from inside parallel regions
#include <Eigen/Core>

#include "cpu/kernels/gemm.h"

namespace thresher::cpu::THRESHER_ISA {
namespace {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using Map = Eigen::Map<Matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>;
template <class T>
using ConstMap = Eigen::Map<const Matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>;

template <class T>
Map<T> map(Tile<T> t, int64_t rows, int64_t cols) {
  return Map<T>(t.data, rows, cols, Eigen::OuterStride<>(t.stride));
}
template <class T>
ConstMap<T> map(Tile<const T> t, int64_t rows, int64_t cols) {
  return ConstMap<T>(t.data, rows, cols, Eigen::OuterStride<>(t.stride));
}

template <class T>
void nt(Tile<T> c, Tile<const T> a, Tile<const T> b, int64_t m, int64_t n, int64_t k) {
  map(c, m, n).noalias() = map(a, m, k) * map(b, n, k).transpose();
}
template <class T>
void nn(Tile<T> c, Tile<const T> a, Tile<const T> b, int64_t m, int64_t n, int64_t k) {
  map(c, m, n).noalias() = map(a, m, k) * map(b, k, n);
}
template <class T>
void tn_add(Tile<T> c, Tile<const T> a, Tile<const T> b, int64_t m, int64_t n, int64_t k) {
  map(c, m, n).noalias() += map(a, k, m).transpose() * map(b, k, n);
}

} // namespace

void gemm_nt(Tile<float> c, Tile<const float> a, Tile<const float> b, int64_t m, int64_t n,
             int64_t k) {
  nt(c, a, b, m, n, k);
}
void gemm_nt(Tile<double> c, Tile<const double> a, Tile<const double> b, int64_t m, int64_t n,
             int64_t k) {
  nt(c, a, b, m, n, k);
}
void gemm_nn(Tile<float> c, Tile<const float> a, Tile<const float> b, int64_t m, int64_t n,
             int64_t k) {
  nn(c, a, b, m, n, k);
}
void gemm_nn(Tile<double> c, Tile<const double> a, Tile<const double> b, int64_t m, int64_t n,
             int64_t k) {
  nn(c, a, b, m, n, k);
}
void gemm_tn_add(Tile<float> c, Tile<const float> a, Tile<const float> b, int64_t m, int64_t n,
                 int64_t k) {
  tn_add(c, a, b, m, n, k);
}
void gemm_tn_add(Tile<double> c, Tile<const double> a, Tile<const double> b, int64_t m, int64_t n,
                 int64_t k) {
  tn_add(c, a, b, m, n, k);
}

} // namespace thresher::cpu::THRESHER_ISA
