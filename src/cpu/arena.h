// Cuts the caller's workspace into arrays. The same code that takes the arrays also counts them
// (null base), so a workspace size can never disagree with its use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thresher::cpu {

class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }
  void* take_bytes(size_t bytes) {
    void* piece = base_ ? base_ + used_ : nullptr;
    used_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t kAlign = 256;
  char* base_;
  size_t used_ = 0;
};

} // namespace thresher::cpu
