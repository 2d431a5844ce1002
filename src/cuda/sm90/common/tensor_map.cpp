#include "cuda/sm90/common/tensor_map.h"

#include "cuda/common/launch.h"

#include <cudaTypedefs.h>

#include <string>

namespace thresher::cuda::sm90 {

namespace {

// Through the runtime, so that nothing links against libcuda.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &status),
          "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)");
    if (status != cudaDriverEntryPointSuccess)
      throw Error(ErrorCode::kDeviceFailure, "", "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return function;
}

} // namespace

CUtensorMap encode_map(const Tensor& tensor, int heads, int rows) {
  const bool batched = tensor.rank == 4;
  const int row_axis = tensor.rank - 3;
  const cuuint64_t n = batched ? tensor.shape[0] : 1, s = tensor.shape[row_axis];
  const cuuint64_t h = tensor.shape[row_axis + 1], d = tensor.shape[row_axis + 2];
  constexpr cuuint64_t kBytes = 2;
  // A dimension of size 1 is never stepped over, but its stride must still be a legal one.
  auto stride = [&](int axis, cuuint64_t size) -> cuuint64_t {
    return size > 1 ? static_cast<cuuint64_t>(tensor.stride[axis]) * kBytes : 16;
  };
  const cuuint64_t sizes[4] = {d, h, s, n};
  const cuuint64_t strides[3] = {stride(row_axis + 1, h), stride(row_axis, s),
                                 batched ? stride(0, n) : 16};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(heads), static_cast<cuuint32_t>(rows), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encoder()(&map,
                tensor.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                4, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw Error(ErrorCode::kDeviceFailure, "",
                "cuTensorMapEncodeTiled failed with " + std::to_string(status));
  return map;
}

} // namespace thresher::cuda::sm90
