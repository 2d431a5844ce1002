// Main kernel: dK, dV of a unit's keys and its share of dQ, and the teacher's rows for the proxy.
// Persistent CTAs take units in list order. Two barriers a tile:
//   tile t loaded | S^T, P^T, teacher, dP^T, dS^T (t + 1 is being loaded) | dV, dK, dQ
#pragma once

#include "cuda/common/launch.h"
#include "cuda/portable/backward/backward.h"
#include "cuda/portable/backward/scores.cuh"

namespace thresher::cuda::portable::backward {

// Four gradients of a lane (two neighbouring columns in each of two mma tiles).
struct Quad {
  float4 value;
  template <int kN>
  __device__ __forceinline__ Quad(const float (&acc)[kN][4], int piece, int half)
      : value{acc[2 * piece][2 * half], acc[2 * piece][2 * half + 1], acc[2 * piece + 1][2 * half],
              acc[2 * piece + 1][2 * half + 1]} {}
};

// Adds (or stores, if the unit is alone) one warp's 32 keys x kColumns columns of dK or dV.
template <class T, class C>
__device__ __forceinline__ void flush_keys(const MainParams<T>& p, const Unit& unit,
                                           const float (&acc)[2][C::kColumns / 8][4],
                                           float* accumulator, const TensorView<T>& out,
                                           float scale, int first_key, int first_column, int lane) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + m * 16 + half * 8 + lane / 4;
      if (key >= unit.key_count)
        continue;
      if (unit.only_owner) {
        T* row = out.at(unit.key_begin + key, unit.kv_head) + first_column + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < C::kColumns / 8; ++n)
          if (first_column + n * 8 < p.dim)
            *reinterpret_cast<uint32_t*>(row + n * 8) =
                ptx::pack<T>(acc[m][n][2 * half] * scale, acc[m][n][2 * half + 1] * scale);
      } else {
        float* row = accumulator +
                     (static_cast<int64_t>(unit.key_begin + key) * p.kv_heads + unit.kv_head) *
                         C::kDim +
                     first_column + 4 * (lane % 4);
#pragma unroll
        for (int n = 0; n < C::kColumns / 16; ++n)
          ptx::reduce_add(row + n * 16, Quad(acc[m], n, half).value);
      }
    }
}

