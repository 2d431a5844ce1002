// A CTA on the CPU: every thread is a coroutine, so that kernels run as they are written, without a
// GPU. Only what the emulated kernels use is here; shim/ replaces the headers that hold PTX.
//
// Coroutines are resumed in an order that changes from round to round, bulk copies land at random
// times, and a wgmma reads its operands only when it is waited for: a barrier that is missing or
// released early shows as a wrong result, one that is never completed as a deadlock.
#pragma once

#include <thresher/params.h>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

// The language of kernels, as far as it goes.
#undef __device__
#undef __host__
#undef __global__
#undef __forceinline__
#undef __launch_bounds__
#undef __shared__
#undef __align__
#undef __grid_constant__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__
#define __align__(n)
#define __grid_constant__
#define threadIdx (::thresher::emulation::machine().thread_index())
#define blockIdx (::thresher::emulation::machine().block_index)

using std::max;
using std::min;

namespace thresher::emulation {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

// One wgmma of one thread: its 64 accumulators, descriptors of A and B.
struct Product {
  float* d;
  uint64_t a, b;
  bool accumulate;
  float (*value)(uint16_t); // of an operand's bits
};

// What a bulk tensor copy knows of its tensor; lies in a CUtensorMap.
struct Map {
  const uint16_t* data;
  int64_t size[4], stride[4]; // column, head, row, batch; in elements
  int32_t box[3];             // columns, heads, rows
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

class Machine {
 public:
  struct Index {
    int x;
  };
  Index block_index = {0};

  // --- one CTA ---------------------------------------------------------------------------------
  void run(int threads, uint8_t* shared, const std::function<void()>& kernel) {
    shared_ = shared;
    barriers_.clear();
    warps_.assign(static_cast<size_t>(threads / 32), {});
    block_ = {};
    threads_.clear();
    for (int i = 0; i < threads; ++i) {
      threads_.push_back(std::make_unique<Thread>());
      Thread& thread = *threads_.back();
      thread.index = i;
      thread.kernel = &kernel;
      thread.stack.resize(1 << 16);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data();
      thread.context.uc_stack.ss_size = thread.stack.size();
      thread.context.uc_link = &scheduler_;
      makecontext(&thread.context, &Machine::start, 0);
    }
    int idle = 0;
    for (bool alive = true; alive;) {
      alive = progress_ = false;
      const auto first = random_() % threads_.size();
      for (size_t i = 0; i < threads_.size(); ++i) {
        Thread& thread = *threads_[(first + i) % threads_.size()];
        if (thread.done)
          continue;
        alive = true;
        current_ = &thread;
        swapcontext(&scheduler_, &thread.context);
      }
      for (size_t i = 0; i < copies_.size();)
        if (copies_[i].rounds-- == 0) {
          const Copy copy = copies_[i];
          copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(i));
          land(copy);
        } else {
          ++i;
        }
      idle = progress_ || !copies_.empty() ? 0 : idle + 1;
      if (alive && idle > 100)
        fail("deadlock");
    }
    if (!copies_.empty())
      fail("a copy outlives its CTA");
  }
  Index thread_index() const { return {current_->index}; }
  uint32_t shared_address(const void* p) const {
    return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - shared_);
  }

  // --- collectives: each thread gives a word, and sees those of its group
  // --------------------------
  void warp_exchange(uint32_t word, uint32_t (&all)[32]) {
    Group& warp = warps_[static_cast<size_t>(current_->index / 32)];
    const uint32_t round = warp.round;
    warp.words[round & 1][current_->index % 32] = word;
    meet(warp, 32);
    std::memcpy(all, warp.words[round & 1], sizeof all);
  }
  void block_sync() { meet(block_, static_cast<int>(threads_.size())); }

  // --- mbarriers -------------------------------------------------------------------------------
  void barrier_init(uint64_t* barrier, int arrivals) {
    barriers_[barrier] = {arrivals, arrivals, 0, 0};
  }
  void barrier_arrive(uint64_t* barrier, int64_t bytes) {
    Barrier& b = barriers_.at(barrier);
    if (b.pending-- <= 0)
      fail("more arrivals than a barrier expects");
    b.bytes += bytes;
    settle(b);
  }
  void barrier_wait(uint64_t* barrier, uint32_t parity) {
    const Barrier& b = barriers_.at(barrier);
    while ((b.phase & 1) == (parity & 1))
      yield();
  }

  // --- bulk copies -----------------------------------------------------------------------------
  void copy(uint32_t to, const CUtensorMap* map, const int (&at)[4], uint64_t* barrier) {
    if (to % 1024 != 0)
      fail("a swizzled box must start at a multiple of 1,024 bytes");
    // Most come soon; some so late that they are missed though others were sent long before.
    const auto rounds = random_() % (random_() % 8 == 0 ? 200 : 8);
    copies_.push_back({to,
                       reinterpret_cast<const Map*>(map),
                       {at[0], at[1], at[2], at[3]},
                       barrier,
                       static_cast<int>(rounds)});
  }

  // --- wgmma -----------------------------------------------------------------------------------
  void product(const Product& product) {
    std::fill(product.d, product.d + 64, -12345.f); // nobody reads them before the wait
    current_->open.push_back(product);
  }
  void commit() {
    current_->groups.push_back(current_->open);
    current_->open.clear();
  }
  void wait_products(size_t pending) {
    for (auto rounds = random_() % 12; rounds > 0; --rounds) {
      progress_ = true;
      yield();
    }
    while (current_->groups.size() > pending) {
      multiply(current_->groups.front());
      current_->groups.erase(current_->groups.begin());
    }
    uint32_t all[32];
    warp_exchange(0, all); // .sync.aligned
  }

