// Host side of the portable warm-up forward.
#include "cuda/portable/warmup/warmup.h"

#include "cuda/common/dtype.h"
#include "cuda/kernel.h"
#include "cuda/portable/forward/forward.h"

#include <cmath>

namespace thresher::cuda::portable {
namespace warmup {
namespace {

template <class T, bool kValues>
void run_heads(DenseParams<T>& params, double scale, cudaStream_t stream) {
  constexpr double kLog2e = 1.4426950408889634;
  params.score_scale = static_cast<float>(std::abs(scale) * kLog2e);
  params.negate = scale < 0;
  with_dim<64, 128, 256>(forward::tile_dim(params.dim),
                         [&]<int kDim>() { DenseKernel<T, kDim, kValues>::run(params, stream); });
  if (params.geometry.q_begin_array) // otherwise there is no padding
    clear_padding(params, stream);
}

template <class T>
void run(const ForwardParams& params, const Shapes& s, cudaStream_t stream) {
  DenseParams<T> main = {};
  main.geometry = make_geometry(params.problem, s);
  main.heads = s.q_heads;
  main.kv_heads = s.kv_heads;
  main.dim = s.dim;
  main.q = tensor_view<const T>(params.q);
  main.k = tensor_view<const T>(params.k);
  main.v = tensor_view<const T>(params.v);
  main.out = tensor_view<T>(params.out);
  main.lse = tensor_view<float>(params.lse, false);
  run_heads<T, true>(main, params.problem.softmax_scale, stream);
  if (!params.proxy_lse)
    return;
  DenseParams<T> proxy = {};
  proxy.geometry = main.geometry;
  proxy.heads = s.proxy_heads;
  proxy.kv_heads = s.proxy_kv_heads;
  proxy.dim = s.proxy_dim;
  proxy.q = tensor_view<const T>(params.q_proxy);
  proxy.k = tensor_view<const T>(params.k_proxy);
  proxy.lse = tensor_view<float>(params.proxy_lse, false);
  run_heads<T, false>(proxy, params.problem.proxy_scale, stream);
}

} // namespace
} // namespace warmup

const Kernel<ForwardParams> warmup_forward = {
    "portable",
    [](const ForwardParams&, const Shapes&, const DeviceFacts&) { return std::string(); },
    [](const ForwardParams&, const Shapes&) { return size_t{0}; },
    [](const ForwardParams& params, const Shapes& shapes, const Workspace&, cudaStream_t stream) {
      with_dtype(shapes.dtype, [&]<class T>() { warmup::run<T>(params, shapes, stream); });
    }};

} // namespace thresher::cuda::portable