// Adds (or stores in the slot's place) one warp's rows x columns of dQ.
template <class T, class C>
__device__ __forceinline__ void flush_queries(const MainParams<T>& p, const Unit& unit,
                                              const MainShared<C>& shared, int ring,
                                              const float (&acc)[C::kQueryRows / 16]
                                                                [C::kQueryColumns / 8][4],
                                              int first_row, int first_column, int lane) {
#pragma unroll
  for (int m = 0; m < C::kQueryRows / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      const int32_t word = shared.token[ring][row];
      if (word < 0)
        continue;
      int64_t token = word & kTokenMask;
      if (p.dq_slots > 1)
        token += static_cast<int64_t>((shared.reach[ring][row] >> 8) * p.key_tiles +
                                      unit.key_tile) *
                 p.pass.tokens;
      float* to = p.dq + (token * p.q_heads + unit.first_head + shared.head[row]) * C::kDim +
                  first_column + 4 * (lane % 4);
#pragma unroll
      for (int n = 0; n < C::kQueryColumns / 16; ++n)
        if (p.dq_slots > 1)
          *reinterpret_cast<float4*>(to + n * 16) = Quad(acc[m], n, half).value;
        else
          ptx::reduce_add(to + n * 16, Quad(acc[m], n, half).value);
    }
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    backward_main(const __grid_constant__ MainParams<T> p) {
  extern __shared__ __align__(128) uint8_t main_memory[];
  MainShared<C>& shared = *reinterpret_cast<MainShared<C>*>(main_memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // --- which piece of each product is this warp's ------------------------------------------------
  using Score = Tile<C::kRows>;
  using Wide = Tile<C::kDim>;
  using RowsFirst = LaneAddress<C::kDim, Lanes::kRowsFirst>;
  using ChunksFirst = LaneAddress<C::kDim, Lanes::kChunksFirst>;
  using ScoreRows = LaneAddress<C::kRows, Lanes::kRowsFirst>;
  using ScoreChunks = LaneAddress<C::kRows, Lanes::kChunksFirst>;
  const uint32_t k_tile = ptx::shared_address(shared.k), v_tile = ptx::shared_address(shared.v);
  const uint32_t q_tile = ptx::shared_address(shared.q);
  const uint32_t dout_tile = ptx::shared_address(shared.dout);
  const uint32_t p_tile = ptx::shared_address(shared.probability);
  const uint32_t ds_tile = ptx::shared_address(shared.gradient);
  constexpr uint32_t kSixteenWide = 16 * Wide::kRowBytes, kSixteenScore = 16 * Score::kRowBytes;

  ScorePiece<T, C> score(shared, warp, lane);
  const int score_key = warp / C::kScoreRowWarps * C::kScoreKeys;
  const int score_row = warp % C::kScoreRowWarps * C::kScoreRows;
  const RowsFirst k_of_s(k_tile, score_key, 0, lane);
  const ChunksFirst q_of_s(q_tile, score_row, 0, lane);

  const int own_key = warp / C::kColumnWarps * 32;
  const int own_column = warp % C::kColumnWarps * C::kColumns;
  const ScoreRows p_of_dv(p_tile, own_key, 0, lane);
  const RowsFirst q_of_dk(q_tile, 0, own_column / 16, lane);

  const int query_row = warp / C::kQueryColumnWarps * C::kQueryRows;
  const int query_column = warp % C::kQueryColumnWarps * C::kQueryColumns;
  const ScoreChunks ds_of_dq(ds_tile, 0, query_row / 16, lane);
  const RowsFirst k_of_dq(k_tile, 0, query_column / 16, lane);

  if (threadIdx.x == 0)
    shared.next_ticket = atomicAdd(p.ticket, 1);
  while (true) {
    __syncthreads(); // the last unit's shared memory is free
    const int32_t ticket = shared.next_ticket;
    Unit unit;
    if (!take_unit<T, C>(p, ticket, unit))
      break;
    __syncthreads();
    int32_t next_ticket = 0;
    if (threadIdx.x == 0)
      next_ticket = atomicAdd(p.ticket, 1); // arrives while the unit is worked on

    if (unit.heads > 0) {
      const RowLayout<C> layout(unit);
      RowFeed<T, C> feed(p, unit, layout, shared);
      const auto feeds = [&] { return C::kRows == C::kThreads || threadIdx.x < C::kRows; };
      load_keys<T, C>(p, unit, shared);
      if (feeds()) {
        feed.write(0);
        feed.write(1);
      }
      __syncthreads();
      if constexpr (C::kStages == 2)
        load_rows<T, C>(p, unit, shared, 0, 0);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      __syncthreads();
      const bool bad_keys =
          clear_bad_keys<T, C::kDim, C::kKeys, C::kThreads>(shared.k, shared.bad_keys);
      const uint32_t selection = selection_bits<C>(unit.heads, lane);

      float dk[2][C::kColumns / 8][4], dv[2][C::kColumns / 8][4];
      clear(dk);
      clear(dv);

      int ring = 0;
      for (int tile = 0; tile < layout.tiles; ++tile) {
        const int next_ring = ring == 2 ? 0 : ring + 1;
        const int stage = C::kStages == 2 ? tile & 1 : 0;
        const uint32_t stage_bytes = stage * C::kRowTileBytes;
        if constexpr (C::kStages == 1) {
          __syncthreads(); // the last tile's rows are no longer read
          load_rows<T, C>(p, unit, shared, ring, 0);
          ptx::copy_async_commit();
        }
        ptx::copy_async_wait<0>();
        __syncthreads();
        if (feeds())
          feed.write(next_ring == 2 ? 0 : next_ring + 1);
        if constexpr (C::kStages == 2) {
          if (tile + 1 < layout.tiles)
            load_rows<T, C>(p, unit, shared, next_ring, stage ^ 1);
          ptx::copy_async_commit();
        }

        // --- S^T, P^T, teacher
        // -------------------------------------------------------------------------
        const bool careful = bad_keys || score.needs_care(ring);
        clear(score.p);
        multiply<T, C::kScoreKeys / 16, C::kScoreRows / 16, C::kDim / 16, false, false>(
            score.p, [&](int m, int k) { return k_of_s(k) + m * kSixteenWide; },
            [&](int n, int k) { return q_of_s(k) + stage_bytes + n * kSixteenWide; });
        if (careful)
          score.template softmax<true>(ring, p.score_scale, bad_keys);
        else
          score.template softmax<false>(ring, p.score_scale, false);
        if (p.teacher) {
          const int first_pair = tile * layout.tokens_per_tile;
          __half* to = p.teacher + unit.part * p.teacher_part_stride +
                       (unit.first_pair + first_pair) * p.index.block_size + unit.key_offset;
          const int pairs = unit.count - first_pair;
          if (careful)
            score.template store_teacher<true>(selection, layout.tokens_per_warp, pairs,
                                               p.teacher_scale, p.index.block_size, to);
          else
            score.template store_teacher<false>(selection, layout.tokens_per_warp, pairs,
                                                p.teacher_scale, p.index.block_size, to);
        }
        ring = next_ring;
        if (!p.dout.data)
          continue;

        // --- dP^T, dS^T
        // --------------------------------------------------------------------------------
        const int this_ring = next_ring == 0 ? 2 : next_ring - 1;
        {
          float dp[C::kScoreKeys / 16][C::kScoreRows / 8][4];
          clear(dp);
          multiply<T, C::kScoreKeys / 16, C::kScoreRows / 16, C::kDim / 16, false, false>(
              dp, [&](int m, int k) { return k_of_s(k) + (v_tile - k_tile) + m * kSixteenWide; },
              [&](int n, int k) {
                return q_of_s(k) + (dout_tile - q_tile) + stage_bytes + n * kSixteenWide;
              });
          if (careful)
            score.template differentiate<true>(this_ring, dp);
          else
            score.template differentiate<false>(this_ring, dp);
        }
        __syncthreads(); // P^T and dS^T are complete

        // --- dV, dK, dQ
        // --------------------------------------------------------------------------------
        if (p.dv)
          multiply<T, 2, C::kColumns / 16, C::kRows / 16, false, true>(
              dv, [&](int m, int k) { return p_of_dv(k) + m * kSixteenScore; },
              [&](int n, int k) {
                return q_of_dk(n) + (dout_tile - q_tile) + stage_bytes + k * kSixteenWide;
              });
        if (p.dk)
          multiply<T, 2, C::kColumns / 16, C::kRows / 16, false, true>(
              dk, [&](int m, int k) { return p_of_dv(k) + (ds_tile - p_tile) + m * kSixteenScore; },
              [&](int n, int k) { return q_of_dk(n) + stage_bytes + k * kSixteenWide; });
        if (p.dq) {
          float dq[C::kQueryRows / 16][C::kQueryColumns / 8][4];
          clear(dq);
          multiply<T, C::kQueryRows / 16, C::kQueryColumns / 16, C::kKeys / 16, true, true>(
              dq, [&](int m, int k) { return ds_of_dq(m) + k * kSixteenScore; },
              [&](int n, int k) { return k_of_dq(n) + k * kSixteenWide; });
          flush_queries<T, C>(p, unit, shared, this_ring, dq, query_row, query_column, lane);
        }
      }

      if (p.dk || p.dv) {
        const bool ordered = p.turns && !unit.only_owner;
        if (ordered)
          wait_for_turn(p.turns, unit.turn_counter, unit.turn);
        if (p.dv)
          flush_keys<T, C>(p, unit, dv, p.dv, p.dv_out, 1.f, own_key, own_column, lane);
        if (p.dk)
          flush_keys<T, C>(p, unit, dk, p.dk, p.dk_out, p.dk_scale, own_key, own_column, lane);
        if (ordered)
          pass_turn(p.turns, unit.turn_counter, unit.turn);
      }
    } else if (p.turns && (p.dk || p.dv)) { // a part that this proxy head does not have
      wait_for_turn(p.turns, unit.turn_counter, unit.turn);
      pass_turn(p.turns, unit.turn_counter, unit.turn);
    }
    if (threadIdx.x == 0)
      shared.next_ticket = next_ticket;
  }
}

template <class T, int kDim, bool kWide>
MainLaunch MainKernel<T, kDim, kWide>::plan() {
  using C = MainConfig<kDim, kWide>;
  MainLaunch plan;
  plan.shared_bytes = sizeof(MainShared<C>);
  plan.threads = C::kThreads;
  plan.keys = C::kKeys;
  plan.max_heads = C::kMaxHeads;
  if (plan.shared_bytes <= static_cast<size_t>(device_facts().shared_bytes_per_block))
    plan.blocks = device_facts().sm_count *
                  resident_blocks(backward_main<T, C>, C::kThreads, plan.shared_bytes);
  return plan;
}

template <class T, int kDim, bool kWide>
void MainKernel<T, kDim, kWide>::run(const MainParams<T>& params, const MainLaunch& plan,
                                     cudaStream_t stream) {
  using C = MainConfig<kDim, kWide>;
  launch("backward main", backward_main<T, C>, dim3(plan.blocks), dim3(C::kThreads),
         sizeof(MainShared<C>), stream, params);
}

} // namespace thresher::cuda::portable::backward
