// Times of the selection by every kernel that takes a case and of the reverse index of what it
// chose, a line of JSON each. Not a test. Arguments: a piece of the case's name, the kernel,
// splits.
#include "harness.h"

#include "cuda/index/index.h"
#include "cuda/index/tokens.h"
#include "cuda/portable/select/select.h"
#if THRESHER_CUDA_SM90
#include "cuda/sm90/select/select.h"
#endif

#include <cstring>

using namespace thresher;
using namespace thresher::test;

namespace {

const char* only_case = "";
const char* only_kernel = "";
int splits = 0; // 0: chosen

void run(const char* name, const Batch& batch, int heads, int key_heads, int dim, int block_size,
         int top_k, size_t shared_limit = 0) {
  if (!std::strstr(name, only_case))
    return;
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
  double flops = 0;
  for (int64_t f = 0; f < batch.fragments(); ++f) {
    const double length = static_cast<double>(batch.queries(f));
    flops += length * (length + 1) * heads * dim;
  }
  const auto time = [&](const char* kernel, size_t bytes, auto&& select) {
    if (!std::strstr(kernel, only_kernel))
      return;
    const DeviceArray<char> workspace(static_cast<int64_t>(bytes));
    const double ms = graph_ms(batch.tokens <= 32768 ? 10 : 2, [&](cudaStream_t stream) {
      select(Workspace{workspace.data(), bytes}, stream);
    });
    std::printf("{\"case\": \"%s\", \"kernel\": \"%s\", \"splits\": %d, \"ms\": %.4f, "
                "\"tflops\": %.0f, \"workspace_mib\": %.1f}\n",
                name, kernel, splits, ms, flops / ms * 1e-9, bytes / 1048576.0);
    std::fflush(stdout);
  };
  const cuda::portable::SelectOptions options_select = {shared_limit, splits};
  time("portable", cuda::portable::select_workspace_size(params, shapes, options_select),
       [&](const Workspace& workspace, cudaStream_t stream) {
         cuda::portable::run_select(params, shapes, workspace, options_select, stream);
       });
#if THRESHER_CUDA_SM90
  if (!shared_limit &&
      cuda::sm90::select_blocks.refuses(params, shapes, cuda::device_facts()).empty())
    time("sm90", cuda::sm90::select_workspace_size(params, shapes, splits),
         [&](const Workspace& workspace, cudaStream_t stream) {
           cuda::sm90::run_select(params, shapes, workspace, splits, stream);
         });
#endif
  if (!std::strstr("index", only_kernel))
    return;

  cuda::IndexOptions options;
  options.window_tokens = cuda::suggested_window(shapes);
  cuda::WorkspaceCarver measure;
  cuda::carve_index(params.problem, shapes, options, measure);
  const DeviceArray<char> index_memory(static_cast<int64_t>(measure.bytes()));
  cuda::WorkspaceCarver carver(index_memory.data());
  const cuda::BlockIndex index = cuda::carve_index(params.problem, shapes, options, carver);
  const double index_ms = graph_ms(10, [&](cudaStream_t stream) {
    cuda::build_index(index, params.problem, shapes, params.block_indices, stream);
  });
  const double tokens_ms = graph_ms(10, [&](cudaStream_t stream) {
    cuda::describe_tokens(index, cuda::make_geometry(params.problem, shapes), stream);
  });
  int32_t items = 0;
  CUDA_CHECK(cudaMemcpy(&items, index.segment_items + index.windows * heads, sizeof(items),
                        cudaMemcpyDeviceToHost));
  std::printf("{\"case\": \"%s\", \"kernel\": \"index\", \"ms\": %.4f, \"tokens_ms\": %.4f, "
              "\"workspace_mib\": %.1f, \"window\": %d, \"items\": %d, \"max_items\": %d}\n",
              name, index_ms, tokens_ms, measure.bytes() / 1048576.0, index.window_tokens, items,
              index.max_items);
  std::fflush(stdout);
}

} // namespace

int main(int count, char** arguments) {
  if (count > 1)
    only_case = arguments[1];
  if (count > 2)
    only_kernel = arguments[2];
  if (count > 3)
    splits = std::atoi(arguments[3]);
  run("4/1 4K", packed({4096}), 4, 1, 128, 128, 16);
  run("4/1 8K", packed({8192}), 4, 1, 128, 128, 16);
  run("4/1 16K", packed({16384}), 4, 1, 128, 128, 16);
  run("4/1 32K", packed({32768}), 4, 1, 128, 128, 16);
  run("4/1 64K", packed({65536}), 4, 1, 128, 128, 16);
  run("4/1 128K", packed({131072}), 4, 1, 128, 128, 16);
  run("4/1 64K D 64", packed({65536}), 4, 1, 64, 128, 16);
  run("4/1 64K D 256", packed({65536}), 4, 1, 256, 128, 16);
  run("1/1 64K", packed({65536}), 1, 1, 128, 128, 16);
  run("1/1 128K", packed({131072}), 1, 1, 128, 128, 16);
  run("8/2 128K", packed({131072}), 8, 2, 128, 128, 16);
  run("4/1 128K D 64", packed({131072}), 4, 1, 64, 128, 16);
  run("4/1 64K B 64", packed({65536}), 4, 1, 128, 64, 16);
  run("4/1 64K B 64 K 32", packed({65536}), 4, 1, 128, 64, 32);
  run("4/1 64K K 64", packed({65536}), 4, 1, 128, 128, 64);
  run("4/1 64K B 64 K 64", packed({65536}), 4, 1, 128, 64, 64);
  run("4/1 64K B 256", packed({65536}), 4, 1, 128, 256, 16);
  run("8/2 64K", packed({65536}), 8, 2, 128, 128, 16);
  run("4/1 64K B 32 K 64", packed({65536}), 4, 1, 128, 32, 64);
  run("4/1 64K K 128", packed({65536}), 4, 1, 128, 64, 128);
  run("4/1 64K B 32 K 64 global", packed({65536}), 4, 1, 128, 32, 64, 1);
  run("4/1 64K K 128 global", packed({65536}), 4, 1, 128, 64, 128, 1);
  run("4/1 64K K 16 global", packed({65536}), 4, 1, 128, 128, 16, 1);
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
  run("4/1 384K", packed({393216}), 4, 1, 64, 128, 16);
}
