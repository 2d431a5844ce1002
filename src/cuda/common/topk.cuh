// Exact top-k of block scores with the contract's order: the higher score wins, then the lower id;
// a NaN score ranks below every number.
#pragma once

#include <cstdint>

namespace thresher::cuda {

// One candidate as a 64-bit number, larger = better: score in an order-preserving form above, the
// complement of the id below. 0 stands for "no candidate".
using Candidate = uint64_t;

__device__ __forceinline__ Candidate make_candidate(float score, int32_t id) {
  const uint32_t bits = __float_as_uint(score + 0.0f); // -0 and +0 are a tie
  uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (score != score)
    key = 0;
  return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ int32_t candidate_id(Candidate candidate) {
  return static_cast<int32_t>(~static_cast<uint32_t>(candidate));
}

// Maximum that a NaN takes over (fmaxf drops it).
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The best `capacity` candidates of one row, kept by one thread: an unordered list in memory whose
// worst member is known. `stride` is the distance between the row's entries, so that the threads of
// a warp touch neighbouring words. Room for a multiple of kTopKUnroll entries is needed.
inline constexpr int kTopKUnroll = 4;

class RowTopK {
 public:
  __device__ __forceinline__ RowTopK(Candidate* list, int stride, int capacity)
      : list_(list), stride_(stride), capacity_(capacity) {}

  __device__ __forceinline__ void clear() {
    size_ = 0;
    worst_ = 0;
    worst_at_ = 0;
    // The tail that the unrolled search reads must never look like the worst.
    for (int i = capacity_; i % kTopKUnroll != 0; ++i)
      list_[i * stride_] = ~Candidate{0};
  }

  __device__ __forceinline__ void offer(float score, int32_t id) {
    const Candidate candidate = make_candidate(score, id);
    if (size_ < capacity_) {
      list_[size_ * stride_] = candidate;
      if (++size_ == capacity_)
        find_worst();
    } else if (candidate > worst_) {
      list_[worst_at_ * stride_] = candidate;
      find_worst();
    }
  }

  __device__ __forceinline__ int size() const { return size_; }
  __device__ __forceinline__ Candidate operator[](int i) const { return list_[i * stride_]; }

 private:
  __device__ __forceinline__ void find_worst() {
    worst_ = ~Candidate{0};
    for (int i = 0; i < capacity_; i += kTopKUnroll) {
      Candidate entries[kTopKUnroll];
#pragma unroll
      for (int j = 0; j < kTopKUnroll; ++j)
        entries[j] = list_[(i + j) * stride_];
#pragma unroll
      for (int j = 0; j < kTopKUnroll; ++j)
        if (entries[j] < worst_) {
          worst_ = entries[j];
          worst_at_ = i + j;
        }
    }
  }

  Candidate* list_;
  int stride_, capacity_;
  int size_ = 0, worst_at_ = 0;
  Candidate worst_ = 0;
};

} // namespace thresher::cuda
