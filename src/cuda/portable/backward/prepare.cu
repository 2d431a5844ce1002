// Row constants of a pass. A row that holds an infinity or a NaN is marked here, so that the main
// kernels can keep it from the sums of rows that do not read it.
#include "cuda/common/finite.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "cuda/portable/backward/backward.h"

namespace thresher::cuda::portable::backward {
namespace {

constexpr int kThreads = 256, kLanes = 8; // lanes of a row
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNan = __builtin_nanf(""), kInfinity = __builtin_inff();

template <class T>
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = ptx::unpack<T>(left[i]), y = ptx::unpack<T>(right[i]);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
  }
  return sum;
}

// Over the lanes of a row.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance >>= 1)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}
__device__ __forceinline__ bool row_any(bool x) {
  const uint32_t votes = __ballot_sync(0xffffffffu, x);
  return (votes >> (threadIdx.x % 32 / kLanes * kLanes) & ((1u << kLanes) - 1)) != 0;
}

__device__ __forceinline__ void clear_row(float* row, int32_t dim, int lane) {
  for (int i = lane * 4; i < dim; i += kLanes * 4)
    *reinterpret_cast<float4*>(row + i) = make_float4(0.f, 0.f, 0.f, 0.f);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    prepare_rows_kernel(PrepareRows args, TensorView<const T> q, TensorView<const T> out,
                        TensorView<const T> dout) {
  if (args.index.idle())
    return;
  const int lane = threadIdx.x % kLanes;
  const int64_t rows = static_cast<int64_t>(args.tokens) * args.heads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int32_t local = row < rows ? static_cast<int32_t>(row / args.heads) : 0;
  const int32_t token = args.first_token + local;
  const int32_t head = static_cast<int32_t>(row - static_cast<int64_t>(local) * args.heads);
  // Padding and rows without a key are in no list.
  const bool real = row < rows && __ldg(args.index.position + token) >= 0;
  bool bad_query = false, bad_output = false;
  float delta = 0.f;
  if (real) {
    for (int chunk = lane * 8; chunk < args.dim; chunk += kLanes * 8) {
      bad_query |= not_finite<T>(__ldg(reinterpret_cast<const uint4*>(q.at(token, head) + chunk)));
      if (dout.data) {
        const uint4 x = __ldg(reinterpret_cast<const uint4*>(dout.at(token, head) + chunk));
        const uint4 y = __ldg(reinterpret_cast<const uint4*>(out.at(token, head) + chunk));
        bad_output |= not_finite<T>(x);
        delta += dot<T>(x, y);
      }
    }
    if (args.clear)
      clear_row(args.clear + row * args.padded_dim, args.padded_dim, lane);
  }
  delta = row_sum(delta);
  bad_query = row_any(bad_query);
  bad_output = row_any(bad_output);
  if (real && lane == 0) {
    const float lse = *args.lse.at(token, head);
    const bool finite = !bad_query && isfinite(lse);
    // An overflowing delta is not a bad dO.
    args.constants[row] = {finite ? lse * kLog2e : kNan, bad_output        ? kInfinity
                                                         : isfinite(delta) ? delta
                                                                           : kNan};
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    prepare_proxy_kernel(PrepareProxyRows args, TensorView<const T> q) {
  if (args.index.idle())
    return;
  const int lane = threadIdx.x % kLanes;
  const int64_t rows = static_cast<int64_t>(args.tokens) * args.heads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int32_t local = row < rows ? static_cast<int32_t>(row / args.heads) : 0;
  const int32_t token = args.first_token + local;
  const int32_t head = static_cast<int32_t>(row - static_cast<int64_t>(local) * args.heads);
  const bool real = row < rows && __ldg(args.index.position + token) >= 0;
  bool bad_query = false, bad_teacher = false;
  if (real) {
    for (int chunk = lane * 8; chunk < args.dim; chunk += kLanes * 8)
      bad_query |= not_finite<T>(__ldg(reinterpret_cast<const uint4*>(q.at(token, head) + chunk)));
    for (int i = lane; i < args.group; i += kLanes)
      bad_teacher |= isnan(args.main[row * args.group + i].x);
    if (args.clear)
      clear_row(args.clear + row * args.padded_dim, args.padded_dim, lane);
  }
  bad_query = row_any(bad_query);
  bad_teacher = row_any(bad_teacher);
  if (real && lane == 0) {
    const float lse = *args.lse.at(token, head);
    const bool finite = !bad_query && isfinite(lse);
    float gradient = args.dkl.data ? *args.dkl.at(token, head) : 0.f;
    if (args.dkl_bound)
      gradient *= common_scale(*args.dkl_bound);
    args.constants[row] = {finite ? lse * kLog2e : kNan, gradient, bad_teacher ? kNan : 0.f, 0.f};
  }
}

__global__ void __launch_bounds__(kThreads)
    bound_dkl_kernel(TensorView<const float> dkl, BlockIndex index, int32_t heads, float* bound) {
  if (index.idle())
    return;
  float largest = 0.f;
  const int64_t rows = static_cast<int64_t>(index.tokens) * heads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int32_t token = static_cast<int32_t>(row / heads);
    if (__ldg(index.position + token) < 0)
      continue;
    const float x = fabsf(*dkl.at(token, static_cast<int32_t>(row % heads)));
    if (isfinite(x))
      largest = fmaxf(largest, x);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  if (threadIdx.x % 32 == 0) // non-negative floats compare like their bits
    atomicMax(reinterpret_cast<int32_t*>(bound), __float_as_int(largest));
}

__global__ void __launch_bounds__(kThreads)
    clear_kernel(BlockIndex index, uint4* to, int64_t count) {
  if (index.idle())
    return;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads)
    to[i] = make_uint4(0, 0, 0, 0);
}

dim3 grid_of(int64_t rows) {
  return dim3(static_cast<unsigned>(ceil_div<int64_t>(rows, kThreads / kLanes)));
}

} // namespace

template <class T>
void prepare_rows(const PrepareRows& args, const TensorView<const T>& q,
                  const TensorView<const T>& out, const TensorView<const T>& dout,
                  cudaStream_t stream) {
  launch("backward prepare_rows", prepare_rows_kernel<T>,
         grid_of(static_cast<int64_t>(args.tokens) * args.heads), dim3(kThreads), 0, stream, args,
         q, out, dout);
}

template <class T>
void prepare_proxy_rows(const PrepareProxyRows& args, const TensorView<const T>& q,
                        cudaStream_t stream) {
  launch("backward prepare_proxy_rows", prepare_proxy_kernel<T>,
         grid_of(static_cast<int64_t>(args.tokens) * args.heads), dim3(kThreads), 0, stream, args,
         q);
}

void bound_dkl(const TensorView<const float>& dkl, const BlockIndex& index, int32_t heads,
               float* bound, cudaStream_t stream) {
  launch("backward bound_dkl", bound_dkl_kernel, dim3(device_facts().sm_count), dim3(kThreads), 0,
         stream, dkl, index, heads, bound);
}

void clear_sums(const BlockIndex& index, void* from, size_t bytes, cudaStream_t stream) {
  launch("backward clear_sums", clear_kernel, dim3(device_facts().sm_count * 4), dim3(kThreads), 0,
         stream, index, static_cast<uint4*>(from), static_cast<int64_t>(bytes / sizeof(uint4)));
}

#define THRESHER_INSTANTIATE(T)                                                                    \
  template void prepare_rows(const PrepareRows&, const TensorView<const T>&,                       \
                             const TensorView<const T>&, const TensorView<const T>&,               \
                             cudaStream_t);                                                        \
  template void prepare_proxy_rows(const PrepareProxyRows&, const TensorView<const T>&,            \
                                   cudaStream_t);
THRESHER_INSTANTIATE(bf16)
THRESHER_INSTANTIATE(fp16)
#undef THRESHER_INSTANTIATE

} // namespace thresher::cuda::portable::backward
