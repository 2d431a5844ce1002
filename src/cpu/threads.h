// Parallel loops. Each thread has its own piece of scratch memory; which thread does what never
// changes a result.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/arena.h"

namespace thresher::cpu {

class Threads {
 public:
  // Takes the rest of the arena: scratch for every thread that OpenMP would use now, or for as many
  // as a workspace of workspace_bytes has room for (0: only counting).
  Threads(Arena& arena, size_t scratch_bytes, size_t workspace_bytes)
      : count_(omp_get_max_threads()), stride_((scratch_bytes + 4095) / 4096 * 4096) {
    if (workspace_bytes > 0 && stride_ > 0) {
      const size_t room = (workspace_bytes - std::min(workspace_bytes, arena.used())) / stride_;
      count_ = std::max(1, static_cast<int>(std::min<size_t>(room, static_cast<size_t>(count_))));
    }
    memory_ = static_cast<char*>(arena.take_bytes({count_}, stride_));
  }

  // body(i, scratch) for i in [0, n), handed out one at a time.
  template <class Body>
  void for_each(int64_t n, Body&& body) const {
    const int threads = static_cast<int>(std::min<int64_t>(count_, n));
    if (threads <= 1) {
      for (int64_t i = 0; i < n; ++i)
        body(i, static_cast<void*>(memory_));
      return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < n; ++i)
      body(i, static_cast<void*>(memory_ + stride_ * static_cast<size_t>(omp_get_thread_num())));
  }
  // body(begin, end[, scratch]) over pieces of [0, n).
  template <class Body>
  void for_ranges(int64_t n, int64_t piece, Body&& body) const {
    for_each((n + piece - 1) / piece, [&](int64_t i, void* scratch) {
      if constexpr (std::is_invocable_v<Body, int64_t, int64_t, void*>)
        body(i * piece, std::min(n, (i + 1) * piece), scratch);
      else
        body(i * piece, std::min(n, (i + 1) * piece));
    });
  }

 private:
  int count_;
  size_t stride_;
  char* memory_;
};

} // namespace thresher::cpu
