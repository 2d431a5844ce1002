#include "cuda/common/launch.h"

#include <mutex>

namespace thresher::cuda {

const DeviceFacts& device_facts(int device) {
  constexpr int kMaxDevices = 128;
  static DeviceFacts facts[kMaxDevices];
  static std::once_flag asked[kMaxDevices];
  if (device < 0)
    check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMaxDevices)
    throw Error(ErrorCode::kInvalidValue, "device",
                "index " + std::to_string(device) + " is beyond the " +
                    std::to_string(kMaxDevices) + " devices supported");
  std::call_once(asked[device], [&] {
    DeviceFacts result;
    const auto ask = [&](int& value, cudaDeviceAttr attribute) {
      check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    };
    ask(result.sm_count, cudaDevAttrMultiProcessorCount);
    ask(result.major, cudaDevAttrComputeCapabilityMajor);
    ask(result.minor, cudaDevAttrComputeCapabilityMinor);
    ask(result.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    ask(result.shared_bytes_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    ask(result.l2_bytes, cudaDevAttrL2CacheSize);
    facts[device] = result;
  });
  return facts[device];
}

} // namespace thresher::cuda
