// Proxy kernel: student = exp(s_proxy - proxy_lse), dS = dkl (student - teacher), dQ, dK and the KL
// rows, from the teacher's rows that the main kernel left behind. Rows are tokens. Two barriers a
// tile:
//   tile t is there | S, dS, KL (t + 1 is being loaded) | dK, dQ
#pragma once

#include "cuda/common/finite.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "cuda/portable/backward/backward.h"
#include "cuda/portable/backward/flush.cuh"
#include "cuda/portable/backward/products.cuh"
#include "cuda/portable/backward/rows.cuh"

#include <cmath>
#include <cstddef>

namespace thresher::cuda::portable::backward {

// One warp's piece of S: kScoreRows tokens x kScoreKeys keys. Lane (g, q) holds of 8 x 8 the token
// g (and g + 8) and the keys 2 q and 2 q + 1.
template <class T, class C>
class ProxyPiece {
  static constexpr int kM = C::kScoreRows / 16, kN = C::kScoreKeys / 16;

 public:
  float s[kM][2 * kN][4];

  __device__ __forceinline__ ProxyPiece(ProxyShared<C>& shared, int warp, int lane)
      : shared_(shared), lane_(lane), first_row_(warp / C::kScoreKeyWarps * C::kScoreRows),
        first_key_(warp % C::kScoreKeyWarps * C::kScoreKeys), key_warp_(warp % C::kScoreKeyWarps) {}

  // Scores -> dS in shared memory, KL of this warp's keys beside it. pairs: from the tile's first
  // to the end of the list; teacher: the unit's first key of the tile's first pair.
  __device__ __forceinline__ void differentiate(const ProxyParams<T>& p, int ring, bool bad_keys,
                                                const float* teacher, int pairs, int room) {
    constexpr float kLn2 = 0.6931471805599453f, kNan = __builtin_nanf(""), kTiny = 1e-37f;
    const int quad = lane_ % 4;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row_ + m * 16 + half * 8 + lane_ / 4;
        const float4 constants = shared_.rows.constants[ring][row];
        const bool real = shared_.rows.token[ring][row] >= 0;
        const int reach = real ? shared_.rows.reach[ring][row] & 255 : 0;
        float kl = 0.f, kl2 = 0.f; // kl2: in units of ln 2
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const int key = first_key_ + 16 * n;
          float mean[4] = {0.f, 0.f, 0.f, 0.f};
          if (row < pairs && key < room)
            for (int part = 0; part < p.parts; ++part)
              add_four(mean, teacher + part * p.teacher_part_stride +
                                 static_cast<int64_t>(row) * p.index.block_size + key + 4 * quad);
          float value[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int own_key = key + (i / 2) * 8 + 2 * quad + i % 2;
            const bool bad = bad_keys && (shared_.bad_keys[own_key / 32] >> (own_key % 32) & 1);
            const float product = s[m][2 * n + i / 2][2 * half + i % 2];
            const float log_student =
                bad ? kNan : fmaf(product, p.score_scale, -constants.x); // base 2
            const float t = fmaf(mean[i], 1.f / kTeacherScale, constants.z);
            const bool visible = own_key < reach;
            const float difference = visible ? ptx::exp2(log_student) - t : 0.f;
            value[i] = visible ? constants.y * difference : 0.f;
            // Both distributions sum to one, so adding the differences changes nothing; but now
            // every term is least where t is right, and its rounding does not come through.
            kl += difference;
            if (visible)
              kl2 = fmaf(t, log2f(fmaxf(t, kTiny)) - log_student, kl2);
          }
          if (p.gradients) {
            uint8_t* to = shared_.gradient + quad * 4;
            *reinterpret_cast<uint32_t*>(to + Tile<C::kKeys>::offset(row, key / 8)) =
                ptx::pack<T>(value[0], value[1]);
            *reinterpret_cast<uint32_t*>(to + Tile<C::kKeys>::offset(row, key / 8 + 1)) =
                ptx::pack<T>(value[2], value[3]);
          }
        }
        if (p.kl_partial) {
          const float sum = quad_sum(fmaf(kl2, kLn2, kl));
          if (quad == 0)
            shared_.kl[key_warp_][row] = sum;
        }
      }
  }

 private:
  static __device__ __forceinline__ void add_four(float (&sum)[4], const float* from) {
    const float4 x = __ldg(reinterpret_cast<const float4*>(from));
    sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
  }

  ProxyShared<C>& shared_;
  int lane_, first_row_, first_key_, key_warp_;
};

