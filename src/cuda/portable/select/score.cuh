// The quadratic part: scores, block maximum, top-k. A CTA takes units (tile, key split, head group)
// until none is left. Queries stay in registers, keys stream through a ring in shared memory, and
// each lane keeps the top-k of one row.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/tile.cuh"
#include "cuda/portable/select/select.h"
#include "cuda/portable/select/unit.cuh"

#include <algorithm>
#include <cmath>

namespace thresher::cuda::portable {

template <int kDim>
struct ScoreConfig {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  // m16 subtiles of a warp: two reuse every key fragment twice, one leaves registers for long rows.
  static constexpr int kSubtiles = kDim <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kSubtiles;
  static constexpr int kRows = kWarpRows * kWarps;
  static constexpr int kKeys = 64;  // keys of a stage
  static constexpr int kChunk = 32; // keys between two maxima; divides every block size
  static constexpr int kStages = kDim <= 128 ? 3 : 2;
  static constexpr int kCtas = kDim <= 96 ? 4 : kDim == 128 ? 3 : 2; // an SM, by registers
  static constexpr int kStageBytes = kKeys * kDim * 2;
  static constexpr int kQueryBytes = kRows * kDim * 2;
  // Queries pass through the ring's memory on their way to registers.
  static constexpr int kRingBytes = std::max(kStages * kStageBytes, kQueryBytes);

