// A CTA on the CPU: every thread is a coroutine, so that kernels run as they are written, without a
// GPU. Only what the emulated kernels use is here; shim/ replaces the headers that hold PTX.
//
// Coroutines are resumed in an order that changes from round to round, bulk copies and cp.async
// land at random times, and a wgmma reads shared memory only when it is waited for: a barrier that
// is missing or released early shows as a wrong result, one that is never completed as a deadlock.
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
#define gridDim (::thresher::emulation::machine().grid)
#define __log2f log2f

using std::max;
using std::min;

namespace thresher::emulation {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

// An operand of a wgmma in shared memory.
struct Operand {
  uint64_t descriptor;
  bool transposed; // MN-major
};
// One wgmma of one thread: the accumulators it holds, operands.
struct Product {
  float* d;
  int count; // of accumulators: half of the columns
  Operand a, b;
  bool a_in_registers;
  uint16_t rows[2][16]; // then: of A, rows lane / 4 and + 8
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
  Index block_index = {0}, grid = {1};

  // --- one CTA ---------------------------------------------------------------------------------
  void run(int threads, uint8_t* shared, const std::function<void()>& kernel, int block = 0) {
    block_index.x = block;
    shared_ = shared;
    barriers_.clear();
    warps_.assign(static_cast<size_t>(threads / 32), {});
    block_ = {};
    named_.clear();
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
      bool copying = !copies_.empty();
      for (const auto& thread : threads_) {
        auto& queue = thread->copies;
        copying = copying || !queue.empty();
        if (!queue.empty() && queue.front().rounds-- == 0)
          while (!queue.empty() && queue.front().rounds <= 0) {
            land(queue.front());
            queue.erase(queue.begin());
          }
      }
      idle = progress_ || copying ? 0 : idle + 1;
      if (alive && idle > 100)
        fail("deadlock");
    }
    if (!copies_.empty() || std::any_of(threads_.begin(), threads_.end(),
                                        [](const auto& t) { return !t->copies.empty(); }))
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
  void give_way() { yield(); } // within a loop that waits for memory
  void named_sync(int id, int threads) { meet(named_[id], threads); }

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
    if (to % 128 != 0)
      fail("a box must start at a multiple of 128 bytes");
    copies_.push_back(
        {to, *reinterpret_cast<const Map*>(map), {at[0], at[1], at[2], at[3]}, barrier, delay()});
  }

  // --- cp.async: a thread's land in their order, those before an arrival together ---------------
  uint8_t* shared(uint32_t address) { return shared_ + address; }
  void copy_async(uint32_t to, const void* from, uint32_t bytes, bool valid) {
    if (to % bytes != 0)
      fail("a misaligned cp.async");
    auto& queue = current_->copies;
    const bool first = queue.empty() || queue.back().barrier; // the others come with it
    queue.push_back({to, from, bytes, valid, nullptr, first ? delay() : 0});
  }
  void arrive_after_copies(uint64_t* barrier) {
    current_->copies.push_back({0, nullptr, 0, false, barrier, 0});
  }