 private:
  struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    const std::function<void()>* kernel;
    int index = 0;
    bool done = false;
    std::vector<Product> open;
    std::vector<std::vector<Product>> groups;
  };
  struct Group {
    int count = 0;
    uint32_t round = 0;
    uint32_t words[2][32];
  };
  struct Barrier {
    int arrivals, pending;
    int64_t bytes;
    uint32_t phase;
  };
  struct Copy {
    uint32_t to;
    const Map* map;
    int at[4];
    uint64_t* barrier;
    int rounds; // until it lands
  };

  static void start();
  void yield() { swapcontext(&current_->context, &scheduler_); }
  void meet(Group& group, int threads) {
    const uint32_t round = group.round;
    if (++group.count == threads) {
      group.count = 0;
      ++group.round;
      progress_ = true;
    }
    while (group.round == round)
      yield();
  }
  void settle(Barrier& b) {
    progress_ = true;
    if (b.pending == 0 && b.bytes == 0) {
      ++b.phase;
      b.pending = b.arrivals;
    }
  }
  // 128-byte rows, their 16-byte chunks exchanged by the row's number modulo 8.
  static uint32_t swizzle(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

  void land(const Copy& copy) {
    const Map& map = *copy.map;
    for (int row = 0; row < map.box[2]; ++row)
      for (int head = 0; head < map.box[1]; ++head)
        for (int column = 0; column < map.box[0]; ++column) {
          const int64_t at[4] = {copy.at[0] + column, copy.at[1] + head, copy.at[2] + row,
                                 copy.at[3]};
          bool inside = true;
          int64_t offset = 0;
          for (int axis = 0; axis < 4; ++axis) {
            inside = inside && at[axis] >= 0 && at[axis] < map.size[axis];
            offset += at[axis] * map.stride[axis];
          }
          const uint16_t bits = inside ? map.data[offset] : 0;
          const int line = row * map.box[1] + head;
          std::memcpy(shared_ + swizzle(copy.to + static_cast<uint32_t>(line * 128 + column * 2)),
                      &bits, sizeof bits);
        }
    Barrier& b = barriers_.at(copy.barrier);
    b.bytes -= int64_t{2} * map.box[0] * map.box[1] * map.box[2];
    settle(b);
  }

  // K-major, 128-byte swizzle, groups of 8 rows 1,024 bytes apart.
  float operand(uint64_t descriptor, int row, int k, float (*value)(uint16_t)) const {
    if (descriptor >> 62 != 1 || (descriptor >> 32 & 0x3fff) != 64)
      fail("a descriptor that the emulation does not know");
    const auto start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
    uint16_t bits;
    std::memcpy(&bits,
                shared_ +
                    swizzle(start + static_cast<uint32_t>(row / 8 * 1024 + row % 8 * 128 + k * 2)),
                sizeof bits);
    return value(bits);
  }
  void multiply(const std::vector<Product>& group) const {
    const int lane = current_->index % 32, warp = current_->index / 32 % 4;
    if (group.empty() || group.front().accumulate)
      fail("a group of products that does not start afresh");
    double sums[64];
    for (const Product& p : group) {
      if (!p.accumulate)
        std::fill(sums, sums + 64, 0.);
      for (int k = 0; k < 16; ++k) {
        float a[2];
        for (int h = 0; h < 2; ++h)
          a[h] = operand(p.a, warp * 16 + lane / 4 + 8 * h, k, p.value);
        for (int column = 0; column < 32; ++column) {
          const float b = operand(p.b, column / 2 * 8 + 2 * (lane % 4) + column % 2, k, p.value);
          for (int h = 0; h < 2; ++h)
            sums[column / 2 * 4 + 2 * h + column % 2] += double{a[h]} * b;
        }
      }
    }
    std::copy(sums, sums + 64, group.front().d);
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  Thread* current_ = nullptr;
  ucontext_t scheduler_;
  bool progress_ = false;
  std::mt19937 random_{1};
  uint8_t* shared_ = nullptr;
  std::vector<Group> warps_;
  Group block_;
  std::map<uint64_t*, Barrier> barriers_;
  std::vector<Copy> copies_;
};

inline Machine& machine() {
  static Machine instance;
  return instance;
}
inline void Machine::start() {
  Thread& thread = *machine().current_;
  (*thread.kernel)();
  thread.done = true;
  machine().progress_ = true;
}

} // namespace thresher::emulation

// --- intrinsics ----------------------------------------------------------------------------------
template <class V>
V emulated_shuffle(V value, int from) {
  static_assert(sizeof(V) == 4);
  uint32_t word, all[32];
  std::memcpy(&word, &value, 4);
  thresher::emulation::machine().warp_exchange(word, all);
  std::memcpy(&value, &all[from & 31], 4);
  return value;
}
template <class V>
V __shfl_sync(unsigned, V value, int from) {
  return emulated_shuffle(value, from);
}
template <class V>
V __shfl_xor_sync(unsigned, V value, int mask) {
  return emulated_shuffle(value, (threadIdx.x & 31) ^ mask);
}
inline bool __any_sync(unsigned, bool predicate) {
  uint32_t all[32];
  thresher::emulation::machine().warp_exchange(predicate, all);
  return std::any_of(all, all + 32, [](uint32_t word) { return word != 0; });
}
inline void __syncwarp() {
  uint32_t all[32];
  thresher::emulation::machine().warp_exchange(0, all);
}
inline void __syncthreads() {
  thresher::emulation::machine().block_sync();
}
template <class V>
V __ldg(const V* from) {
  return *from;
}
inline int atomicAdd(int* to, int value) {
  const int before = *to;
  *to += value;
  return before;
}
inline int32_t __float_as_int(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
