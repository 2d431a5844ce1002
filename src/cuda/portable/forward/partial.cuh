// The sparse forward's main kernel: partial results of every (token, head, slot).
#pragma once

#include "cuda/common/finite.cuh"
#include "cuda/common/launch.h"
#include "cuda/portable/forward/forward.h"
#include "cuda/portable/forward/rows.cuh"
#include "cuda/portable/forward/softmax.cuh"

namespace thresher::cuda::portable::forward {

// O = P V for 64 columns at a time, normalised and stored. inverse: 1 / l of rows g and g + 8.
template <class T, class C>
__device__ __forceinline__ void
store_output(const PartialParams<T>& p, const PieceLane<C::kDim>& values,
             const uint32_t (&probability)[C::kKeys / 16][4], const int32_t (&place)[2],
             const float (&inverse)[2], int quad) {
  constexpr int kGroups = C::kColumns / 16;
#pragma unroll
  for (int first = 0; first < C::kDim; first += C::kColumns) {
    float o[2 * kGroups][4] = {};
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k)
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, values(first / 16 + n) + k * 16 * Tile<C::kDim>::kRowBytes);
        ptx::mma<T>(o[2 * n], probability[k], b[0], b[1]);
        ptx::mma<T>(o[2 * n + 1], probability[k], b[2], b[3]);
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (place[h] < 0)
        continue;
      uint4* to =
          reinterpret_cast<uint4*>(p.partial + static_cast<int64_t>(place[h]) * C::kDim + first);
      const auto pair = [&](int j) {
        return ptx::pack<T>(o[j][2 * h] * inverse[h], o[j][2 * h + 1] * inverse[h]);
      };
#pragma unroll
      for (int a = 0; a < C::kColumns / 32; ++a)
        __stcs(to + 4 * a + quad,
               make_uint4(pair(4 * a), pair(4 * a + 1), pair(4 * a + 2), pair(4 * a + 3)));
    }
  }
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    partial_kernel(const __grid_constant__ PartialParams<T> p) {
  if (p.index.idle())
    return;
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<PartialShared<C>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const uint32_t keys = ptx::shared_address(shared.k), values = ptx::shared_address(shared.v);
  const uint32_t rows = ptx::shared_address(shared.q[warp]);
  auto row_pieces = PieceLane<C::kDim>::a(rows, lane);
  auto key_pieces = PieceLane<C::kDim>::bt(keys, lane);
  auto value_pieces = PieceLane<C::kDim>::b(values, lane);

  if (threadIdx.x == 0)
    take_unit<C>(p, shared.units[0]);
  for (int current = 0;; current ^= 1) {
    __syncthreads(); // the unit is there; the last one's keys are no longer read
    const Unit& unit = shared.units[current];
    if (unit.heads == 0)
      break;
    load_keys<T, C>(p, p.k, unit, keys);
    if constexpr (C::kValues)
      load_keys<T, C>(p, p.v, unit, values);
    RowFeed<T, C> feed(p, unit, warp, lane);
    feed.load(rows);
    ptx::copy_async_commit();
    if (threadIdx.x == 0)
      take_unit<C>(p, shared.units[current ^ 1]); // while the keys arrive
    ptx::copy_async_wait<0>();
    __syncthreads();
    bool bad_values = false;
    if constexpr (C::kValues)
      bad_values = clear_bad_rows<T, C::kDim, C::kKeys, C::kThreads>(shared.v, shared.bad_values);
    if (p.negate)
      negate_tile<C::kBlockTileBytes, C::kThreads>(shared.k);

    const int32_t tiles = (unit.entry_count * unit.heads + C::kRows - 1) / C::kRows;
    for (int32_t tile = warp; tile < tiles; tile += C::kWarps) {
      ptx::copy_async_wait<0>();
      __syncwarp();
      float s[C::kKeys / 8][4];
      row_scores<T, C::kDim, C::kKeys>(s, row_pieces, key_pieces);
      const int32_t own_place = feed.place(), own_reach = feed.reach();
      // What lane r knows of row r, for this lane's rows.
      const auto of_rows = [&](int32_t own, int h) {
        return __shfl_sync(~0u, own, lane / 4 + 8 * h);
      };
      if (__any_sync(~0u, own_reach < C::kKeys))
        mask_scores(s, of_rows(own_reach, 0), of_rows(own_reach, 1), quad);
      float2 statistics[2];
      uint32_t probability[C::kKeys / 16][4];
      softmax<T>(s, probability, statistics, p.score_scale);
      // Not before: the scores leave no registers for it.
      __syncwarp(); // the rows are no longer read
      feed.advance();
      if (tile + C::kWarps < tiles)
        feed.load(rows);
      ptx::copy_async_commit();
      const int32_t place[2] = {of_rows(own_place, 0), of_rows(own_place, 1)};
      if (quad == 0)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (place[h] >= 0)
            p.statistics[place[h]] = statistics[h];
      if constexpr (C::kValues) {
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          inverse[h] = statistics[h].y == 0.f ? 0.f : 1.f / statistics[h].y;
        if (bad_values)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (sees_bad_row<C::kKeys>(shared.bad_values, of_rows(own_reach, h)))
              inverse[h] = __builtin_nanf("");
        store_output<T, C>(p, value_pieces, probability, place, inverse, quad);
      }
    }
  }
}

template <class T, int kDim, int kKeys, bool kValues>
void PartialKernel<T, kDim, kKeys, kValues>::run(const PartialParams<T>& params,
                                                 cudaStream_t stream) {
  using C = PartialConfig<kDim, kKeys, kValues>;
  constexpr size_t kSharedBytes = sizeof(PartialShared<C>);
  static_assert(kSharedBytes <= 99 * 1024, "shared memory of sm_86, sm_89 and sm_120");
  const int blocks =
      device_facts().sm_count * resident_blocks(partial_kernel<T, C>, C::kThreads, kSharedBytes);
  launch(kValues ? "forward partials" : "forward proxy statistics", partial_kernel<T, C>,
         dim3(static_cast<unsigned>(blocks)), dim3(C::kThreads), kSharedBytes, stream, params);
}

} // namespace thresher::cuda::portable::forward
