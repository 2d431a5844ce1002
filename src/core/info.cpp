#include "core/backend.h"
#include "cpu/dispatch.h"

#include <thread>

namespace thresher {

const char* version() {
  return THRESHER_VERSION;
}

std::string info_json() {
  std::string json = "{\"version\": \"" THRESHER_VERSION "\", \"compiler\": \"" __VERSION__ "\"";
  json += ", \"cpu\": {\"isa\": \"" + std::string(cpu::isa_name()) +
          "\", \"hardware_threads\": " + std::to_string(std::thread::hardware_concurrency()) +
          ", \"dtypes\": [\"float32\", \"float64\", \"bfloat16\", \"float16\"]}";
#if defined(THRESHER_HAS_CUDA)
  json += ", \"cuda\": {\"built\": true, \"dtypes\": [\"bfloat16\", \"float16\"], \"devices\": " +
          cuda::devices_json() + "}";
#else
  json += ", \"cuda\": {\"built\": false, \"dtypes\": [], \"devices\": []}";
#endif
  return json + "}";
}

} // namespace thresher
