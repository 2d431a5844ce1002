#include "cuda/index/tokens.h"

#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"

namespace thresher::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRankThreads = 1024;

// Block row of block 0 of every fragment when keys are described on their own. Documents are ranked
// by their first key: a bit a document start, then a running count over the words of bits. One CTA:
// a million keys are 32 words a thread.
__global__ void __launch_bounds__(kRankThreads)
    rank_documents(BlockIndex index, Geometry geometry) {
  __shared__ int32_t scan[32];
  if (index.idle())
    return;
  uint32_t* bits = index.scratch.key_starts;
  const int words = geometry.keys / 32 + 1;
  const auto holds_keys = [&](int f) {
    const int32_t begin = geometry.k_begin(f);
    return geometry.k_len(f) > 0 && begin >= 0 && begin < geometry.keys;
  };
  for (int f = threadIdx.x; f < geometry.fragments; f += kRankThreads)
    if (holds_keys(f))
      atomicOr(bits + geometry.k_begin(f) / 32, 1u << (geometry.k_begin(f) % 32));
  __syncthreads();

  // Each thread counts a run of words; fragments then look up their run and finish within it.
  extern __shared__ int32_t starts_before[]; // [kRankThreads]
  const int per_thread = (words + kRankThreads - 1) / kRankThreads;
  const int first = threadIdx.x * per_thread, last = min(words, first + per_thread);
  int32_t starts = 0, total;
  for (int word = first; word < last; ++word)
    starts += __popc(bits[word]);
  starts_before[threadIdx.x] = block_exclusive_scan<kRankThreads>(starts, scan, total);
  __syncthreads();

  for (int f = threadIdx.x; f < geometry.fragments; f += kRankThreads) {
    if (!holds_keys(f))
      continue; // no token of it sees a key, so its row is never asked for
    const int32_t begin = geometry.k_begin(f);
    const int word = begin / 32, run = word / per_thread;
    int32_t rank = starts_before[run];
    for (int earlier = run * per_thread; earlier < word; ++earlier)
      rank += __popc(bits[earlier]);
    rank += __popc(bits[word] & ((1u << (begin % 32)) - 1));
    index.scratch.fragment_row[f] = begin / index.block_size + rank;
  }
}

// kOwnKeys: the fragments describe keys apart from queries (k_begin or k_len given).
template <bool kOwnKeys>
__global__ void __launch_bounds__(kThreads) describe(BlockIndex index, Geometry geometry) {
  if (index.idle())
    return;
  const int32_t block_size = index.block_size;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token < index.tokens) {
    const int32_t f = geometry.fragment_of(static_cast<int32_t>(token));
    int32_t position = -1, row = 0;
    if (f >= 0) {
      const int32_t key_begin = geometry.k_begin(f);
      position = geometry.position(f, static_cast<int32_t>(token));
      // Fragments that reach past the keys are the caller's error; they must not become a fault.
      if (position < 0 || key_begin < 0 || position >= geometry.keys - key_begin)
        position = -1;
      else if constexpr (kOwnKeys)
        row = index.scratch.fragment_row[f];
      else
        row = key_begin / block_size + f;
      if (!kOwnKeys && position >= 0 && position % block_size == 0)
        index.block_rows[row + position / block_size] = {
            key_begin + position, min(block_size, geometry.k_len(f) - position), position, 0};
    }
    index.position[token] = position;
    index.row_base[token] = row;
  }
  if constexpr (kOwnKeys) {
    // Fragments of one document write the same values; the longest decides how many keys there are.
    for (int f = blockIdx.x; f < geometry.fragments; f += gridDim.x) {
      const int32_t key_begin = geometry.k_begin(f);
      if (key_begin < 0 || key_begin >= geometry.keys)
        continue;
      const int32_t length = min(geometry.k_len(f), geometry.keys - key_begin);
      for (int32_t position = threadIdx.x * block_size; position < length;
           position += kThreads * block_size) {
        BlockRow* row = index.block_rows + index.scratch.fragment_row[f] + position / block_size;
        row->key_begin = key_begin + position;
        row->block_begin = position;
        atomicMax(&row->key_count, min(block_size, length - position));
      }
    }
  }
}

} // namespace

void describe_tokens(const BlockIndex& index, const Geometry& geometry, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(index.tokens, kThreads)));
  if (index.scratch.fragment_row) {
    launch("rank_documents", rank_documents, dim3(1), dim3(kRankThreads),
           kRankThreads * sizeof(int32_t), stream, index, geometry);
    launch("describe_tokens", describe<true>, grid, dim3(kThreads), 0, stream, index, geometry);
  } else {
    launch("describe_tokens", describe<false>, grid, dim3(kThreads), 0, stream, index, geometry);
  }
}

} // namespace thresher::cuda
