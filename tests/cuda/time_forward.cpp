// Times of the portable sparse and warm-up forward. Not a test.
#include "forward_case.h"

#include "cuda/kernel.h"

using namespace thresher;
using namespace thresher::test;

namespace {

void time_case(int64_t length, int q_heads, int kv_heads, int proxy_heads, int proxy_kv_heads,
               int dim, int block_size, int top_k, bool dense, bool proxy) {
  using T = __nv_bfloat16;
  ForwardCase c;
  c.batch = packed({length});
  c.q_heads = q_heads;
  c.kv_heads = kv_heads;
  c.proxy_heads = proxy_heads;
  c.proxy_kv_heads = proxy_kv_heads;
  c.dim = c.proxy_dim = dim;
  c.block_size = block_size;
  c.top_k = top_k;
  c.dense = dense;
  c.proxy = proxy;
  const auto ids = dense ? std::vector<int32_t>() : make_ids(c);
  ForwardRun<T> call(c, make_inputs<T>(c), ids);
  const auto& kernel = dense ? cuda::portable::warmup_forward : cuda::portable::sparse_forward;
  const size_t bytes = kernel.workspace_size(call.params, call.shapes);
  const DeviceArray<char> memory(static_cast<int64_t>(bytes));
  const double ms = graph_ms(3, [&](cudaStream_t stream) {
    kernel.run(call.params, call.shapes, {memory.data(), bytes}, stream);
  });
  double pairs = 0; // (token, key)
  if (dense)
    pairs = 0.5 * static_cast<double>(length) * static_cast<double>(length + 1);
  else
    for (int64_t t = 0; t < length; ++t)
      pairs += static_cast<double>(std::min<int64_t>(t + 1, int64_t{top_k} * block_size));
  std::printf("%s %6lld tokens, heads %d/%d/%d/%d, D %d, B %d, K %d, proxy %d: %.3f ms, main "
              "%.0f TFLOP/s, workspace %.0f MiB\n",
              dense ? "dense " : "sparse", static_cast<long long>(length), q_heads, kv_heads,
              proxy_heads, proxy_kv_heads, dim, block_size, top_k, proxy, ms,
              4 * pairs * q_heads * dim / ms * 1e-9, static_cast<double>(bytes) / 1048576);
  std::fflush(stdout);
}

} // namespace

// time_forward [sparse | dense]
int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  if (only != "dense") {
    for (bool proxy : {false, true}) {
      time_case(16384, 16, 2, 4, 1, 128, 128, 16, false, proxy);
      time_case(65536, 16, 2, 4, 1, 128, 128, 16, false, proxy);
    }
    time_case(16384, 64, 4, 4, 1, 128, 128, 16, false, true);
    time_case(16384, 16, 2, 4, 1, 64, 128, 16, false, false);
    time_case(16384, 16, 2, 4, 1, 256, 128, 16, false, false);
    time_case(16384, 16, 2, 4, 1, 128, 64, 32, false, false);
  }
  if (only != "sparse") {
    for (bool proxy : {false, true})
      time_case(16384, 16, 2, 4, 1, 128, 128, 16, true, proxy);
    time_case(16384, 16, 2, 4, 1, 64, 128, 16, true, false);
    time_case(16384, 16, 2, 4, 1, 256, 128, 16, true, false);
  }
}
