// Main kernel: dK, dV of a unit's keys and its share of dQ, and the teacher's rows for the proxy.
// Persistent CTAs take units in list order. Two barriers a tile:
//   tile t is there | S^T, P^T, teacher, dP^T, dS^T (t + 1 is being loaded) | dV, dK, dQ
#pragma once

#include "cuda/common/finite.cuh"
#include "cuda/common/launch.h"
#include "cuda/portable/backward/backward.h"
#include "cuda/portable/backward/flush.cuh"
#include "cuda/portable/backward/scores.cuh"

#include <cstddef>

namespace thresher::cuda::portable::backward {

// The teacher's rows of a part that the proxy head does not have: zeros.
template <class T, class C>
__device__ __forceinline__ void clear_teacher(const MainParams<T>& p, const Unit& unit) {
  const int32_t keys = min(C::kKeys, p.index.block_size - unit.key_offset);
  float* to = p.teacher + unit.part * p.teacher_part_stride + unit.first_pair * p.index.block_size +
              unit.key_offset;
  const int32_t chunks = keys / 4;
  for (int32_t i = threadIdx.x; i < unit.count * chunks; i += C::kThreads) {
    const int32_t pair = i / chunks, chunk = i - pair * chunks;
    *reinterpret_cast<uint4*>(to + static_cast<int64_t>(pair) * p.index.block_size + chunk * 4) =
        make_uint4(0, 0, 0, 0);
  }
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    backward_main(const __grid_constant__ MainParams<T> p) {
  if (p.index.idle())
    return;
  extern __shared__ __align__(128) uint8_t main_memory[];
  using Shared = MainShared<C>;
  Shared& shared = *reinterpret_cast<Shared*>(main_memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // --- which piece of each product is this warp's ------------------------------------------------
  using WideRowsFirst = LaneAddress<C::kDim, Lanes::kRowsFirst>;
  using WideChunksFirst = LaneAddress<C::kDim, Lanes::kChunksFirst>;
  using ScoreRowsFirst = LaneAddress<C::kRows, Lanes::kRowsFirst>;
  using ScoreChunksFirst = LaneAddress<C::kRows, Lanes::kChunksFirst>;
  constexpr uint32_t kSixteenWide = 16 * Tile<C::kDim>::kRowBytes;
  constexpr uint32_t kSixteenScore = 16 * Tile<C::kRows>::kRowBytes;
  constexpr uint32_t kToValues = offsetof(Shared, v) - offsetof(Shared, k);
  constexpr uint32_t kToOutputs = offsetof(Shared, dout) - offsetof(Shared, q);
  constexpr uint32_t kToGradients = offsetof(Shared, gradient) - offsetof(Shared, probability);
  const uint32_t base = ptx::shared_address(main_memory);
  const uint32_t k_tile = base + offsetof(Shared, k), q_tile = base + offsetof(Shared, q);
  const uint32_t p_tile = base + offsetof(Shared, probability);

  ScorePiece<T, C> score(shared, warp, lane);
  const WideRowsFirst k_of_s(k_tile, warp / C::kScoreRowWarps * C::kScoreKeys, 0, lane);
  const WideChunksFirst q_of_s(q_tile, warp % C::kScoreRowWarps * C::kScoreRows, 0, lane);

  const int own_key = warp / C::kColumnWarps * 32;
  const int own_column = warp % C::kColumnWarps * C::kColumns;
  const ScoreRowsFirst p_of_dv(p_tile, own_key, 0, lane);
  const WideRowsFirst q_of_dk(q_tile, 0, own_column / 16, lane);

  const int query_row = warp / C::kQueryColumnWarps * C::kQueryRows;
  const int query_column = warp % C::kQueryColumnWarps * C::kQueryColumns;
  const ScoreChunksFirst ds_of_dq(p_tile + kToGradients, 0, query_row / 16, lane);
  const WideRowsFirst k_of_dq(k_tile, 0, query_column / 16, lane);

  const auto load_tile = [&](const Unit& unit, int ring, int stage) {
    load_rows<C>(p, unit, shared.rows, ring, p.q, kQueryBad, shared.q[stage]);
    if (p.dout.data)
      load_rows<C>(p, unit, shared.rows, ring, p.dout, kOutputBad, shared.dout[stage]);
    ptx::copy_async_commit();
  };

  if (threadIdx.x == 0)
    shared.next_ticket = atomicAdd(p.ticket, 1);
  while (true) {
    __syncthreads(); // the last unit's shared memory is free
    const int32_t ticket = shared.next_ticket;
    Unit unit;
    if (!take_unit<C::kKeys, false>(p, ticket, p.parts, unit))
      break;
    const HeadRange heads = head_range(p.q_heads, p.kv_heads, p.proxy_heads, p.chunks, p.max_heads,
                                       unit.proxy_head, unit.part);
    unit.key_head = heads.kv_head;
    unit.first_head = heads.first;
    unit.heads = heads.count;
    const ProxyRange owners = proxies_of(p.q_heads, p.kv_heads, p.proxy_heads, heads.kv_head);
    unit.only_owner =
        heads.count > 0 && p.chunks == 1 && is_only_owner(p, unit.row, owners.first, owners.count);
    __syncthreads(); // the ticket has been read
    int32_t next_ticket = 0;
    if (threadIdx.x == 0)
      next_ticket = atomicAdd(p.ticket, 1); // arrives while the unit is worked on

    float dk[2][C::kColumns / 8][4], dv[2][C::kColumns / 8][4];
    if (unit.heads > 0) {
      const RowLayout<C> layout(unit);
      RowFeed<C, RowConstants> feed(p, unit, layout, p.constants, p.q_heads, shared.rows);
      load_keys<C>(p, unit, p.k, shared.k);
      if (p.dout.data)
        load_keys<C>(p, unit, p.v, shared.v);
      feed.write(0);
      feed.write(1);
      __syncthreads();
      if constexpr (C::kStages == 2)
        load_tile(unit, 0, 0);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      __syncthreads();
      const bool bad_keys =
          clear_bad_rows<T, C::kDim, C::kKeys, C::kThreads>(shared.k, shared.bad_keys);
      const uint32_t selection = selection_bits<C>(unit.heads, lane);
      clear(dk);
      clear(dv);

      for (int tile = 0, ring = 0; tile < layout.tiles; ++tile, ring = ring == 2 ? 0 : ring + 1) {
        const int stage = C::kStages == 2 ? tile & 1 : 0;
        const uint32_t staged = stage * C::kRowTileBytes;
        if constexpr (C::kStages == 1) {
          __syncthreads(); // the last tile's rows are no longer read
          load_tile(unit, ring, 0);
        }
        ptx::copy_async_wait<0>();
        __syncthreads();
        feed.write(ring == 0 ? 2 : ring - 1);
        if constexpr (C::kStages == 2)
          if (tile + 1 < layout.tiles)
            load_tile(unit, ring == 2 ? 0 : ring + 1, stage ^ 1);

        // --- S^T, P^T, teacher -------------------------------------------------------------------
        const bool careful = bad_keys || score.needs_care(ring);
        clear(score.p);
        multiply<T, C::kScoreKeys / 16, C::kScoreRows / 16, C::kDim / 16, false, false>(
            score.p, [&](int m, int k) { return k_of_s(k) + m * kSixteenWide; },
            [&](int n, int k) { return (q_of_s + staged)(k) + n * kSixteenWide; });
        if (careful)
          score.template softmax<true>(ring, p.score_scale, bad_keys);
        else
          score.template softmax<false>(ring, p.score_scale, false);
        if (p.teacher) {
          const int first_pair = tile * layout.tokens_per_tile;
          float* to = p.teacher + unit.part * p.teacher_part_stride +
                      (unit.first_pair + first_pair) * p.index.block_size + unit.key_offset;
          const int32_t room = p.index.block_size - unit.key_offset;
          if (careful)
            score.template store_teacher<true>(selection, layout.tokens_per_warp,
                                               unit.count - first_pair, p.teacher_scale, to,
                                               p.index.block_size, room);
          else
            score.template store_teacher<false>(selection, layout.tokens_per_warp,
                                                unit.count - first_pair, p.teacher_scale, to,
                                                p.index.block_size, room);
        }
        if (!p.dout.data)
          continue;

        // --- dP^T, dS^T --------------------------------------------------------------------------
        {
          float dp[C::kScoreKeys / 16][C::kScoreRows / 8][4];
          clear(dp);
          multiply<T, C::kScoreKeys / 16, C::kScoreRows / 16, C::kDim / 16, false, false>(
              dp, [&](int m, int k) { return k_of_s(k) + kToValues + m * kSixteenWide; },
              [&](int n, int k) { return (q_of_s + staged)(k) + kToOutputs + n * kSixteenWide; });
          if (careful)
            score.template differentiate<true>(ring, dp);
          else
            score.template differentiate<false>(ring, dp);
        }
        __syncthreads(); // P^T and dS^T are complete

        // --- dV, dK, dQ --------------------------------------------------------------------------
        if (p.dv)
          multiply<T, 2, C::kColumns / 16, C::kRows / 16, false, true>(
              dv, [&](int m, int k) { return p_of_dv(k) + m * kSixteenScore; },
              [&](int n, int k) { return (q_of_dk + staged)(n) + kToOutputs + k * kSixteenWide; });
        if (p.dk)
          multiply<T, 2, C::kColumns / 16, C::kRows / 16, false, true>(
              dk, [&](int m, int k) { return p_of_dv(k) + kToGradients + m * kSixteenScore; },
              [&](int n, int k) { return (q_of_dk + staged)(n) + k * kSixteenWide; });
        if (p.dq) {
          float dq[C::kQueryRows / 16][C::kQueryColumns / 8][4];
          clear(dq);
          multiply<T, C::kQueryRows / 16, C::kQueryColumns / 16, C::kKeys / 16, true, true>(
              dq, [&](int m, int k) { return ds_of_dq(m) + k * kSixteenScore; },
              [&](int n, int k) { return k_of_dq(n) + k * kSixteenWide; });
          flush_queries<C::kDim>(p, unit, shared.rows, ring, dq, p.dq, p.q_heads, query_row,
                                 query_column);
        }
      }
    } else if (p.teacher) {
      clear_teacher<T, C>(p, unit);
    }

    if (p.dk || p.dv) {
      if (p.turns)
        wait_for_turn(p.turns, unit.turn_counter, unit.turn);
      if (unit.heads > 0 && p.dv)
        flush_keys<C::kDim>(unit, dv, p.dv, p.kv_heads, p.dv_out, 1.f, p.dim, own_key, own_column);
      if (unit.heads > 0 && p.dk)
        flush_keys<C::kDim>(unit, dk, p.dk, p.kv_heads, p.dk_out, p.dk_scale, p.dim, own_key,
                            own_column);
      if (p.turns)
        pass_turn(p.turns, unit.turn_counter, unit.turn);
    }
    if (threadIdx.x == 0)
      shared.next_ticket = next_ticket;
  }
}

template <class T, int kDim>
KernelPlan MainKernel<T, kDim>::plan() {
  using C = MainConfig<kDim>;
  return plan_kernel(backward_main<T, C>, C::kThreads, sizeof(MainShared<C>), C::kKeys,
                     C::kMaxHeads);
}

template <class T, int kDim>
void MainKernel<T, kDim>::run(const MainParams<T>& params, const KernelPlan& plan,
                              cudaStream_t stream) {
  using C = MainConfig<kDim>;
  launch("backward main", backward_main<T, C>, dim3(plan.blocks), dim3(C::kThreads),
         sizeof(MainShared<C>), stream, params);
}

} // namespace thresher::cuda::portable::backward
