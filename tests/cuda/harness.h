// What the CUDA tests share: device memory full of poison, batches of odd documents, descriptors.
// Host code only: the kernels are reached through the library's own interface.
#pragma once

#include <thresher/params.h>

#include "core/shapes.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace thresher::test {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status == cudaSuccess)
    return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::abort(); // the context is gone: no later result would mean anything
}
#define CUDA_CHECK(call) ::thresher::test::cuda_check((call), #call)

// --- element types
// ----------------------------------------------------------------------------------
template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return DType::kBFloat16;
  else if constexpr (std::is_same_v<T, __half>)
    return DType::kFloat16;
  else if constexpr (std::is_same_v<T, int32_t>)
    return DType::kInt32;
  else
    return DType::kFloat32;
}
template <class T>
double to_double(T x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(x);
  else if constexpr (std::is_same_v<T, __half>)
    return __half2float(x);
  else
    return static_cast<double>(x);
}
template <class T>
T from_double(double x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16(static_cast<float>(x));
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half(static_cast<float>(x));
  else
    return static_cast<T>(x);
}

// --- device memory
// ----------------------------------------------------------------------------------- An array
// between two guard zones, all of it filled with a pattern that is NaN in every float type and an
// absurd number in integer ones.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count) : count_(count) {
    CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&base_), bytes() + 2 * kGuard));
    poison();
  }
  explicit DeviceArray(const std::vector<T>& values)
      : DeviceArray(static_cast<int64_t>(values.size())) {
    CUDA_CHECK(cudaMemcpy(data(), values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(base_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return reinterpret_cast<T*>(base_ + kGuard); }
  int64_t size() const { return count_; }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }

  void poison() { CUDA_CHECK(cudaMemset(base_, kPoison, bytes() + 2 * kGuard)); }
  std::vector<T> download() const {
    std::vector<T> values(static_cast<size_t>(count_));
    CUDA_CHECK(cudaMemcpy(values.data(), data(), bytes(), cudaMemcpyDeviceToHost));
    return values;
  }
  // Whether nothing was written before or behind the array.
  bool guards_intact() const {
    std::vector<unsigned char> zone(kGuard);
    for (const char* from : {base_, base_ + kGuard + bytes()}) {
      CUDA_CHECK(cudaMemcpy(zone.data(), from, kGuard, cudaMemcpyDeviceToHost));
      for (unsigned char byte : zone)
        if (byte != kPoison)
          return false;
    }
    return true;
  }

 private:
  static constexpr int kPoison = 0xFF; // NaN as fp32, bf16, fp16
  static constexpr size_t kGuard = 1024;
  char* base_ = nullptr;
  int64_t count_;
};

// --- batches
// ------------------------------------------------------------------------------------------
// Fragments as the library takes them, on the host, and their device copies.
struct Batch {
  int64_t tokens = 0, keys = 0;
  std::vector<int32_t> q_begin, k_begin, k_len; // k_begin, k_len empty: a plain packed batch
  int64_t rows = 1, per_row = 0;                // q_begin empty: this many equal rows

  int64_t fragments() const {
    return q_begin.empty() ? rows : static_cast<int64_t>(q_begin.size()) - 1;
  }
  int64_t first_query(int64_t f) const {
    return q_begin.empty() ? f * per_row : q_begin[static_cast<size_t>(f)];
  }
  int64_t queries(int64_t f) const { return first_query(f + 1) - first_query(f); }
  int64_t first_key(int64_t f) const {
    return k_begin.empty() ? first_query(f) : k_begin[static_cast<size_t>(f)];
  }
  int64_t visible_keys(int64_t f) const {
    return k_len.empty() ? queries(f) : k_len[static_cast<size_t>(f)];
  }
  // Per token: position in its document (-1: sees nothing) and key row of position 0.
  struct Token {
    int64_t position = -1, first_key = 0, fragment = -1;
  };
  std::vector<Token> describe() const {
    std::vector<Token> result(static_cast<size_t>(tokens));
    for (int64_t f = 0; f < fragments(); ++f)
      for (int64_t i = 0; i < queries(f); ++i) {
        const int64_t position = visible_keys(f) - queries(f) + i;
        result[static_cast<size_t>(first_query(f) + i)] = {position < 0 ? -1 : position,
                                                           first_key(f), f};
      }
    return result;
  }
};

// Documents one after the other, then `padding` tokens.
inline Batch packed(const std::vector<int64_t>& lengths, int64_t padding = 0) {
  Batch batch;
  batch.q_begin = {0};
  for (int64_t length : lengths)
    batch.q_begin.push_back(static_cast<int32_t>(batch.q_begin.back() + length));
  batch.tokens = batch.keys = batch.q_begin.back() + padding;
  return batch;
}
// Equal rows without fragments.
inline Batch rows(int64_t count, int64_t length) {
  Batch batch;
  batch.rows = count;
  batch.per_row = length;
  batch.tokens = batch.keys = count * length;
  return batch;
}
// What one rank of `ranks` holds of these documents: of each the chunks `rank` and 2 ranks - 1 -
// rank, all keys stored; fragments in an order that is not that of the keys.
inline Batch context_parallel(const std::vector<int64_t>& lengths, int64_t ranks, int64_t rank) {
  Batch batch;
  batch.q_begin = {0};
  std::vector<int64_t> starts;
  for (int64_t length : lengths) {
    starts.push_back(batch.keys);
    batch.keys += length;
  }
  for (size_t i = lengths.size(); i-- > 0;) {
    const int64_t length = lengths[i], chunks = 2 * ranks;
    for (int64_t chunk : {chunks - 1 - rank, rank}) {
      const int64_t begin = length * chunk / chunks, end = length * (chunk + 1) / chunks;
      batch.q_begin.push_back(static_cast<int32_t>(batch.q_begin.back() + end - begin));
      batch.k_begin.push_back(static_cast<int32_t>(starts[i]));
      batch.k_len.push_back(static_cast<int32_t>(end));
    }
  }
  batch.tokens = batch.q_begin.back();
  return batch;
}

// The device side of a batch; fills Problem::fragments.
class DeviceBatch {
 public:
  explicit DeviceBatch(const Batch& batch)
      : batch_(batch), q_begin_(batch.q_begin), k_begin_(batch.k_begin), k_len_(batch.k_len) {}
  void describe(Problem& problem, Shapes& shapes) const {
    if (!batch_.q_begin.empty()) {
      problem.fragments.count = batch_.fragments();
      problem.fragments.q_begin = q_begin_.data();
      problem.fragments.k_begin = batch_.k_begin.empty() ? nullptr : k_begin_.data();
      problem.fragments.k_len = batch_.k_len.empty() ? nullptr : k_len_.data();
    }
    shapes.batch = batch_.q_begin.empty() ? batch_.rows : 1;
    shapes.tokens = batch_.tokens;
    shapes.keys = batch_.keys;
    shapes.tokens_per_row = batch_.tokens / shapes.batch;
    shapes.keys_per_row = batch_.keys / shapes.batch;
  }

 private:
  const Batch& batch_;
  DeviceArray<int32_t> q_begin_, k_begin_, k_len_;
};

// --- tensors
// -------------------------------------------------------------------------------------------
// Contiguous packed tensors.
template <class T>
Tensor tensor_of(const DeviceArray<T>& array, int64_t tokens, int64_t heads, int64_t dim) {
  Tensor tensor;
  tensor.data = array.data();
  tensor.dtype = dtype_of<T>();
  tensor.rank = 3;
  const int64_t shape[3] = {tokens, heads, dim};
  int64_t stride = 1;
  for (int axis = 2; axis >= 0; --axis) {
    tensor.shape[axis] = shape[axis];
    tensor.stride[axis] = stride;
    stride *= shape[axis];
  }
  return tensor;
}
template <class T>
Tensor tensor_of(const DeviceArray<T>& array, int64_t tokens, int64_t heads) {
  Tensor tensor;
  tensor.data = array.data();
  tensor.dtype = dtype_of<T>();
  tensor.rank = 2;
  tensor.shape[0] = tokens;
  tensor.shape[1] = tensor.stride[0] = heads;
  tensor.stride[1] = 1;
  return tensor;
}

// Normal values, drawn from a table so that large tensors are made in no time.
template <class T>
std::vector<T> random_values(int64_t count, uint64_t seed, double scale = 1) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<T> table(1 << 16);
  for (T& value : table)
    value = from_double<T>(scale * normal(generator));
  std::vector<T> values(static_cast<size_t>(count));
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  for (T& value : values) {
    state ^= state << 13; // xorshift64
    state ^= state >> 7;
    state ^= state << 17;
    value = table[state >> 48];
  }
  return values;
}

// Milliseconds of the median of `repeats` runs on the default stream, after a warm-up.
template <class F>
double median_ms(int repeats, F&& f) {
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  f();
  std::vector<float> times;
  for (int i = 0; i < repeats; ++i) {
    CUDA_CHECK(cudaEventRecord(begin));
    f();
    CUDA_CHECK(cudaEventRecord(end));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// A graph of `count` calls: no launch gaps.
template <class F>
cudaGraphExec_t make_graph(int count, F&& f) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CUDA_CHECK(cudaStreamCreate(&stream));
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < count; ++i)
    f(stream);
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));
  CUDA_CHECK(cudaStreamDestroy(stream));
  return executable;
}

// Median of one call from such a graph.
template <class F>
double graph_ms(int count, F&& f) {
  const cudaGraphExec_t executable = make_graph(count, f);
  const double ms = median_ms(5, [&] { CUDA_CHECK(cudaGraphLaunch(executable, nullptr)); });
  CUDA_CHECK(cudaGraphExecDestroy(executable));
  return ms / count;
}

} // namespace thresher::test
