// From accumulators to results: sums of partials in a fixed order, un-permuted, scaled, rounded.
#include "cuda/common/launch.h"
#include "cuda/portable/backward/backward.h"
#include "cuda/portable/backward/unit.cuh"

#include <algorithm>

namespace thresher::cuda::portable::backward {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int32_t partials_of(const BlockIndex& index, const PartialCount& count,
                                               int32_t token, int32_t proxy_head) {
  const int32_t position = __ldg(index.position + token);
  if (position < 0)
    return 0;
  if (count.slots == 1)
    return 1; // of reductions
  const int32_t slots =
      count.dense ? position / index.block_size + 1
                  : index.slot_count[static_cast<int64_t>(proxy_head) * index.tokens + token];
  return slots * count.key_tiles;
}

// The quad of an accumulator row -> two neighbouring columns, and two eight further on.
template <class T>
__device__ __forceinline__ void write_quad(T* row, int quad, int32_t dim, float4 x) {
  const int column = quad / 4 * 16 + quad % 4 * 2;
  if (column < dim)
    *reinterpret_cast<uint32_t*>(row + column) = ptx::pack<T>(x.x, x.y);
  if (column + 8 < dim)
    *reinterpret_cast<uint32_t*>(row + column + 8) = ptx::pack<T>(x.z, x.w);
}

__device__ __forceinline__ float result_scale(float scale, const float* dkl_bound) {
  return dkl_bound ? scale / common_scale(*dkl_bound) : scale;
}

// A thread a quad of columns.
template <class T>
__global__ void __launch_bounds__(kThreads) finish_rows_kernel(FinishRows args, TensorView<T> to) {
  if (args.index.idle())
    return;
  const int32_t quads = args.padded_dim / 4;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / quads;
  const int32_t quad = static_cast<int32_t>(i - row * quads);
  const int32_t local = static_cast<int32_t>(row / args.heads);
  if (local >= args.tokens)
    return;
  const int32_t head = static_cast<int32_t>(row - static_cast<int64_t>(local) * args.heads);
  const int32_t token = args.first_token + local;
  const int32_t count = partials_of(args.index, args.count, token, head / args.heads_per_proxy);
  const int64_t row_stride = static_cast<int64_t>(args.tokens) * args.heads * args.padded_dim;
  const int64_t place = row * args.padded_dim + quad * 4;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  for (int32_t n = 0; n < count; ++n) {
    const float4 x = __ldcs(reinterpret_cast<const float4*>(args.partial + n * row_stride + place));
    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
  }
  const float scale = result_scale(args.scale, args.dkl_bound);
  write_quad(to.at(token, head), quad, args.dim,
             {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale});
}

__global__ void __launch_bounds__(kThreads) finish_kl_kernel(FinishKl args) {
  if (args.index.idle())
    return;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int32_t local = static_cast<int32_t>(row / args.proxy_heads);
  if (local >= args.tokens)
    return;
  const int32_t head = static_cast<int32_t>(row % args.proxy_heads);
  const int32_t token = args.first_token + local;
  const int32_t count = partials_of(args.index, args.count, token, head);
  const float* partial = args.partial + row * args.count.slots * args.count.key_tiles;
  float sum = 0.f;
  for (int32_t n = 0; n < count; ++n)
    sum += partial[n];
  *args.kl.at(token, head) = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) finish_keys_kernel(FinishKeys args, TensorView<T> to) {
  if (args.index.idle())
    return;
  const int32_t quads = args.padded_dim / 4;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / quads;
  const int32_t quad = static_cast<int32_t>(i - row * quads);
  const int32_t key = static_cast<int32_t>(row / args.owners);
  if (key >= args.keys)
    return;
  const int32_t owner = static_cast<int32_t>(row - static_cast<int64_t>(key) * args.owners);
  if (!args.always_accumulate) {
    const int32_t block_row = __ldg(args.index.key_row + key) - 1;
    int32_t items = 0;
    if (block_row >= 0) {
      const ProxyRange range = proxies_of(args.q_heads, args.owners, args.proxy_heads, owner);
      items = args.index.items_of(block_row, range.first, range.count);
    }
    if (items == 1)
      return; // stored by the main kernel
    if (items == 0) {
      write_quad(to.at(key, owner), quad, args.dim, {0.f, 0.f, 0.f, 0.f});
      return;
    }
  }
  const float scale = result_scale(args.scale, args.dkl_bound);
  const float4 sum =
      __ldcs(reinterpret_cast<const float4*>(args.accumulator + row * args.padded_dim + quad * 4));
  write_quad(to.at(key, owner), quad, args.dim,
             {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale});
}

dim3 grid_of(int64_t threads) {
  return dim3(static_cast<unsigned>(ceil_div<int64_t>(threads, kThreads)));
}

} // namespace

template <class T>
void finish_rows(const FinishRows& args, const TensorView<T>& to, cudaStream_t stream) {
  launch("backward finish_rows", finish_rows_kernel<T>,
         grid_of(static_cast<int64_t>(args.tokens) * args.heads * (args.padded_dim / 4)),
         dim3(kThreads), 0, stream, args, to);
}

void finish_kl(const FinishKl& args, cudaStream_t stream) {
  launch("backward finish_kl", finish_kl_kernel,
         grid_of(static_cast<int64_t>(args.tokens) * args.proxy_heads), dim3(kThreads), 0, stream,
         args);
}

template <class T>
void finish_keys(const FinishKeys& args, const TensorView<T>& to, cudaStream_t stream) {
  launch("backward finish_keys", finish_keys_kernel<T>,
         grid_of(static_cast<int64_t>(args.keys) * args.owners * (args.padded_dim / 4)),
         dim3(kThreads), 0, stream, args, to);
}

#define THRESHER_INSTANTIATE(T)                                                                    \
  template void finish_rows(const FinishRows&, const TensorView<T>&, cudaStream_t);                \
  template void finish_keys(const FinishKeys&, const TensorView<T>&, cudaStream_t);
THRESHER_INSTANTIATE(bf16)
THRESHER_INSTANTIATE(fp16)
#undef THRESHER_INSTANTIATE

} // namespace thresher::cuda::portable::backward
