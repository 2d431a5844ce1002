// A consumer warpgroup: 64 keys of the item's block against all tiles of its list. P is formed
// once; dV, dS, dK, dQ and the teacher's rows come from it.
#pragma once

#include "cuda/sm90/backward/epilogue.cuh"

namespace thresher::cuda::sm90::backward {

// Rows of K and V past the document's end belong to the next document: an Inf there would reach dQ
// as 0 * Inf. Both warpgroups clear them together.
__device__ __forceinline__ void clear_tail(Shared& s, int slot, int key_count) {
  const int thread = threadIdx.x; // 0 .. 255
  for (int i = thread; i < (Config::kKeys - key_count) * 32; i += 128 * Config::kConsumers) {
    const int key = key_count + i / 32, chunk = i % 8, half = i / 8 % 2, tensor = i / 16 % 2;
    *reinterpret_cast<uint4*>(s.blocks[slot][tensor] + half * (Config::kKeys * 128) + key * 128 +
                              chunk * 16) = make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();
  ptx::barrier_sync(kTailCleared, 128 * Config::kConsumers);
}

template <class T, int kHeads, bool kTeacher, bool kDeterministic>
__device__ __forceinline__ void consume(Shared& s, const Params& p) {
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  const int warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0), lane = threadIdx.x & 31;
  const int key = group * 64 + warp * 16 + (lane >> 2); // and key + 8: this lane's keys
  const int column = (lane & 3) * 2;                    // and + 1, + 8 j: its rows of the tile

  uint32_t tile = 0;
  for (uint32_t number = 0;; ++number) {
    const int slot = number % Config::kBlocks;
    barrier_wait(s.block_full[slot], number / Config::kBlocks & 1);
    const ItemSlot& item = s.items[slot]; // read where needed: registers are short
    if (item.pairs == 0)
      return;
    const int tiles = (item.pairs * kHeads + Config::kRows - 1) / Config::kRows;
    if (item.key_count < Config::kKeys)
      clear_tail(s, slot, item.key_count);
    const uint32_t block_k = shared_u32(s.blocks[slot][0]), block_v = shared_u32(s.blocks[slot][1]);
    const uint64_t own_k = shared_matrix(block_k + group * 8192, 16);
    const uint64_t own_v = shared_matrix(block_v + group * 8192, 16);

    float dk[64], dv[64];
#pragma unroll
    for (int i = 0; i < 64; ++i)
      dk[i] = dv[i] = 0.f;

#pragma unroll 1
    for (int t = 0; t < tiles; ++t, ++tile) {
      const int stage = tile % Config::kStages;
      const uint32_t q = shared_u32(s.rows[stage][0]), dout = shared_u32(s.rows[stage][1]);
      float scores[32], dp[32], e[32];
      barrier_wait(s.rows_full[stage], tile / Config::kStages & 1);

      // S^T = K Q^T and dP^T = V dO^T, both in flight.
      {
        const uint64_t b_q = shared_matrix(q, 16), b_dout = shared_matrix(dout, 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k)
          products_ss<T, 0, 0>(scores, own_k + (k >> 2) * 1024 + (k & 3) * 2,
                               b_q + (k >> 2) * 512 + (k & 3) * 2, k > 0);
        wgmma_commit();
#pragma unroll
        for (int k = 0; k < 8; ++k)
          products_ss<T, 0, 0>(dp, own_v + (k >> 2) * 1024 + (k & 3) * 2,
                               b_dout + (k >> 2) * 512 + (k & 3) * 2, k > 0);
        wgmma_commit();
      }
      wgmma_wait<1>(); // S^T is there, and the previous tile's dK is done with its rows
      keep(scores);
      if (t > 0 && lane == 0)
        barrier_arrive(s.rows_empty[(tile - 1) % Config::kStages]);

      // P = exp(S - lse)
      const RowConstants& c = s.constants[stage];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 lse = *reinterpret_cast<const float2*>(c.minus_lse + 8 * j + column);
        e[4 * j] = ptx::exp2(fmaf(scores[4 * j], p.score_scale, lse.x));
        e[4 * j + 1] = ptx::exp2(fmaf(scores[4 * j + 1], p.score_scale, lse.y));
        e[4 * j + 2] = ptx::exp2(fmaf(scores[4 * j + 2], p.score_scale, lse.x));
        e[4 * j + 3] = ptx::exp2(fmaf(scores[4 * j + 3], p.score_scale, lse.y));
      }
      const bool masked = s.masked[stage];
      if (masked) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const short2 last = *reinterpret_cast<const short2*>(c.last_key + 8 * j + column);
          e[4 * j] = key > last.x ? 0.f : e[4 * j];
          e[4 * j + 1] = key > last.y ? 0.f : e[4 * j + 1];
          e[4 * j + 2] = key + 8 > last.x ? 0.f : e[4 * j + 2];
          e[4 * j + 3] = key + 8 > last.y ? 0.f : e[4 * j + 3];
        }
      }
      uint32_t probability[4][4];
#pragma unroll
      for (int j = 0; j < 16; ++j)
        probability[j >> 2][j & 3] = ptx::pack<T>(e[2 * j], e[2 * j + 1]);

