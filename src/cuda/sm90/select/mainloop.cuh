// A consumer warpgroup: scores of 128 rows against 128 keys at a time, block maxima, top-k.
#pragma once

#include "cuda/portable/select/unit.cuh"
#include "cuda/sm90/common/async.cuh"
#include "cuda/sm90/common/wgmma.cuh"
#include "cuda/sm90/select/config.h"
#include "cuda/sm90/select/top_k.cuh"

namespace thresher::cuda::sm90::select {

// Maxima of this lane's two rows over `kColumns` columns from kFirst on (a quarter of them).
template <int kFirst, int kColumns>
__device__ __forceinline__ void row_maxima(const float (&d)[64], float& low, float& high) {
  constexpr int kBegin = kFirst / 8, kEnd = (kFirst + kColumns) / 8, kChains = 2;
  float l[kChains], h[kChains];
#pragma unroll
  for (int j = kBegin; j < kEnd; ++j) {
    const int chain = (j - kBegin) % kChains;
    if (j - kBegin < kChains) {
      l[chain] = max_nan(d[4 * j], d[4 * j + 1]);
      h[chain] = max_nan(d[4 * j + 2], d[4 * j + 3]);
    } else {
      l[chain] = max_nan(max_nan(l[chain], d[4 * j]), d[4 * j + 1]);
      h[chain] = max_nan(max_nan(h[chain], d[4 * j + 2]), d[4 * j + 3]);
    }
  }
  float result[2] = {max_nan(l[0], l[1]), max_nan(h[0], h[1])};
  // Now, not where they are wanted: the scores' registers are the next product's.
  keep(result);
  low = result[0];
  high = result[1];
}

// Quad maxima of four rows, one a lane: c = 0, 1: rows g, g + 8 of the first product, c = 2, 3: of
// the second.
__device__ __forceinline__ float transpose_max(const float (&first)[2], const float (&second)[2],
                                               int c) {
  const auto exchange = [](float keep, float give, int distance) {
    return max_nan(keep, __shfl_xor_sync(~0u, give, distance));
  };
  const bool odd = c & 1, upper = c & 2;
  const float a = exchange(odd ? first[1] : first[0], odd ? first[0] : first[1], 1);
  const float b = exchange(odd ? second[1] : second[0], odd ? second[0] : second[1], 1);
  return exchange(upper ? b : a, upper ? a : b, 2);
}

template <class T, class C>
class Consumer {
  static constexpr int kOffers = C::kOffers;

 public:
  __device__ Consumer(Shared<C>& shared, const Params& params)
      : s_(shared), p_(params), group_(__shfl_sync(~0u, threadIdx.x >> 7, 0) - 1),
        lane_(threadIdx.x & 31) {
    const uint32_t query = shared_u32(s_.query) + group_ * C::kConsumerRows * 128;
    query_ = low_word(query);
    keys_ = low_word(shared_u32(s_.keys[0]));
    const int c = lane_ & 3, warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0);
    own_row_ = group_ * C::kConsumerRows + (c >> 1) * 64 + warp * 16 + (lane_ >> 2) + 8 * (c & 1);
  }

  __device__ __forceinline__ void run() {
    const portable::SelectArgs& args = p_.args;
    const int own_token = own_row_ / args.tile_heads;
    const int own_head = own_row_ - own_token * args.tile_heads;
    uint32_t parity = 0;
#pragma unroll 1
    while (true) {
      barrier_wait(s_.query_full, parity);
      parity ^= 1;
      const UnitSlot unit = s_.unit;
      const int stages = __shfl_sync(~0u, unit.stages, 0);
      if (stages < 0)
        return;
      const bool has_row = own_token < unit.tokens && own_head < unit.heads;
      const int32_t row_end =
          has_row ? portable::scored_end(args, unit.first_position + own_token) : 0;
      end_ = min(row_end, unit.end_block);
      top_.clear();
      if (stages > 0) {
        const int first_block = __shfl_sync(~0u, unit.first_block, 0);
        if constexpr (C::kTwoAtATime)
          sweep(stages, first_block);
        else
          sweep_in_turn(stages, first_block);
      }
      __syncwarp();
      if (lane_ == 0)
        barrier_arrive(s_.query_empty);
      if (row_end > 0)
        store(unit.first_token + own_token, unit.first_head + own_head, unit.split);
    }
  }

 private:
  // Operands are K-major and swizzled by 128 bytes, groups of 8 rows 1,024 bytes apart. Only the
  // low word of a descriptor varies, so only that is computed with.
  __device__ static __forceinline__ uint32_t low_word(uint32_t address) {
    return ((address & 0x3ffff) >> 4) | 0x10000u;
  }
  __device__ static __forceinline__ uint64_t descriptor(uint32_t low) {
    return uint64_t{0x40000040} << 32 | low;
  }

  // Scores of the lower (kSub 0) or upper 64 rows against a stage's keys.
  template <int kSub>
  __device__ __forceinline__ void issue(float (&score)[64], int stage) {
    const uint32_t a = query_ + kSub * (64 * 128 / 16), b = keys_ + stage * (C::kKeyBytes / 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kDim / 16; ++k) {
      const uint64_t left = descriptor(a + (k >> 2) * (C::kQueryHalfBytes / 16) + (k & 3) * 2);
      const uint64_t right = descriptor(b + (k >> 2) * (C::kKeyHalfBytes / 16) + (k & 3) * 2);
      products_ss<T, 0, 0>(score, left, right, k > 0);
    }
    wgmma_commit();
  }

  struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ Ring next() const {
      return stage + 1 == C::kStages ? Ring{0, parity ^ 1} : Ring{stage + 1, parity};
    }
  };
  __device__ __forceinline__ void wait(Ring ring) {
    barrier_wait(s_.keys_full[ring.stage], ring.parity);
  }
  __device__ __forceinline__ void release(Ring ring) {
    if (lane_ == 0)
      barrier_arrive(s_.keys_empty[ring.stage]);
  }

  using Maxima = float[kOffers][2];
  __device__ static __forceinline__ void maxima(const float (&score)[64], Maxima& result) {
    constexpr int kColumns = C::kKeys / kOffers;
    row_maxima<0, kColumns>(score, result[0][0], result[0][1]);
    if constexpr (kOffers == 2)
      row_maxima<kColumns, kColumns>(score, result[1][0], result[1][1]);
  }

  // Block maxima of a stage, not entered yet: that waits until both products are in flight.
  __device__ __forceinline__ void offer(const Maxima& first, const Maxima& second, int number) {
#pragma unroll
    for (int i = 0; i < kOffers; ++i) {
      float best = transpose_max(first[i], second[i], lane_ & 3);
      if constexpr (C::kStagesPerBlock > 1) {
        best = number % C::kStagesPerBlock ? max_nan(best, part_) : best;
        part_ = best;
      }
      const int32_t block = first_block_ + number / C::kStagesPerBlock * kOffers + i;
      const bool counts = block < end_ && number % C::kStagesPerBlock == C::kStagesPerBlock - 1;
      pending_[i] = counts ? order_key(best * p_.args.scale) : kNoKey;
      pending_id_[i] = block;
    }
  }
  __device__ __forceinline__ void enter() {
    bool any = top_.admits(pending_[0]);
    if constexpr (kOffers == 2)
      any = any || top_.admits(pending_[1]);
    if (__any_sync(~0u, any)) {
#pragma unroll
      for (int i = 0; i < kOffers; ++i) {
        top_.insert(pending_[i], pending_id_[i]);
        pending_[i] = kNoKey;
      }
    }
  }

  __device__ __forceinline__ void begin(int first_block) {
    first_block_ = first_block;
#pragma unroll
    for (int i = 0; i < kOffers; ++i)
      pending_[i] = kNoKey;
  }
  __device__ __forceinline__ void sweep(int stages, int first_block) {
    float low[64], high[64]; // scores of the two halves of the rows
    Maxima low_max, high_max;
    begin(first_block);
    wait(ring_);
    issue<0>(low, ring_.stage);
    int number = 0;
#pragma unroll 1
    for (; number + 1 < stages; ++number) {
      issue<1>(high, ring_.stage);
      enter();
      wgmma_wait<1>();
      keep(low);
      maxima(low, low_max);
      const Ring next = ring_.next();
      wait(next);
      issue<0>(low, next.stage);
      wgmma_wait<1>();
      keep(high);
      release(ring_);
      ring_ = next;
      maxima(high, high_max);
      offer(low_max, high_max, number);
    }
    enter();
    if (number + 1 == stages) {
      issue<1>(high, ring_.stage);
      wgmma_wait<1>();
      keep(low);
      maxima(low, low_max);
      wgmma_wait<0>();
      keep(high);
      release(ring_);
      ring_ = ring_.next();
      maxima(high, high_max);
      offer(low_max, high_max, number);
    } else { // never; but without it ptxas loses track of what is in flight and serialises wgmma
      wgmma_wait<0>();
      keep(low);
    }
    enter();
  }

  // The same with one set of accumulators: here the other warpgroup's products hide the maxima.
  __device__ __forceinline__ void sweep_in_turn(int stages, int first_block) {
    float score[64];
    Maxima low_max, high_max;
    begin(first_block);
#pragma unroll 1
    for (int number = 0; number < stages; ++number) {
      wait(ring_);
      issue<0>(score, ring_.stage);
      enter();
      wgmma_wait<0>();
      keep(score);
      maxima(score, low_max);
      issue<1>(score, ring_.stage);
      wgmma_wait<0>();
      keep(score);
      release(ring_);
      ring_ = ring_.next();
      maxima(score, high_max);
      offer(low_max, high_max, number);
    }
    enter();
  }

  __device__ __forceinline__ void store(int32_t token, int32_t head, int32_t split) {
    const portable::SelectArgs& args = p_.args;
    const int scored = args.scored();
    if (args.splits == 1) {
      int32_t* ids = args.block_ids.at(head, token) + args.init_blocks;
#pragma unroll
      for (int i = 0; i < C::kPlaces; ++i)
        if (i < scored)
          ids[i] = top_.id(i);
    } else {
      const int64_t stride = int64_t{args.proxy_heads} * args.geometry.tokens;
      Candidate* to = args.candidates + split * C::kPlaces * stride +
                      static_cast<int64_t>(head) * args.geometry.tokens + token;
#pragma unroll
      for (int i = 0; i < C::kPlaces; ++i)
        to[i * stride] = top_.candidate(i);
    }
  }

  Shared<C>& s_;
  const Params& p_;
  const int group_, lane_;
  uint32_t query_, keys_; // low words of descriptors
  int own_row_;           // whose top-k this lane keeps
  Ring ring_;
  int32_t first_block_, end_; // blocks from end_ on are not for this row
  float part_ = 0;            // of a block that takes several stages
  int32_t pending_[kOffers], pending_id_[kOffers];
  SortedList<C::kPlaces> top_;
};

} // namespace thresher::cuda::sm90::select
