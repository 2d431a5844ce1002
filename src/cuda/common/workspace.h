// Cuts the caller's workspace into aligned arrays. The same code computes the size (base null) and
// hands out the pointers, so the two can never disagree.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thresher::cuda {

class WorkspaceCarver {
 public:
  static constexpr size_t kAlignment = 256; // TMA, 128-byte sectors and vector access all fit

  explicit WorkspaceCarver(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  // Next array of `count` elements; null while only measuring, and for count 0.
  template <class T>
  T* take(int64_t count) {
    const size_t offset = bytes_;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ && count > 0 ? reinterpret_cast<T*>(base_ + offset) : nullptr;
  }

  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

} // namespace thresher::cuda
