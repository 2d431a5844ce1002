// Stands in for src/cuda/common/topk.cuh where kernels are emulated.
#pragma once

#include "cuda/common/view.h"

#include <algorithm>

namespace thresher::cuda {

using Candidate = unsigned long long;

inline int32_t candidate_id(Candidate candidate) {
  return static_cast<int32_t>(~static_cast<uint32_t>(candidate));
}
inline float max_nan(float a, float b) {
  return a != a ? a : b != b ? b : std::max(a, b);
}

} // namespace thresher::cuda