  static constexpr size_t list_bytes(int scored) {
    return static_cast<size_t>(kRows) * RowTopK::entries(scored) * sizeof(Candidate);
  }
};

// Maxima of kSubtiles * 2 rows, spread over a quad -> the maximum of one row a lane. Lane (g, q) of
// the quad layout gets row g + 8 q (two subtiles) or g + 8 (q % 2) (one).
template <int kSubtiles>
__device__ __forceinline__ float transpose_max(const float (&row_max)[2 * kSubtiles], int quad) {
  const auto exchange = [&](float keep, float give, int distance) {
    return max_nan(keep, __shfl_xor_sync(0xffffffffu, give, distance));
  };
  const bool odd = quad & 1, high = quad & 2;
  const float first = exchange(odd ? row_max[1] : row_max[0], odd ? row_max[0] : row_max[1], 1);
  if constexpr (kSubtiles == 1) {
    return max_nan(first, __shfl_xor_sync(0xffffffffu, first, 2));
  } else {
    const float second = exchange(odd ? row_max[3] : row_max[2], odd ? row_max[2] : row_max[3], 1);
    return exchange(high ? second : first, high ? first : second, 2);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(ScoreConfig<kDim>::kThreads, ScoreConfig<kDim>::kCtas)
    score_tiles_kernel(SelectArgs args, TensorView<const T> q_proxy, TensorView<const T> k_proxy) {
  using Config = ScoreConfig<kDim>;
  constexpr int kSubtiles = Config::kSubtiles, kSteps = kDim / 16;
  extern __shared__ __align__(128) char shared[];
  __shared__ ScoreUnit shared_unit;
  __shared__ int32_t shared_more;
  const uint32_t ring = ptx::shared_address(shared);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane % 4;

  const int scored = args.scored();
  Candidate* lists = args.list_memory
                         ? args.list_memory + static_cast<int64_t>(blockIdx.x) * Config::kRows *
                                                  RowTopK::entries(scored)
                         : reinterpret_cast<Candidate*>(shared + Config::kRingBytes);
  // The row whose top-k this lane keeps.
  const int own_row = warp * Config::kWarpRows + lane / 4 + 8 * (kSubtiles == 2 ? quad : quad % 2);
  const bool owns_row = kSubtiles == 2 || quad < 2;
  RowTopK top(lists + own_row, Config::kRows, scored);

  const TileLane<kDim> a_lane = TileLane<kDim>::a(lane), b_lane = TileLane<kDim>::bt(lane);

  while (true) {
    __syncthreads(); // the last unit's ring and description are no longer read
    if (thread == 0) {
      const int32_t units = args.counters[0] * args.splits * args.proxy_kv_heads * args.head_groups;
      const int32_t unit = atomicAdd(args.counters + 1, 1);
      shared_more = unit < units;
      if (unit < units)
        shared_unit = unpack_unit(args, unit);
    }
    __syncthreads();
    if (!shared_more)
      break;
    const ScoreUnit unit = shared_unit;
    const QueryTile& tile = unit.tile;

    // --- queries into registers ----------------------------------------------------------------
    load_rows_async<kDim, Config::kRows, Config::kThreads, T>(
        ring, thread, args.dim, q_proxy.data, [&](int row) -> const T* {
          const int token = row / args.tile_heads, head = row - token * args.tile_heads;
          if (token >= tile.tokens || head >= unit.heads)
            return nullptr;
          return q_proxy.at(tile.first_token + token, unit.first_head + head);
        });
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    __syncthreads();
    uint32_t query[kSubtiles][kSteps][4];
    const uint32_t sign = args.negate ? 0x80008000u : 0u;
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m)
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        ptx::ldmatrix_x4(query[m][k],
                         ring + a_lane(k) +
                             (warp * Config::kWarpRows + m * 16) * Tile<kDim>::kRowBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          query[m][k][i] ^= sign;
      }
    __syncthreads();

    // --- this lane's row -------------------------------------------------------------------------
    const int own_token = own_row / args.tile_heads;
    const int own_head = own_row - own_token * args.tile_heads;
    const bool has_row = owns_row && own_token < tile.tokens && own_head < unit.heads;
    const int32_t own_end = has_row ? scored_end(args, tile.first_position + own_token) : 0;
    top.clear();

    // --- sweep over the keys
    // -----------------------------------------------------------------------
    const int32_t first_key = unit.first_block * args.block_size;
    const int32_t keys = (unit.end_block - unit.first_block) * args.block_size;
    // Without a forced local block the last block of a row may be partly visible.
    const int32_t last_position = tile.first_position + tile.tokens - 1;
    const int32_t stored = min(last_position + 1, args.geometry.keys - tile.k_begin);
    const T* key_rows = k_proxy.at(tile.k_begin, unit.key_head) +
                        static_cast<int64_t>(first_key) * k_proxy.token_stride;
    const int tiles = (keys + Config::kKeys - 1) / Config::kKeys;
    const auto load_stage = [&](int key_tile, int stage) {
      if (key_tile < tiles) {
        const int32_t begin = key_tile * Config::kKeys;
        load_rows_async<kDim, Config::kKeys, Config::kThreads, T>(
            ring + stage * Config::kStageBytes, thread, args.dim, k_proxy.data,
            [&](int row) -> const T* {
              const int32_t key = begin + row;
              return first_key + key < stored
                         ? key_rows + static_cast<int64_t>(key) * k_proxy.token_stride
                         : nullptr;
            });
      }
      ptx::copy_async_commit(); // empty groups keep the count
    };
#pragma unroll
    for (int stage = 0; stage < Config::kStages - 1; ++stage)
      load_stage(stage, stage);

    float row_max[2 * kSubtiles];
#pragma unroll
    for (int i = 0; i < 2 * kSubtiles; ++i)
      row_max[i] = -INFINITY;
    int32_t block = unit.first_block, left_in_block = args.block_size;
    int stage = 0, load_to = Config::kStages - 1;
    for (int key_tile = 0; key_tile < tiles; ++key_tile) {
      ptx::copy_async_wait<Config::kStages - 2>();
      __syncthreads();
      load_stage(key_tile + Config::kStages - 1, load_to);
      const uint32_t base = ring + stage * Config::kStageBytes;
#pragma unroll 1
      for (int chunk = 0; chunk < Config::kKeys; chunk += Config::kChunk) {
        const int32_t chunk_key = key_tile * Config::kKeys + chunk;
        if (chunk_key >= keys)
          break;
        float score[kSubtiles][4][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          uint32_t low[4], high[4];
          ptx::ldmatrix_x4(low, base + chunk * Tile<kDim>::kRowBytes + b_lane(k));
          ptx::ldmatrix_x4(high, base + (chunk + 16) * Tile<kDim>::kRowBytes + b_lane(k));
#pragma unroll
          for (int m = 0; m < kSubtiles; ++m) {
            ptx::mma<T>(score[m][0], query[m][k], low[0], low[1]);
            ptx::mma<T>(score[m][1], query[m][k], low[2], low[3]);
            ptx::mma<T>(score[m][2], query[m][k], high[0], high[1]);
            ptx::mma<T>(score[m][3], query[m][k], high[2], high[3]);
          }
        }
        if (first_key + chunk_key + Config::kChunk > tile.first_position + 1) {
          // Some row does not see all these keys.
#pragma unroll
          for (int m = 0; m < kSubtiles; ++m)
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const int row = warp * Config::kWarpRows + m * 16 + lane / 4 + 8 * (i / 2);
                const int32_t position = tile.first_position + row / args.tile_heads;
                const int32_t key = first_key + chunk_key + n * 8 + 2 * quad + i % 2;
                if (key > position)
                  score[m][n][i] = -INFINITY;
              }
        }
#pragma unroll
        for (int m = 0; m < kSubtiles; ++m)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            row_max[2 * m] = max_nan(row_max[2 * m], max_nan(score[m][n][0], score[m][n][1]));
            row_max[2 * m + 1] =
                max_nan(row_max[2 * m + 1], max_nan(score[m][n][2], score[m][n][3]));
          }
        left_in_block -= Config::kChunk;
        if (left_in_block == 0) {
          const float best = transpose_max<kSubtiles>(row_max, quad) * args.scale;
          if (block < own_end)
            top.offer(best, block);
#pragma unroll
          for (int i = 0; i < 2 * kSubtiles; ++i)
            row_max[i] = -INFINITY;
          ++block;
          left_in_block = args.block_size;
          __syncwarp();
        }
      }
      stage = stage + 1 == Config::kStages ? 0 : stage + 1;
      load_to = load_to + 1 == Config::kStages ? 0 : load_to + 1;
    }
    ptx::copy_async_wait<0>();

    // --- what was kept
    // -----------------------------------------------------------------------------
    if (own_end > 0) {
      const int32_t head = unit.first_head + own_head, token = tile.first_token + own_token;
      if (args.splits == 1) {
        int32_t* ids = args.block_ids.at(head, token) + args.init_blocks;
        for (int i = 0; i < scored; ++i)
          ids[i] = candidate_id(top[i]);
      } else {
        Candidate* to = args.candidates +
                        ((static_cast<int64_t>(head) * args.geometry.tokens + token) * args.splits +
                         unit.split) *
                            scored;
        for (int i = 0; i < scored; ++i)
          to[i] = i < top.size() ? top[i] : 0;
      }
    }
  }
}