      HeadMean<kHeads> mean;
      if constexpr (kTeacher)
        mean.template issue<T>(s, probability);

      // dV += P^T dO
      {
        const uint64_t b = shared_matrix(dout, 8192);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          products_rs<T, 1>(dv, probability[k], b + k * 128, 1);
        wgmma_commit();
      }
      wgmma_wait<1>(); // dP^T (and the teacher) are there
      keep(dp);
      if constexpr (kTeacher)
        mean.store(p, item, t * (Config::kRows / kHeads), group * 64 + warp * 16, lane);

      // dS = P (dP - delta)
      uint32_t ds[4][4];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 delta = *reinterpret_cast<const float2*>(c.minus_delta + 8 * j + column);
        ds[j >> 1][(j & 1) * 2] = ptx::pack<T>(e[4 * j] * (dp[4 * j] + delta.x),
                                               e[4 * j + 1] * (dp[4 * j + 1] + delta.y));
        ds[j >> 1][(j & 1) * 2 + 1] = ptx::pack<T>(e[4 * j + 2] * (dp[4 * j + 2] + delta.x),
                                                   e[4 * j + 3] * (dp[4 * j + 3] + delta.y));
      }
      const uint32_t score_tile = shared_u32(s.scores[tile & 1]);
      store_scores(score_tile, ds, group * 64 + warp * 16, lane);
      fence_async_proxy();
      ptx::barrier_sync(kScoresWritten, 128 * Config::kConsumers);

      // dQ = dS K for 64 columns a warpgroup, then dK += dS^T Q
      float dq[32];
      {
        const uint64_t a = shared_matrix(score_tile, 16384);
        const uint64_t b = shared_matrix(block_k + group * 16384, 16384);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k)
          products_ss<T, 1, 1>(dq, a + k * 128, b + k * 128, k > 0);
        wgmma_commit();
        const uint64_t b_q = shared_matrix(q, 8192);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          products_rs<T, 1>(dk, ds[k], b_q + k * 128, 1);
        wgmma_commit();
      }
      wgmma_wait<1>();
      keep(dq);
      put_dq<kHeads, kDeterministic>(p, item, c, s.pieces[stage], masked, dq, group, warp, lane);
    }
    wgmma_wait<0>();
    keep(dk);
    keep(dv);
    const ItemSlot done = item;
    const Turn turn = s.turns[slot];
    if (lane == 0) {
      barrier_arrive(s.rows_empty[(tile - 1) % Config::kStages]);
      barrier_arrive(s.block_empty[slot]);
    }
    if constexpr (kDeterministic)
      wait_for_turn(turn, group * 4 + warp, lane);
    add_block(p, done, dk, dv, key, lane);
    if constexpr (kDeterministic)
      pass_turn(turn, group * 4 + warp, lane);
  }
}

} // namespace thresher::cuda::sm90::backward
