// From tvm-ffi's values to those of the core: tensor views, device and stream, errors.
#pragma once

#include <thresher/msa.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <string>

namespace thresher::bindings {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline DType dtype_of(const char* name, DLDataType dtype) {
  if (dtype.lanes == 1) {
    if (dtype.code == kDLFloat && dtype.bits == 32)
      return DType::kFloat32;
    if (dtype.code == kDLFloat && dtype.bits == 64)
      return DType::kFloat64;
    if (dtype.code == kDLBfloat && dtype.bits == 16)
      return DType::kBFloat16;
    if (dtype.code == kDLFloat && dtype.bits == 16)
      return DType::kFloat16;
    if (dtype.code == kDLInt && dtype.bits == 32)
      return DType::kInt32;
  }
  throw Error(ErrorCode::kInvalidType, name,
              "this dtype is not supported: float32, float64, bfloat16, float16 and int32 are");
}

inline Tensor tensor_of(const char* name, const TensorView& view) {
  if (view.ndim() > 4)
    throw Error(ErrorCode::kInvalidValue, name,
                "rank " + std::to_string(view.ndim()) + ", but at most 4 is supported");
  Tensor tensor;
  tensor.data = static_cast<char*>(view.data_ptr()) + view.byte_offset();
  tensor.dtype = dtype_of(name, view.dtype());
  tensor.rank = view.ndim();
  for (int axis = 0; axis < tensor.rank; ++axis) {
    tensor.shape[axis] = view.size(axis);
    tensor.stride[axis] = view.stride(axis);
  }
  return tensor;
}
inline Tensor tensor_of(const char* name, const Optional<TensorView>& view) {
  return view.has_value() ? tensor_of(name, view.value()) : Tensor{};
}

inline Device device_of(const TensorView& view) {
  const DLDevice device = view.device();
  if (device.device_type == kDLCPU)
    return {};
  if (device.device_type != kDLCUDA)
    throw Error(ErrorCode::kInvalidType, "device", "only CPU and CUDA tensors are supported");
  return {DeviceType::kCuda, device.device_id,
          TVMFFIEnvGetStream(device.device_type, device.device_id)};
}

// cu_seqlens [num_docs + 1]; absent: one document, or one a batch row.
inline Fragments fragments_of(const Optional<TensorView>& cu_seqlens) {
  Fragments fragments;
  if (cu_seqlens.has_value()) {
    const Tensor tensor = tensor_of("cu_seqlens", cu_seqlens.value());
    if (tensor.rank != 1 || tensor.dtype != DType::kInt32 || tensor.shape[0] < 1 ||
        (tensor.shape[0] > 1 && tensor.stride[0] != 1))
      throw Error(ErrorCode::kInvalidValue, "cu_seqlens",
                  "a contiguous int32 vector of num_docs + 1 entries is needed");
    fragments.count = tensor.shape[0] - 1;
    fragments.q_begin = static_cast<const int32_t*>(tensor.data);
  }
  return fragments;
}

// The caller allocates 255 bytes more than the size asked for.
inline Workspace workspace_of(const TensorView& view) {
  constexpr uintptr_t kAlignment = 256;
  const auto begin = reinterpret_cast<uintptr_t>(view.data_ptr()) + view.byte_offset();
  const uintptr_t aligned = (begin + kAlignment - 1) / kAlignment * kAlignment;
  const size_t bytes = static_cast<size_t>(view.numel()), lost = aligned - begin;
  return {reinterpret_cast<void*>(aligned), bytes > lost ? bytes - lost : 0};
}

// Runs `call` and turns the core's errors into Python's.
template <class F>
auto translated(F&& call) {
  try {
    return call();
  } catch (const Error& error) {
    const char* kind = "RuntimeError";
    switch (error.code()) {
    case ErrorCode::kInvalidValue:
    case ErrorCode::kNotSupported:
      kind = "ValueError";
      break;
    case ErrorCode::kInvalidType:
      kind = "TypeError";
      break;
    case ErrorCode::kOutOfMemory:
      kind = "MemoryError";
      break;
    case ErrorCode::kDeviceFailure:
      break;
    }
    throw tvm::ffi::Error(kind, error.what(), "");
  }
}

// One exported function an operation: without a workspace it returns the bytes that it needs, with
// one it runs.
template <class Params, class Size, class Run>
int64_t size_or_run(const Params& params, const Device& device,
                    const Optional<TensorView>& workspace, Size&& size, Run&& run) {
  if (!workspace.has_value())
    return static_cast<int64_t>(size(params, device));
  run(params, workspace_of(workspace.value()), device);
  return 0;
}

} // namespace thresher::bindings