template <class T, int kDim>
ScorePlan ScoreTiles<T, kDim>::plan(int32_t scored, size_t shared_limit) {
  using Config = ScoreConfig<kDim>;
  const DeviceFacts& facts = device_facts();
  ScorePlan plan;
  plan.rows = Config::kRows;
  plan.shared_bytes = Config::kRingBytes + Config::list_bytes(scored);
  constexpr size_t kStatic = 512; // static shared memory and what the system keeps of it
  const size_t limit =
      shared_limit ? shared_limit : static_cast<size_t>(facts.shared_bytes_per_block) - kStatic;
  plan.lists_in_shared = plan.shared_bytes <= limit;
  if (!plan.lists_in_shared)
    plan.shared_bytes = Config::kRingBytes;
  plan.blocks = facts.sm_count *
                resident_blocks(score_tiles_kernel<T, kDim>, Config::kThreads, plan.shared_bytes);
  plan.list_entries = plan.lists_in_shared ? 0 : Config::kRows * RowTopK::entries(scored);
  return plan;
}

template <class T, int kDim>
void ScoreTiles<T, kDim>::run(const SelectArgs& args, const ScorePlan& plan,
                              const TensorView<const T>& q_proxy,
                              const TensorView<const T>& k_proxy, cudaStream_t stream) {
  const int64_t units =
      static_cast<int64_t>(args.tile_slots) * args.splits * args.proxy_kv_heads * args.head_groups;
  launch("select score_tiles", score_tiles_kernel<T, kDim>,
         dim3(static_cast<unsigned>(std::min<int64_t>(units, plan.blocks))),
         dim3(ScoreConfig<kDim>::kThreads), plan.shared_bytes, stream, args, q_proxy, k_proxy);
}

} // namespace thresher::cuda::portable
