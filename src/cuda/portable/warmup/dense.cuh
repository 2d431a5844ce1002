// One CTA a (tile of queries, head): 16 rows a warp, keys and values in two stages.
#pragma once

#include "cuda/common/finite.cuh"
#include "cuda/common/launch.h"
#include "cuda/portable/forward/softmax.cuh"
#include "cuda/portable/warmup/warmup.h"

namespace thresher::cuda::portable::warmup {

template <int kDim_, bool kValues_>
struct DenseConfig {
  static constexpr int kDim = kDim_;
  static constexpr bool kValues = kValues_;
  static_assert(kDim == 64 || kDim == 128 || kDim == 256, "other dimensions are padded to these");
  static constexpr int kWarps = kDim <= 128 ? 8 : 4, kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;
  // Keys of a stage, and CTAs an SM, as registers allow. Two CTAs hide each other's barriers: at
  // D 64 they are worth a smaller stage, at D 128 the output alone leaves no room for them.
  static constexpr int kKeys = kDim == 128 || (kDim == 64 && !kValues) ? 64 : 32;
  static constexpr int kCtas = kDim == 128 && kValues ? 1 : 2;
  static constexpr int kStageBytes = kKeys * kDim * 2;
  static constexpr int kQueryBytes = kRows * kDim * 2;
};

template <class C>
struct DenseShared {
  alignas(128) uint8_t q[C::kQueryBytes];
  alignas(128) uint8_t k[2][C::kStageBytes];
  alignas(128) uint8_t v[C::kValues ? 2 : 1][C::kValues ? C::kStageBytes : 128];
  uint32_t bad_values[(C::kKeys + 31) / 32]; // keys whose V row is not finite, one bit each
};

// o += P V, 16 columns of V at a time.
template <class T, class C>
__device__ __forceinline__ void add_values(float (&o)[C::kDim / 8][4],
                                           const uint32_t (&probability)[C::kKeys / 16][4],
                                           const PieceLane<C::kDim>& values) {
#pragma unroll
  for (int k = 0; k < C::kKeys / 16; ++k)
#pragma unroll
    for (int n = 0; n < C::kDim / 16; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, values(n) + k * 16 * Tile<C::kDim>::kRowBytes);
      ptx::mma<T>(o[2 * n], probability[k], b[0], b[1]);
      ptx::mma<T>(o[2 * n + 1], probability[k], b[2], b[3]);
    }
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    dense_kernel(const __grid_constant__ DenseParams<T> p) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<DenseShared<C>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
  // Later tiles of a document see more keys: backwards, the longest come first.
  const auto slot = static_cast<int32_t>(gridDim.x - 1 - blockIdx.x);
  const auto head = static_cast<int32_t>(blockIdx.y);
  const QueryTile tile = query_tile(p.geometry, slot, C::kRows);
  if (tile.fragment < 0)
    return;
  // Fragments that reach past the keys are the caller's error; they must not become a fault.
  const int32_t stored = tile.k_begin < 0 ? 0 : max(0, p.geometry.keys - tile.k_begin);
  const int32_t end = max(0, min(tile.first_position + tile.tokens, stored)); // keys to be read
  const int32_t stages = (end + C::kKeys - 1) / C::kKeys;

  const int32_t kv_head = head / (p.heads / p.kv_heads);
  const auto load_stage = [&](int32_t number) {
    const auto row_of = [&](const TensorView<const T>& tensor) {
      return [&, first = number * C::kKeys](int row) -> const T* {
        return first + row < end ? tensor.at(tile.k_begin + first + row, kv_head) : nullptr;
      };
    };
    if (number < stages) {
      load_rows_async<C::kDim, C::kKeys, C::kThreads>(ptx::shared_address(shared.k[number % 2]),
                                                      threadIdx.x, p.dim, p.k.data, row_of(p.k));
      if constexpr (C::kValues)
        load_rows_async<C::kDim, C::kKeys, C::kThreads>(ptx::shared_address(shared.v[number % 2]),
                                                        threadIdx.x, p.dim, p.v.data, row_of(p.v));
    }
    ptx::copy_async_commit();
  };
  load_rows_async<C::kDim, C::kRows, C::kThreads>(
      ptx::shared_address(shared.q), threadIdx.x, p.dim, p.q.data, [&](int row) -> const T* {
        return row < tile.tokens ? p.q.at(tile.first_token + row, head) : nullptr;
      });
  load_stage(0);
  if (p.negate) {
    ptx::copy_async_wait<0>();
    __syncthreads();
    negate_tile<C::kQueryBytes, C::kThreads>(shared.q);
  }

