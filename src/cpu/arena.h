// Cuts the caller's workspace into arrays. The same code that takes the arrays also counts them
// (null base), so a workspace size can never disagree with its use. Sizes that do not fit into 63
// bits are an Error and never wrap around.
#pragma once

#include <thresher/error.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace thresher::cpu {

inline int64_t product(std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (int64_t factor : factors)
    if (__builtin_mul_overflow(result, factor, &result))
      throw Error(ErrorCode::kOutOfMemory, "workspace",
                  "the problem needs more memory than can be addressed");
  return result;
}

class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(
        take_bytes(static_cast<size_t>(product({count, static_cast<int64_t>(sizeof(T))}))));
  }
  void* take_bytes(size_t bytes) {
    void* piece = base_ ? base_ + used_ : nullptr;
    used_ += (bytes + kAlign - 1) / kAlign * kAlign;
    if (bytes > kMost || used_ > kMost)
      throw Error(ErrorCode::kOutOfMemory, "workspace",
                  "the problem needs more memory than can be addressed");
    return piece;
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t kAlign = 256, kMost = SIZE_MAX / 2 - kAlign;
  char* base_;
  size_t used_ = 0;
};

} // namespace thresher::cpu
