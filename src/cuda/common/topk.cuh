// Exact top-k of block scores with the contract's order: the higher score wins, then the lower id;
// a NaN score ranks below every number.
#pragma once

#include "cuda/common/view.h"

#include <cstdint>

namespace thresher::cuda {

// One candidate as a 64-bit number, larger = better: score in an order-preserving form above, the
// complement of the id below. 0 stands for "no candidate".
using Candidate = unsigned long long;

#if defined(__CUDACC__)

__device__ __forceinline__ Candidate make_candidate(float score, int32_t id) {
  const uint32_t bits = __float_as_uint(score + 0.0f); // -0 and +0 are a tie
  uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (score != score)
    key = 0;
  return static_cast<Candidate>(key) << 32 | ~static_cast<uint32_t>(id);
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

// The best `capacity` candidates of one row, kept by one thread in memory: an unordered list in
// groups, the least of each group, and in registers the least of all, which the next better
// candidate replaces. A replacement reads one group and the groups' least, not the whole list.
// `stride` is the distance between the row's entries, so that the threads of a warp touch
// neighbouring words.
class RowTopK {
  static constexpr int kGroup = 8;

 public:
  // Entries of memory that a row needs.
  THRESHER_HOST_DEVICE static constexpr int entries(int capacity) {
    const int groups = (capacity + kGroup - 1) / kGroup;
    return groups * (kGroup + 1);
  }

  __device__ __forceinline__ RowTopK(Candidate* list, int stride, int capacity)
      : list_(list), stride_(stride), capacity_(capacity),
        groups_((capacity + kGroup - 1) / kGroup) {}

  __device__ __forceinline__ void clear() {
    size_ = 0;
    // The end of the last group must never look like the least.
    for (int i = capacity_; i < groups_ * kGroup; ++i)
      list_[i * stride_] = kNever;
  }

  __device__ __forceinline__ void offer(float score, int32_t id) {
    const Candidate candidate = make_candidate(score, id);
    if (size_ < capacity_) {
      list_[size_ * stride_] = candidate;
      if (++size_ == capacity_)
        start();
    } else if (candidate > least_) {
      replace(candidate);
    }
  }

  __device__ __forceinline__ int size() const { return size_; }
  __device__ __forceinline__ Candidate operator[](int i) const { return list_[i * stride_]; }

 private:
  static constexpr Candidate kNever = ~Candidate{0};

  __device__ __forceinline__ Candidate& group_least(int group) {
    return list_[(groups_ * kGroup + group) * stride_];
  }

  __device__ __forceinline__ void start() {
    least_ = kNever;
    for (int group = 0; group < groups_; ++group) {
      Candidate least = kNever;
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        least = min(least, list_[(group * kGroup + i) * stride_]);
      group_least(group) = least;
      if (least < least_) {
        least_ = least;
        least_group_ = group;
      }
    }
  }

  __device__ __forceinline__ void replace(Candidate candidate) {
    Candidate* group_list = list_ + least_group_ * kGroup * stride_;
    Candidate own[kGroup], least = candidate;
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      own[i] = group_list[i * stride_];
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (own[i] == least_) // candidates differ from each other
        group_list[i * stride_] = candidate;
      else
        least = min(least, own[i]);
    group_least(least_group_) = least;
    least_ = kNever;
    for (int group = 0; group < groups_; ++group) {
      const Candidate other = group_least(group);
      if (other < least_) {
        least_ = other;
        least_group_ = group;
      }
    }
  }

  Candidate* list_;
  int stride_, capacity_, groups_;
  int size_ = 0, least_group_ = 0;
  Candidate least_ = 0;
};

#endif // __CUDACC__

} // namespace thresher::cuda
