// Times of the portable selection and of the reverse index of what it chose. Not a test.
#include "harness.h"

#include "cuda/index/index.h"
#include "cuda/kernel.h"

using namespace thresher;
using namespace thresher::test;

namespace {

void run(const char* name, const Batch& batch, int heads, int key_heads, int dim, int block_size,
         int top_k) {
  using T = __nv_bfloat16;
  SelectParams params;
  Shapes shapes;
  const DeviceBatch device_batch(batch);
  device_batch.describe(params.problem, shapes);
  shapes.proxy_heads = heads;
  shapes.kv_heads = heads;
  shapes.proxy_kv_heads = key_heads;
  shapes.proxy_dim = dim;
  shapes.block_size = params.problem.block_size = block_size;
  shapes.top_k = params.problem.top_k_blocks = top_k;
  shapes.dtype = DType::kBFloat16;
  params.problem.local_blocks = 1;
  params.problem.proxy_scale = 1;
  const DeviceArray<T> q(random_values<T>(batch.tokens * heads * dim, 1));
  const DeviceArray<T> k(random_values<T>(batch.keys * key_heads * dim, 2));
  const DeviceArray<int32_t> ids(int64_t{heads} * batch.tokens * top_k);
  params.q_proxy = tensor_of(q, batch.tokens, heads, dim);
  params.k_proxy = tensor_of(k, batch.keys, key_heads, dim);
  params.block_indices = tensor_of(ids, heads, batch.tokens, top_k);
  const auto& kernel = cuda::portable::select_blocks;
  const size_t bytes = kernel.workspace_size(params, shapes);
  const DeviceArray<char> workspace(static_cast<int64_t>(bytes));
  const double select_ms =
      median_ms(7, [&] { kernel.run(params, shapes, {workspace.data(), bytes}, nullptr); });
  double flops = 0;
  for (int64_t f = 0; f < batch.fragments(); ++f) {
    const double length = static_cast<double>(batch.queries(f));
    flops += length * length * heads * dim;
  }

  cuda::IndexOptions options;
  options.window_tokens = cuda::suggested_window(shapes);
  cuda::WorkspaceCarver measure;
  cuda::carve_index(params.problem, shapes, options, measure);
  const DeviceArray<char> index_memory(static_cast<int64_t>(measure.bytes()));
  cuda::WorkspaceCarver carver(index_memory.data());
  const cuda::BlockIndex index = cuda::carve_index(params.problem, shapes, options, carver);
  const double index_ms = median_ms(
      7, [&] { cuda::build_index(index, params.problem, shapes, params.block_indices, nullptr); });
  int32_t items = 0;
  CUDA_CHECK(cudaMemcpy(&items, index.segment_items + index.windows * heads, sizeof(items),
                        cudaMemcpyDeviceToHost));
  std::printf("%-28s select %8.3f ms %5.0f TFLOP/s (%4.0f MiB)   index %7.3f ms (%4.0f MiB, window "
              "%d, %d items of at most %d)\n",
              name, select_ms, flops / select_ms * 1e-9, bytes / 1048576.0, index_ms,
              measure.bytes() / 1048576.0, index.window_tokens, items, index.max_items);
  std::fflush(stdout);
}

} // namespace

int main() {
  run("4/1 4K", packed({4096}), 4, 1, 128, 128, 16);
  run("4/1 8K", packed({8192}), 4, 1, 128, 128, 16);
  run("4/1 16K", packed({16384}), 4, 1, 128, 128, 16);
  run("4/1 32K", packed({32768}), 4, 1, 128, 128, 16);
  run("4/1 64K", packed({65536}), 4, 1, 128, 128, 16);
  run("4/1 128K", packed({131072}), 4, 1, 128, 128, 16);
  run("4/1 64K D 64", packed({65536}), 4, 1, 64, 128, 16);
  run("4/1 64K D 256", packed({65536}), 4, 1, 256, 128, 16);
  run("1/1 64K", packed({65536}), 1, 1, 128, 128, 16);
  run("8/2 64K", packed({65536}), 8, 2, 128, 128, 16);
  run("4/1 64K B 32 K 64", packed({65536}), 4, 1, 128, 32, 64);
  run("4/1 64K K 128", packed({65536}), 4, 1, 128, 64, 128);
  run(
      "4/1 10000 x 7 + 64K",
      [] {
        std::vector<int64_t> lengths(10000, 7);
        lengths.push_back(65536);
        return packed(lengths);
      }(),
      4, 1, 128, 128, 16);
  run("4/1 192K of 3K to 60K", packed({60000, 3000, 20000, 31000, 9000, 45000, 5000, 23000}), 4, 1,
      128, 128, 16);
  run("1/1 1M", packed({1 << 20}), 1, 1, 64, 128, 16);
}
