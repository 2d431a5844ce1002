// Cuts the caller's workspace into arrays. The same code that takes the arrays also counts them
// (null base), so a workspace size can never disagree with its use.
#pragma once

#include <thresher/error.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>

namespace thresher::cpu {

class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(std::initializer_list<int64_t> extents) {
    return static_cast<T*>(take_bytes(extents, sizeof(T)));
  }
  template <class T>
  T* take(int64_t count) {
    return take<T>({count});
  }
  void* take_bytes(std::initializer_list<int64_t> extents, size_t element_size = 1) {
    void* piece = base_ ? base_ + used_ : nullptr;
    int64_t bytes = static_cast<int64_t>(element_size);
    bool fits = true;
    for (int64_t extent : extents)
      fits = !__builtin_mul_overflow(bytes, extent, &bytes) && fits;
    // A wrapped size must never pass for a small one.
    if (!fits || bytes > kLargest - used_)
      throw Error(ErrorCode::kOutOfMemory, "workspace",
                  "this problem needs more bytes than 64-bit sizes can count");
    used_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return piece;
  }
  size_t used() const { return static_cast<size_t>(used_); }

 private:
  static constexpr int64_t kAlign = 256;
  static constexpr int64_t kLargest = std::numeric_limits<int64_t>::max() / 2;
  char* base_;
  int64_t used_ = 0;
};

} // namespace thresher::cpu
