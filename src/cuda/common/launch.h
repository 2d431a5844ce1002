// Host side of a launch: errors, device guard, device facts, dynamic shared memory.
#pragma once

#include <thresher/error.h>

#include <cuda_runtime.h>

#include <string>

namespace thresher::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess)
    return;
  cudaGetLastError(); // a launch error would otherwise be reported again by the next call
  throw Error(ErrorCode::kDeviceFailure, "",
              std::string(what) + ": " + cudaGetErrorName(status) + " (" +
                  cudaGetErrorString(status) + ")");
}

// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device_)
      check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (previous_ != device_)
      cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_, previous_ = 0;
};

struct DeviceFacts {
  int sm_count = 0;
  int major = 0, minor = 0;       // compute capability
  int shared_bytes_per_block = 0; // with opt-in
  int shared_bytes_per_sm = 0;
  int l2_bytes = 0;
};

// Of a device (default: the current one); asked once per device, then cached.
const DeviceFacts& device_facts(int device = -1);

// Launches and checks. `chained` starts the kernel while its predecessor in the stream still drains
// (programmatic dependent launch, sm_90 on); it must then call ptx::wait_for_predecessor() before
// it touches global memory. Ignored on older devices.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, bool chained, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0)
    return;
  if (shared_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          name);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (chained && device_facts().major >= 9) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, Params(args)...), name);
  check(cudaGetLastError(), name);
}

template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args&&... args)
  requires(sizeof...(Params) == sizeof...(Args))
{
  launch(name, kernel, grid, block, shared_bytes, stream, false, std::forward<Args>(args)...);
}

// CTAs of a kernel that one SM holds at a time (for persistent grids).
template <class Kernel>
int resident_blocks(Kernel kernel, int threads, size_t shared_bytes) {
  if (shared_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "cudaFuncSetAttribute");
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

template <class Int>
constexpr Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}

} // namespace thresher::cuda
