// Top-k of one row in one lane's registers.
#pragma once

#include "cuda/common/topk.cuh"

namespace thresher::cuda::sm90::select {

inline constexpr int32_t kNoKey = INT32_MIN, kNanKey = INT32_MIN + 1;

// A score as a whole number in the same order; NaN below every number, -0 and +0 a tie.
__device__ __forceinline__ int32_t order_key(float score) {
  const int32_t bits = __float_as_int(score + 0.0f);
  const int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
  return score != score ? kNanKey : key;
}

// Sorted, best first. Blocks come in ascending order, so a tie goes to the one that is there.
template <int kPlaces>
class SortedList {
 public:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      key_[i] = kNoKey;
      id_[i] = 0;
    }
  }
  __device__ __forceinline__ bool admits(int32_t key) const { return key > key_[kPlaces - 1]; }
  // Without a branch; a key that is not admitted changes nothing.
  __device__ __forceinline__ void insert(int32_t key, int32_t id) {
    bool above = admits(key); // the place below
#pragma unroll
    for (int i = kPlaces - 1; i > 0; --i) {
      const bool here = key > key_[i - 1];
      id_[i] = here ? id_[i - 1] : above ? id : id_[i];
      key_[i] = max(key_[i], min(key, key_[i - 1]));
      above = here;
    }
    id_[0] = above ? id : id_[0];
    key_[0] = max(key_[0], key);
  }
  __device__ __forceinline__ int32_t id(int i) const { return id_[i]; }
  __device__ __forceinline__ Candidate candidate(int i) const {
    if (key_[i] == kNoKey)
      return 0;
    return static_cast<Candidate>(static_cast<uint32_t>(key_[i]) ^ 0x80000000u) << 32 |
           ~static_cast<uint32_t>(id_[i]);
  }

 private:
  int32_t key_[kPlaces], id_[kPlaces];
};

} // namespace thresher::cuda::sm90::select
