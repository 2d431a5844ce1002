// Lists of the warm-up: which tokens of a pass see a block follows from the fragments alone.
#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "cuda/portable/backward/backward.h"

#include <algorithm>

namespace thresher::cuda::portable::backward {
namespace {

constexpr int kThreads = 512;

// A fragment's share of a pass.
struct Share {
  int32_t first_token, tokens; // first_token: of the batch
  int32_t position;            // of first_token; may be negative (it sees no key)
  int32_t blocks;              // that its last token sees
};

__device__ __forceinline__ Share share_of(const Geometry& geometry, int32_t f, int32_t block_size,
                                          int32_t first_token, int32_t tokens) {
  Share share = {};
  const int32_t begin = max(geometry.q_begin(f), first_token);
  const int32_t end = min(geometry.q_end(f), first_token + tokens);
  const int32_t key_begin = geometry.k_begin(f);
  if (begin >= end || key_begin < 0 || key_begin >= geometry.keys)
    return share;
  share.first_token = begin;
  share.tokens = end - begin;
  share.position = geometry.position(f, begin);
  // Fragments that reach past the keys are the caller's error; they must not become a fault.
  const int32_t last = min(share.position + share.tokens, geometry.keys - key_begin) - 1;
  share.blocks = last < 0 ? 0 : last / block_size + 1;
  return share;
}

// One CTA: a run of fragments a thread.
__global__ void __launch_bounds__(kThreads)
    count_items(Geometry geometry, DenseItems to, int32_t first_token, int32_t tokens) {
  __shared__ int32_t scan[32];
  const int run = (geometry.fragments + kThreads - 1) / kThreads;
  const int first = threadIdx.x * run, last = min(geometry.fragments, first + run);
  int32_t items = 0;
  int64_t pairs = 0;
#pragma unroll 1
  for (int f = first; f < last; ++f) {
    const Share share = share_of(geometry, f, to.block_size, first_token, tokens);
    items += share.blocks;
    pairs += static_cast<int64_t>(share.blocks) * share.tokens;
  }
  int32_t total;
  int32_t item_base = block_exclusive_scan<kThreads>(items, scan, total);
  // Pairs of a pass fit memory, so they are below 2^50: two scans, of 20 bits and of the rest.
  int32_t low_total, high_total;
  const int32_t low =
      block_exclusive_scan<kThreads>(static_cast<int32_t>(pairs & 0xfffff), scan, low_total);
  const int32_t high =
      block_exclusive_scan<kThreads>(static_cast<int32_t>(pairs >> 20), scan, high_total);
  int64_t pair_base = (static_cast<int64_t>(high) << 20) + low;
#pragma unroll 1
  for (int f = first; f < last; ++f) {
    const Share share = share_of(geometry, f, to.block_size, first_token, tokens);
    to.item_base[f] = item_base;
    to.pair_base[f] = pair_base;
    item_base += share.blocks;
    pair_base += static_cast<int64_t>(share.blocks) * share.tokens;
  }
  if (threadIdx.x == 0) {
    to.item_base[geometry.fragments] = total;
    to.pair_base[geometry.fragments] = (static_cast<int64_t>(high_total) << 20) + low_total;
    *to.count = total * to.proxy_heads;
    to.tickets[0] = to.tickets[1] = 0;
  }
}

__global__ void __launch_bounds__(256) write_items(Geometry geometry, DenseItems to, int32_t window,
                                                   int32_t first_token, int32_t tokens) {
  const int32_t of_head = to.item_base[geometry.fragments];
  const int64_t pairs_of_head = to.pair_base[geometry.fragments];
  const int32_t stride = gridDim.x * 256;
  for (int32_t i = blockIdx.x * 256 + threadIdx.x; i < of_head * to.proxy_heads; i += stride) {
    const int32_t head = i / of_head, within = i - head * of_head;
    int32_t low = 0, high = geometry.fragments; // largest f whose first item is <= within
    while (high - low > 1) {
      const int32_t middle = (low + high) >> 1;
      if (to.item_base[middle] <= within)
        low = middle;
      else
        high = middle;
    }
    const Share share = share_of(geometry, low, to.block_size, first_token, tokens);
    const int32_t block = within - to.item_base[low], begin = block * to.block_size;
    const int32_t skipped = max(0, begin - share.position); // tokens that do not see it
    const int32_t key_begin = geometry.k_begin(low) + begin;
    WorkItem item = {};
    item.proxy_head = head;
    item.window = window;
    item.block_begin = begin;
    item.key_begin = key_begin;
    item.key_count =
        min(to.block_size, min(geometry.k_len(low) - begin, geometry.keys - key_begin));
    item.entry_begin = static_cast<uint32_t>(share.first_token - first_token + skipped);
    item.entry_count = share.tokens - skipped;
    to.items[i] = item;
    to.pair_begin[i] =
        head * pairs_of_head + to.pair_base[low] + static_cast<int64_t>(block) * share.tokens;
  }
}

} // namespace

int64_t dense_item_bound(const Problem& problem, const Shapes& shapes, int32_t block_size) {
  const int64_t fragments = fragment_count(problem, shapes);
  const int64_t blocks = ceil_div<int64_t>(shapes.keys, block_size);
  const bool shared_keys = problem.fragments.k_begin || problem.fragments.k_len;
  return shared_keys ? fragments * blocks : fragments + blocks;
}

void list_dense_items(const Geometry& geometry, const DenseItems& to, int32_t first_token,
                      int32_t tokens, int32_t window, cudaStream_t stream) {
  launch("backward count_items", count_items, dim3(1), dim3(kThreads), 0, stream, geometry, to,
         first_token, tokens);
  launch("backward write_items", write_items, dim3(device_facts().sm_count * 2), dim3(256), 0,
         stream, geometry, to, window, first_token, tokens);
}

} // namespace thresher::cuda::portable::backward
