// The producer, one thread: takes units of work, loads a tile of queries once, then streams keys.
#pragma once

#include "cuda/portable/select/unit.cuh"
#include "cuda/sm90/common/async.cuh"
#include "cuda/sm90/select/config.h"

namespace thresher::cuda::sm90::select {

template <class C>
class Producer {
 public:
  __device__ Producer(Shared<C>& shared, const Params& params, const CUtensorMap* q,
                      const CUtensorMap* k)
      : s_(shared), p_(params), q_(q), k_(k) {}

  __device__ __forceinline__ void run() {
    const portable::SelectArgs& args = p_.args;
    const int32_t units = args.counters[0] * args.splits * args.proxy_kv_heads * args.head_groups;
    uint32_t parity = 1;
    while (true) {
      // Asked for only when the last unit's keys are on their way: the longest units come first,
      // and one taken early would wait here while another SM runs idle.
      const int32_t ticket = atomicAdd(args.counters + 1, 1);
      if (ticket >= units)
        break;
      const portable::ScoreUnit unit = portable::unpack_unit(args, ticket);
      const int32_t keys = (unit.end_block - unit.first_block) * C::kBlock;
      const int32_t stages = (keys + C::kKeys - 1) / C::kKeys;
      const int32_t batch = p_.key_rows ? unit.tile.k_begin / p_.key_rows : 0;
      const int32_t first_key =
          unit.tile.k_begin - batch * p_.key_rows + unit.first_block * C::kBlock;
      int32_t sent = 0;
      // The first keys do not wait for the last unit's queries to be done with.
      for (; sent < min(stages, C::kStages - 1); ++sent)
        send_keys(first_key + sent * C::kKeys, unit.key_head, batch);

      barrier_wait(s_.query_empty, parity);
      parity ^= 1;
      s_.unit = {stages,           unit.tile.first_token,
                 unit.tile.tokens, unit.tile.first_position,
                 unit.first_head,  unit.heads,
                 unit.split,       unit.first_block,
                 unit.end_block};
      if (stages > 0)
        send_query(unit.tile.first_token, unit.first_head);
      else
        barrier_arrive(s_.query_full);
      for (; sent < stages; ++sent)
        send_keys(first_key + sent * C::kKeys, unit.key_head, batch);
    }
    barrier_wait(s_.query_empty, parity);
    s_.unit.stages = -1;
    barrier_arrive(s_.query_full);
  }

 private:
  // Rows of (token, head); tokens of the next document and heads of the next key head may come
  // along, and are ignored.
  __device__ __forceinline__ void send_query(int32_t first_token, int32_t first_head) {
    const int32_t batch = p_.token_rows ? first_token / p_.token_rows : 0;
    const int32_t row = first_token - batch * p_.token_rows;
    barrier_expect(s_.query_full,
                   p_.args.tile_tokens * p_.args.tile_heads * (C::kDim / C::kHalf) * 128);
#pragma unroll
    for (int half = 0; half < C::kDim / C::kHalf; ++half)
      copy_box(shared_u32(s_.query) + half * C::kQueryHalfBytes, q_, half * C::kHalf, first_head,
               row, batch, s_.query_full);
  }

  // Keys of the next document may come along in a block that nobody scores.
  __device__ __forceinline__ void send_keys(int32_t row, int32_t key_head, int32_t batch) {
    barrier_wait(s_.keys_empty[stage_], parity_);
    barrier_expect(s_.keys_full[stage_], C::kKeyBytes);
#pragma unroll
    for (int half = 0; half < C::kDim / C::kHalf; ++half)
      copy_box(shared_u32(s_.keys[stage_]) + half * C::kKeyHalfBytes, k_, half * C::kHalf, key_head,
               row, batch, s_.keys_full[stage_]);
    if (++stage_ == C::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  Shared<C>& s_;
  const Params& p_;
  const CUtensorMap *q_, *k_;
  int stage_ = 0;
  uint32_t parity_ = 1; // nothing is to be waited for in the first round
};

} // namespace thresher::cuda::sm90::select