// One thread a row.
template <class T, class C>
__device__ __forceinline__ void store_kl(const ProxyParams<T>& p, const ProxyShared<C>& shared,
                                         const Unit& unit, int ring) {
  const int row = threadIdx.x;
  if (row >= C::kRows)
    return;
  const int32_t word = shared.rows.token[ring][row];
  if (word < 0)
    return;
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < C::kScoreKeyWarps; ++warp)
    sum += shared.kl[warp][row];
  const int64_t token = word & kTokenMask;
  const int32_t slot = slot_of(unit, shared.rows.reach[ring][row]);
  p.kl_partial[((token * p.proxy_heads + unit.proxy_head) * p.kl_slots + slot) * p.key_tiles +
               unit.key_tile] = sum;
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    backward_proxy(const __grid_constant__ ProxyParams<T> p) {
  if (p.index.idle())
    return;
  extern __shared__ __align__(128) uint8_t proxy_memory[];
  using Shared = ProxyShared<C>;
  Shared& shared = *reinterpret_cast<Shared*>(proxy_memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // --- which piece of each product is this warp's ------------------------------------------------
  using WideRowsFirst = LaneAddress<C::kDim, Lanes::kRowsFirst>;
  using WideChunksFirst = LaneAddress<C::kDim, Lanes::kChunksFirst>;
  using ScoreRowsFirst = LaneAddress<C::kKeys, Lanes::kRowsFirst>;
  using ScoreChunksFirst = LaneAddress<C::kKeys, Lanes::kChunksFirst>;
  constexpr uint32_t kSixteenWide = 16 * Tile<C::kDim>::kRowBytes;
  constexpr uint32_t kSixteenScore = 16 * Tile<C::kKeys>::kRowBytes;
  constexpr uint32_t kRowTileBytes = C::kRows * C::kDim * 2;
  const uint32_t base = ptx::shared_address(proxy_memory);
  const uint32_t k_tile = base + offsetof(Shared, k), q_tile = base + offsetof(Shared, q);
  const uint32_t ds_tile = base + offsetof(Shared, gradient);

  ProxyPiece<T, C> piece(shared, warp, lane);
  const WideRowsFirst q_of_s(q_tile, warp / C::kScoreKeyWarps * C::kScoreRows, 0, lane);
  const WideChunksFirst k_of_s(k_tile, warp % C::kScoreKeyWarps * C::kScoreKeys, 0, lane);

  const int own_key = warp / C::kColumnWarps * 32;
  const int own_column = warp % C::kColumnWarps * C::kColumns;
  const ScoreChunksFirst ds_of_dk(ds_tile, 0, own_key / 16, lane);
  const WideRowsFirst q_of_dk(q_tile, 0, own_column / 16, lane);

  const int query_row = warp / C::kQueryColumnWarps * C::kQueryRows;
  const int query_column = warp % C::kQueryColumnWarps * C::kQueryColumns;
  const ScoreRowsFirst ds_of_dq(ds_tile, query_row, 0, lane);
  const WideRowsFirst k_of_dq(k_tile, 0, query_column / 16, lane);

  const auto load_tile = [&](const Unit& unit, int ring, int stage) {
    load_rows<C>(p, unit, shared.rows, ring, p.q, kQueryBad, shared.q[stage]);
    ptx::copy_async_commit();
  };

  if (threadIdx.x == 0)
    shared.next_ticket = atomicAdd(p.ticket, 1);
  while (true) {
    __syncthreads(); // the last unit's shared memory is free
    const int32_t ticket = shared.next_ticket;
    Unit unit;
    if (!take_unit<C::kKeys, true>(p, ticket, 1, unit))
      break;
    const int32_t heads_per_key = p.proxy_heads / p.proxy_kv_heads;
    unit.key_head = unit.proxy_head / heads_per_key;
    unit.first_head = unit.proxy_head;
    unit.heads = 1;
    unit.only_owner = is_only_owner(p, unit.row, unit.key_head * heads_per_key, heads_per_key);
    __syncthreads(); // the ticket has been read
    int32_t next_ticket = 0;
    if (threadIdx.x == 0)
      next_ticket = atomicAdd(p.ticket, 1); // arrives while the unit is worked on

    const RowLayout<C> layout(unit);
    RowFeed<C, ProxyConstants> feed(p, unit, layout, p.constants, p.proxy_heads, shared.rows);
    load_keys<C>(p, unit, p.k, shared.k);
    feed.write(0);
    feed.write(1);
    __syncthreads();
    load_tile(unit, 0, 0);
    ptx::copy_async_wait<0>();
    __syncthreads();
    const bool bad_keys =
        clear_bad_rows<T, C::kDim, C::kKeys, C::kThreads>(shared.k, shared.bad_keys);
    float dk[2][C::kColumns / 8][4];
    clear(dk);

    for (int tile = 0, ring = 0; tile < layout.tiles; ++tile, ring = ring == 2 ? 0 : ring + 1) {
      const int stage = tile & 1;
      const uint32_t staged = stage * kRowTileBytes;
      ptx::copy_async_wait<0>();
      __syncthreads();
      feed.write(ring == 0 ? 2 : ring - 1);
      if (tile + 1 < layout.tiles)
        load_tile(unit, ring == 2 ? 0 : ring + 1, stage ^ 1);

      clear(piece.s);
      multiply<T, C::kScoreRows / 16, C::kScoreKeys / 16, C::kDim / 16, false, false>(
          piece.s, [&](int m, int k) { return (q_of_s + staged)(k) + m * kSixteenWide; },
          [&](int n, int k) { return k_of_s(k) + n * kSixteenWide; });
      const int first_pair = tile * C::kRows;
      piece.differentiate(p, ring, bad_keys,
                          p.teacher + (unit.first_pair + first_pair) * p.index.block_size +
                              unit.key_offset,
                          unit.count - first_pair, p.index.block_size - unit.key_offset);
      __syncthreads(); // dS and the KL rows are complete
      if (p.kl_partial)
        store_kl(p, shared, unit, ring);
      if (!p.gradients)
        continue;
      if (p.dk)
        multiply<T, 2, C::kColumns / 16, C::kRows / 16, true, true>(
            dk, [&](int m, int k) { return ds_of_dk(m) + k * kSixteenScore; },
            [&](int n, int k) { return (q_of_dk + staged)(n) + k * kSixteenWide; });
      if (p.dq) {
        float dq[C::kQueryRows / 16][C::kQueryColumns / 8][4];
        clear(dq);
        multiply<T, C::kQueryRows / 16, C::kQueryColumns / 16, C::kKeys / 16, false, true>(
            dq, [&](int m, int k) { return ds_of_dq(k) + m * kSixteenScore; },
            [&](int n, int k) { return k_of_dq(n) + k * kSixteenWide; });
        flush_queries<C::kDim>(p, unit, shared.rows, ring, dq, p.dq, p.proxy_heads, query_row,
                               query_column);
      }
    }

    if (p.gradients && p.dk) {
      if (p.turns)
        wait_for_turn(p.turns, unit.turn_counter, unit.turn);
      const float scale = p.dkl_bound ? p.dk_scale / common_scale(*p.dkl_bound) : p.dk_scale;
      flush_keys<C::kDim>(unit, dk, p.dk, p.proxy_kv_heads, p.dk_out, scale, p.dim, own_key,
                          own_column);
      if (p.turns)
        pass_turn(p.turns, unit.turn_counter, unit.turn);
    }
    if (threadIdx.x == 0)
      shared.next_ticket = next_ticket;
  }
}

template <class T, int kDim>
KernelPlan ProxyKernel<T, kDim>::plan() {
  using C = ProxyConfig<kDim>;
  return plan_kernel(backward_proxy<T, C>, C::kThreads, sizeof(ProxyShared<C>), C::kKeys, 1);
}

template <class T, int kDim>
void ProxyKernel<T, kDim>::run(const ProxyParams<T>& params, const KernelPlan& plan,
                               cudaStream_t stream) {
  using C = ProxyConfig<kDim>;
  launch("backward proxy", backward_proxy<T, C>, dim3(plan.blocks), dim3(C::kThreads),
         sizeof(ProxyShared<C>), stream, params);
}

} // namespace thresher::cuda::portable::backward
