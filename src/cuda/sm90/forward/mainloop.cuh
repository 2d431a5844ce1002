// A consumer warpgroup: S = Q K^T, P = exp2(S - m), O = P V for one tile, then its partial result.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/sm90/common/async.cuh"
#include "cuda/sm90/common/wgmma.cuh"
#include "cuda/sm90/forward/config.h"

namespace thresher::cuda::sm90::forward {

// fp16 results are kept in range by a smaller P: |O| <= 128 |V| / 128. bf16 has the range.
template <class T>
inline constexpr float kOffset = std::is_same_v<T, bf16> ? 0.f : 7.f;

// P of a tile in place of its scores; returns m and l of this lane's rows (r and r + 8).
template <class T>
__device__ __forceinline__ void softmax(float (&s)[64], uint32_t (&probability)[8][4],
                                        float2 (&ml)[2], float scale) {
  float top[2] = {fmaxf(s[0], s[1]), fmaxf(s[2], s[3])};
#pragma unroll
  for (int j = 1; j < 16; ++j) {
    top[0] = fmaxf(top[0], fmaxf(s[4 * j], s[4 * j + 1]));
    top[1] = fmaxf(top[1], fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = quad_max(top[h]);
    // A row of filling has no key: any finite offset will do.
    ml[h].x = top[h] == -INFINITY ? 0.f : fmaf(top[h], scale, kOffset<T>);
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    s[4 * j] = ptx::exp2(fmaf(s[4 * j], scale, -ml[0].x));
    s[4 * j + 1] = ptx::exp2(fmaf(s[4 * j + 1], scale, -ml[0].x));
    s[4 * j + 2] = ptx::exp2(fmaf(s[4 * j + 2], scale, -ml[1].x));
    s[4 * j + 3] = ptx::exp2(fmaf(s[4 * j + 3], scale, -ml[1].x));
    sum[0] += s[4 * j] + s[4 * j + 1];
    sum[1] += s[4 * j + 2] + s[4 * j + 3];
    probability[j >> 1][(j & 1) * 2] = ptx::pack<T>(s[4 * j], s[4 * j + 1]);
    probability[j >> 1][(j & 1) * 2 + 1] = ptx::pack<T>(s[4 * j + 2], s[4 * j + 3]);
  }
  ml[0].y = quad_sum(sum[0]);
  ml[1].y = quad_sum(sum[1]);
}

// A row of a partial result: column 32 a + 8 i + 2 c + e lies at word-pair (i, e) of the 16 bytes
// [a][row][c] of its piece. A lane (place c in its quad) stores 16 bytes at a time, and a warp's
// stores of one a are contiguous. The combine undoes it.
template <class T, int kHeads>
__device__ __forceinline__ void store_partial(const Params& p, const float (&o)[64], int piece,
                                              int row, int h, int c) {
  constexpr int kRows = kPieceRows<kHeads>;
  uint4* to =
      static_cast<uint4*>(p.partial) + static_cast<int64_t>(piece) * (kRows * 16) + row * 4 + c;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int j = 16 * a + 2 * h;
    __stcs(to + a * (kRows * 4),
           make_uint4(ptx::pack<T>(o[j], o[j + 1]), ptx::pack<T>(o[j + 4], o[j + 5]),
                      ptx::pack<T>(o[j + 8], o[j + 9]), ptx::pack<T>(o[j + 12], o[j + 13])));
  }
}

template <class T, int kHeads>
__device__ __forceinline__ void consume(Shared& s, const Params& p) {
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1; // warpgroup 0 produces
  const int warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0), lane = threadIdx.x & 31;
  const int row = warp * 16 + (lane >> 2), c = lane & 3; // rows `row` and `row` + 8 of the tile

  int stage = group, held = -1;
  uint32_t parity = 0;
#pragma unroll 1
  while (true) {
    barrier_wait(s.rows_full[stage], parity);
    TileSlot& tile = s.tiles[stage];
    const int kind = __shfl_sync(~0u, tile.kind, 0);
    if (kind == kEnd)
      return;
    const int item = __shfl_sync(~0u, tile.item, 0), slot = item % Config::kBlocks;
    if (item != held) {
      if (held >= 0 && lane == 0)
        barrier_arrive(s.block_empty[held % Config::kBlocks]);
      held = item;
      barrier_wait(s.block_full[slot], (item / Config::kBlocks) & 1);
    }
    if (kind != kEmpty) {
      float acc[64];
      uint32_t probability[8][4];
      float2 ml[2];
      {
        const uint64_t a = shared_matrix(shared_u32(s.rows[stage]), 16);
        const uint64_t b = shared_matrix(shared_u32(s.blocks[slot][0]), 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k)
          products_ss<T, 0, 0>(acc, a + (k >> 2) * 512 + (k & 3) * 2,
                               b + (k >> 2) * 1024 + (k & 3) * 2, k > 0);
        wgmma_commit();
      }
      const int last[2] = {tile.last_key[row], tile.last_key[row + 8]};
      constexpr int kPiece = kPieceRows<kHeads>;
      const int piece[2] = {tile.partial[row / kHeads],
                            tile.partial[(row + 8) / kHeads] + (kHeads == 16 ? p.index.top_k : 0)};
      wgmma_wait<0>();
      keep(acc);
      if (lane == 0)
        barrier_arrive(s.rows_empty[stage]);

      if (kind == kMasked) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const int key = 8 * j + 2 * c;
          acc[4 * j] = key > last[0] ? -INFINITY : acc[4 * j];
          acc[4 * j + 1] = key + 1 > last[0] ? -INFINITY : acc[4 * j + 1];
          acc[4 * j + 2] = key > last[1] ? -INFINITY : acc[4 * j + 2];
          acc[4 * j + 3] = key + 1 > last[1] ? -INFINITY : acc[4 * j + 3];
        }
      }
      softmax<T>(acc, probability, ml, p.score_scale);
      {
        const uint64_t b = shared_matrix(shared_u32(s.blocks[slot][1]), 16384);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k)
          products_rs<T, 1>(acc, probability[k], b + k * 128, k > 0);
        wgmma_commit();
      }
      wgmma_wait<0>();
      keep(acc);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (last[h] < 0)
          continue;
        store_partial<T, kHeads>(p, acc, piece[h], row % kPiece, h, c);
        if (c == 0)
          p.statistics[static_cast<int64_t>(piece[h]) * kPiece + row % kPiece] = ml[h];
      }
    } else if (lane == 0) {
      barrier_arrive(s.rows_empty[stage]);
    }
    stage += Config::kConsumers;
    if (stage >= Config::kStages) {
      stage -= Config::kStages;
      parity ^= 1;
    }
  }
}

} // namespace thresher::cuda::sm90::forward
