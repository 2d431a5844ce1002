// Choices read off a fuzzer's input, one after the other; zeros once it is used up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace fuzz {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  bool empty() const { return at_ == end_; }
  uint8_t byte() { return at_ < end_ ? *at_++ : 0; }
  bool flag() { return (byte() & 1) != 0; }
  // 0 .. n - 1, n <= 256.
  int32_t below(int32_t n) { return byte() % n; }
  int32_t between(int32_t low, int32_t high) { return low + below(high - low + 1); }
  template <class T>
  T raw() {
    uint8_t bits[sizeof(T)];
    for (uint8_t& b : bits)
      b = byte();
    T value;
    std::memcpy(&value, bits, sizeof value);
    return value;
  }

  // A value near which size arithmetic goes wrong, a small one, or any at all.
  int64_t wild() {
    constexpr int64_t k32 = std::numeric_limits<int32_t>::max();
    constexpr int64_t k64 = std::numeric_limits<int64_t>::max();
    static constexpr int64_t kEdges[] = {0,       1,           2,           3,
                                         16,      128,         1024,        1025,
                                         65535,   65536,       1 << 20,     1 << 24,
                                         1 << 30, k32 - 1,     k32,         k32 + 1,
                                         2 * k32, 2 * k32 + 2, 2 * k32 + 3, int64_t{1} << 40,
                                         k64 / 2, k64 - 1,     k64};
    constexpr int32_t kCount = sizeof kEdges / sizeof kEdges[0];
    const int32_t choice = below(2 * kCount + 4);
    if (choice < kCount)
      return kEdges[choice];
    if (choice < 2 * kCount)
      return -kEdges[choice - kCount] - (choice & 1);
    return choice & 1 ? raw<int64_t>() : raw<int8_t>();
  }
  int32_t wild32() { return static_cast<int32_t>(wild()); }

 private:
  const uint8_t *at_, *end_;
};

} // namespace fuzz
