// From run-time dtype and head dimension to template arguments, without macros:
//   with_dtype(dtype, [&]<class T>() { ... });
//   with_dim<64, 128>(padded_dim, [&]<int kDim>() { ... });
#pragma once

#include <thresher/error.h>
#include <thresher/params.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

namespace thresher::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

inline bool is_half_type(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

template <class F>
void with_dtype(DType dtype, F&& f) {
  if (dtype == DType::kBFloat16)
    f.template operator()<bf16>();
  else
    f.template operator()<fp16>();
}

// Kernels exist for these head dimensions; a smaller one runs in the next larger, zero-filled.
inline constexpr int kHeadDims[] = {64, 96, 128, 192, 256};
inline constexpr int kMaxHeadDim = 256;

inline int padded_dim(int dim) {
  for (int padded : kHeadDims)
    if (dim <= padded)
      return padded;
  return 0;
}

template <int... kDims, class F>
void with_dim(int padded, F&& f) {
  const bool found = ((padded == kDims && (f.template operator()<kDims>(), true)) || ...);
  if (!found)
    throw Error(ErrorCode::kNotSupported, "head_dim",
                "no kernel was built for a padded head dimension of " + std::to_string(padded));
}

} // namespace thresher::cuda
