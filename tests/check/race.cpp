// A race on purpose, in the library's own parallel loop: every step counts in one variable without
// protection. If ThreadSanitizer is silent about it, its silence about the library means nothing.
#include <cstdio>
#include <vector>

#include "cpu/threads.h"

int main() {
  thresher::cpu::Arena count(nullptr);
  thresher::cpu::Threads(count, 64, 0);
  std::vector<char> memory(count.used());
  thresher::cpu::Arena arena(memory.data());
  const thresher::cpu::Threads threads(arena, 64, 0);
  long steps = 0, ordered = 0;
  threads.for_each(1000, [&](int64_t, void*) { ++steps; });
  // Reading and writing after the loop's end is no race: nothing may be reported here.
  ordered = steps;
  threads.for_ranges(1, 1, [&](int64_t, int64_t) { ordered += 1; });
  std::printf("%ld of 1000 steps counted\n", ordered - 1);
}