  // This lane's rows: first_row and first_row + 8 of the tile.
  const int first_row = warp * 16 + lane / 4;
  int32_t reach[2]; // keys that they see
#pragma unroll
  for (int h = 0; h < 2; ++h)
    reach[h] = min(tile.first_position + first_row + 8 * h + 1, stored);
  const int32_t warp_end =
      warp * 16 < tile.tokens ? min(end, tile.first_position + warp * 16 + 16) : 0;
  const auto rows =
      PieceLane<C::kDim>::a(ptx::shared_address(shared.q + warp * 16 * C::kDim * 2), lane);
  const auto keys = PieceLane<C::kDim>::bt(ptx::shared_address(shared.k), lane);
  const auto values = PieceLane<C::kDim>::b(ptx::shared_address(shared.v), lane);

  float o[C::kValues ? C::kDim / 8 : 1][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
  bool poisoned[2] = {false, false};
#pragma unroll 1
  for (int32_t number = 0; number < stages; ++number) {
    ptx::copy_async_wait<0>();
    __syncthreads(); // the stage is there, the other one no longer read
    load_stage(number + 1);
    const int32_t first_key = number * C::kKeys;
    const bool partly = first_key + C::kKeys > min(tile.first_position + 1, stored);
    bool bad_values = false;
    if constexpr (C::kValues)
      if (partly) // otherwise every row sees every key, and may take in what is there
        bad_values = clear_bad_rows<T, C::kDim, C::kKeys, C::kThreads>(shared.v[number % 2],
                                                                       shared.bad_values);
    if (first_key >= warp_end)
      continue;
    const uint32_t stage = number % 2 * C::kStageBytes;
    float s[C::kKeys / 8][4];
    forward::row_scores<T, C::kDim, C::kKeys>(s, rows, keys + stage);
    if (partly)
      forward::mask_scores(s, reach[0] - first_key, reach[1] - first_key, quad);
    float offset[2], rescale[2];
    forward::row_tops(s, offset);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float next = fmaxf(top[h], offset[h] * p.score_scale);
      offset[h] = next == -INFINITY ? 0.f : next;
      rescale[h] = ptx::exp2(top[h] - offset[h]); // at first: 0
      top[h] = next;
      sum[h] *= rescale[h];
    }
    uint32_t probability[C::kKeys / 16][4];
    forward::exponentials<T>(s, probability, offset, sum, p.score_scale);
    if constexpr (C::kValues) {
#pragma unroll
      for (int n = 0; n < C::kDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          o[n][i] *= rescale[i / 2];
      add_values<T, C>(o, probability, values + stage);
      if (bad_values)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          poisoned[h] |= sees_bad_row<C::kKeys>(shared.bad_values, reach[h] - first_key);
    }
  }

  constexpr float kLn2 = 0.6931471805599453f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = quad_sum(sum[h]);
    const int row = first_row + 8 * h;
    if (row >= tile.tokens)
      continue;
    if (quad == 0)
      *p.lse.at(tile.first_token + row, head) = (top[h] + log2f(total)) * kLn2;
    if constexpr (C::kValues) {
      const float inverse = poisoned[h] ? __builtin_nanf("") : reach[h] <= 0 ? 0.f : 1.f / total;
      T* to = p.out.at(tile.first_token + row, head) + 2 * quad;
#pragma unroll
      for (int n = 0; n < C::kDim / 8; ++n)
        if (8 * n < p.dim)
          *reinterpret_cast<uint32_t*>(to + 8 * n) =
              ptx::pack<T>(o[n][2 * h] * inverse, o[n][2 * h + 1] * inverse);
    }
  }
}

template <class T, int kDim, bool kValues>
void DenseKernel<T, kDim, kValues>::run(const DenseParams<T>& params, cudaStream_t stream) {
  using C = DenseConfig<kDim, kValues>;
  constexpr size_t kSharedBytes = sizeof(DenseShared<C>);
  static_assert(kSharedBytes <= 99 * 1024, "shared memory of sm_86, sm_89 and sm_120");
  const dim3 grid(static_cast<unsigned>(tile_slots(params.geometry, C::kRows)),
                  static_cast<unsigned>(params.heads));
  launch(kValues ? "warmup dense" : "warmup proxy statistics", dense_kernel<T, C>, grid,
         dim3(C::kThreads), kSharedBytes, stream, params);
}

} // namespace thresher::cuda::portable::warmup
