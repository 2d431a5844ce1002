#include "cuda/index/check.h"

#include "cuda/common/launch.h"

#include <algorithm>
#include <climits>

namespace thresher::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ __forceinline__ int32_t visible_blocks(const Geometry& geometry, int32_t token,
                                                  int32_t block_size) {
  const int32_t fragment = geometry.fragment_of(token);
  const int32_t position = fragment < 0 ? -1 : geometry.position(fragment, token);
  return position < 0 ? 0 : position / block_size + 1;
}

// One warp a row.
__global__ void __launch_bounds__(kThreads)
    find_bad_entry(Geometry geometry, BlockIdsView<const int32_t> block_ids, int32_t heads,
                   int32_t top_k, int32_t block_size, BadEntry* bad) {
  const int lane = threadIdx.x % 32;
  const int32_t real = min(geometry.real_tokens(), geometry.tokens);
  const int64_t rows = static_cast<int64_t>(heads) * real;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const auto head = static_cast<int32_t>(row / real);
    const auto token = static_cast<int32_t>(row - int64_t{head} * real);
    const int32_t visible = visible_blocks(geometry, token, block_size);
    const int32_t* ids = block_ids.at(head, token);
    for (int slot = lane; slot < top_k; slot += 32) {
      const int32_t id = ids[slot];
      if (id == -1)
        continue;
      bool wrong = id < 0 || id >= visible;
      for (int earlier = 0; earlier < slot && !wrong; ++earlier)
        wrong = ids[earlier] == id;
      if (wrong) {
        const int64_t place = (int64_t{head} * geometry.tokens + token) * top_k + slot;
        atomicMin(reinterpret_cast<long long*>(&bad->place), static_cast<long long>(place));
        break;
      }
    }
  }
}

__global__ void describe_bad_entry(Geometry geometry, BlockIdsView<const int32_t> block_ids,
                                   int32_t top_k, int32_t block_size, BadEntry* bad) {
  if (bad->place == LLONG_MAX)
    return;
  const int64_t row = bad->place / top_k;
  const auto token = static_cast<int32_t>(row % geometry.tokens);
  bad->id = block_ids.at(static_cast<int32_t>(row / geometry.tokens), token)[bad->place % top_k];
  bad->visible = visible_blocks(geometry, token, block_size);
}

[[noreturn]] void fail(const Shapes& shapes, const BadEntry& bad) {
  const int64_t row = bad.place / shapes.top_k, token = row % shapes.tokens;
  std::string where =
      "head " + std::to_string(row / shapes.tokens) + ", token " + std::to_string(token);
  if (shapes.batch > 1)
    where += " (row " + std::to_string(token / shapes.tokens_per_row) + ", position " +
             std::to_string(token % shapes.tokens_per_row) + ")";
  where +=
      ", slot " + std::to_string(bad.place % shapes.top_k) + ": block " + std::to_string(bad.id);
  std::string why;
  if (bad.id < 0)
    why = " is negative; an empty slot is -1";
  else if (bad.id >= bad.visible)
    why = bad.visible == 0
              ? " is given, but the token sees no key"
              : " is out of range: the token sees blocks 0 to " + std::to_string(bad.visible - 1);
  else
    why = " is in the row twice";
  throw Error(ErrorCode::kInvalidValue, "block_indices", where + why);
}

} // namespace

void check_indices(const Geometry& geometry, const Shapes& shapes, const Tensor& block_indices,
                   BadEntry* scratch, cudaStream_t stream) {
  const auto ids = block_ids_view<const int32_t>(block_indices);
  BadEntry bad = {LLONG_MAX, 0, 0};
  check(cudaMemcpyAsync(scratch, &bad, sizeof(bad), cudaMemcpyHostToDevice, stream),
        "check_block_indices");
  const int64_t rows = static_cast<int64_t>(shapes.proxy_heads) * shapes.tokens;
  launch("check_block_indices", find_bad_entry,
         dim3(static_cast<unsigned>(std::min<int64_t>(ceil_div<int64_t>(rows, kWarps),
                                                      int64_t{16} * device_facts().sm_count))),
         dim3(kThreads), 0, stream, geometry, ids, shapes.proxy_heads, shapes.top_k,
         shapes.block_size, scratch);
  launch("check_block_indices", describe_bad_entry, dim3(1), dim3(1), 0, stream, geometry, ids,
         shapes.top_k, shapes.block_size, scratch);
  check(cudaMemcpyAsync(&bad, scratch, sizeof(bad), cudaMemcpyDeviceToHost, stream),
        "check_block_indices");
  check(cudaStreamSynchronize(stream), "check_block_indices");
  if (bad.place != LLONG_MAX)
    fail(shapes, bad);
}

} // namespace thresher::cuda