  // --- wgmma -----------------------------------------------------------------------------------
  void product(const Product& product) {
    Accumulators& acc = current_->accumulators[product.d];
    if (acc.pending++ == 0)
      acc.sums.assign(product.d, product.d + product.count);
    std::fill(product.d, product.d + product.count, -12345.f); // nobody reads them before the wait
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
      for (const Product& p : current_->groups.front())
        multiply(p);
      current_->groups.erase(current_->groups.begin());
    }
    uint32_t all[32];
    warp_exchange(0, all); // .sync.aligned
  }

 private:
  struct SmallCopy {
    uint32_t to;
    const void* from;
    uint32_t bytes;
    bool valid;
    uint64_t* barrier; // not null: not a copy, but an arrival
    int rounds;        // until it lands
  };
  struct Accumulators {
    int pending = 0;
    std::vector<double> sums;
  };
  struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    const std::function<void()>* kernel;
    int index = 0;
    bool done = false;
    std::vector<Product> open;
    std::vector<std::vector<Product>> groups;
    std::map<float*, Accumulators> accumulators; // of products in flight
    std::vector<SmallCopy> copies;
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
    Map map; // a copy: the kernel that was given it may have ended
    int at[4];
    uint64_t* barrier;
    int rounds; // until it lands
  };

  // Most copies come soon; some so late that they are missed though others were sent long before.
  int delay() { return static_cast<int>(random_() % (random_() % 8 == 0 ? 200 : 8)); }
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
    const Map& map = copy.map;
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

  void land(const SmallCopy& copy) {
    progress_ = true;
    if (copy.barrier)
      barrier_arrive(copy.barrier, 0);
    else if (copy.valid)
      std::memcpy(shared_ + copy.to, copy.from, copy.bytes);
    else
      std::memset(shared_ + copy.to, 0, copy.bytes);
  }

  // Element (row, k) of A, (column, k) of B. Swizzled by 128 bytes: K-major, groups of 8 rows
  // `stride` bytes apart; or MN-major, groups of 8 k `stride` and of 64 rows `leading` apart.
  // Without swizzle, K-major: core matrices of 8 rows x 16 bytes, `leading` apart along k, `stride`
  // along rows.
  float operand(const Operand& operand, int row, int k, float (*value)(uint16_t)) const {
    const auto start = static_cast<uint32_t>(operand.descriptor & 0x3fff) << 4;
    const auto leading = static_cast<uint32_t>(operand.descriptor >> 16 & 0x3fff) << 4;
    const auto stride = static_cast<uint32_t>(operand.descriptor >> 32 & 0x3fff) << 4;
    const auto r = static_cast<uint32_t>(row), c = static_cast<uint32_t>(k);
    const uint64_t mode = operand.descriptor >> 62;
    uint32_t address = start;
    if (mode == 1 && !operand.transposed)
      address = swizzle(start + r / 8 * stride + r % 8 * 128 + c * 2);
    else if (mode == 1)
      address = swizzle(start + c / 8 * stride + c % 8 * 128 + r / 64 * leading + r % 64 * 2);
    else if (mode == 0 && !operand.transposed)
      address = start + r / 8 * stride + c / 8 * leading + r % 8 * 16 + c % 8 * 2;
    else
      fail("a descriptor that the emulation does not know");
    uint16_t bits;
    std::memcpy(&bits, shared_ + address, sizeof bits);
    return value(bits);
  }
  void multiply(const Product& p) {
    const int lane = current_->index % 32, warp = current_->index / 32 % 4;
    Accumulators& acc = current_->accumulators.at(p.d);
    if (!p.accumulate)
      std::fill(acc.sums.begin(), acc.sums.end(), 0.);
    for (int k = 0; k < 16; ++k) {
      float a[2];
      for (int h = 0; h < 2; ++h)
        a[h] = p.a_in_registers ? p.value(p.rows[h][k])
                                : operand(p.a, warp * 16 + lane / 4 + 8 * h, k, p.value);
      for (int column = 0; column < p.count / 2; ++column) {
        const float b = operand(p.b, column / 2 * 8 + 2 * (lane % 4) + column % 2, k, p.value);
        for (int h = 0; h < 2; ++h)
          acc.sums[static_cast<size_t>(column / 2 * 4 + 2 * h + column % 2)] += double{a[h]} * b;
      }
    }
    if (--acc.pending == 0) {
      std::copy(acc.sums.begin(), acc.sums.end(), p.d);
      current_->accumulators.erase(p.d);
    }
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  Thread* current_ = nullptr;
  ucontext_t scheduler_;
  bool progress_ = false;
  std::mt19937 random_{1};
  uint8_t* shared_ = nullptr;
  std::vector<Group> warps_;
  Group block_;
  std::map<int, Group> named_;
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
template <class V>
void __stcs(V* to, const V& value) {
  *to = value;
}
template <class V>
V __ldcs(const V* from) {
  return *from;
}
inline float __int_as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float __uint_as_float(uint32_t bits) {
  return __int_as_float(static_cast<int32_t>(bits));
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
inline int32_t __float_as_int(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
