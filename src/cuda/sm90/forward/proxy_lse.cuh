// proxy_lse over the selected keys: offset and sum of every (token, slot), then their merge.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/sm90/common/proxy_tile.cuh"

namespace thresher::cuda::sm90::forward {

template <class T>
struct ProxyLseParams {
  BlockIndex index;
  int32_t proxy_heads, proxy_kv_heads;
  TensorView<const T> q_proxy, k_proxy;
  float2* statistics; // [T, Hp, K]: m and l of exp2(score - m)
  float score_scale;  // proxy_scale * log2(e)
};

template <class T, int kDim>
__global__ void __launch_bounds__(256, 2)
    proxy_statistics_kernel(const __grid_constant__ ProxyLseParams<T> p) {
  using Tile = ProxyTile<T, kDim>;
  extern __shared__ __align__(128) uint8_t proxy_memory[];
  auto& s = *reinterpret_cast<typename Tile::Shared*>(proxy_memory);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int items = p.index.item_count();
  for (int number = blockIdx.x; number < items; number += gridDim.x) {
    const WorkItem item = p.index.items[number];
    __syncthreads(); // the previous item's tiles are no longer read
    Tile::load_keys(s, item, p.k_proxy, item.proxy_head / (p.proxy_heads / p.proxy_kv_heads));
    for (int entry = 0; entry < item.entry_count; entry += Tile::kTokens) {
      Tile::load_rows(s, p.index, item, entry, p.q_proxy);
      float scores[16][4];
      Tile::scores(s, scores);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * 16 + (lane >> 2) + 8 * h;
        const int last = Tile::last_key(s, p.index, item, row);
        float top = -INFINITY, sum = 0.f;
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = scores[n][2 * h + e];
            x = 8 * n + 2 * (lane & 3) + e > last ? -INFINITY : x * p.score_scale;
            top = fmaxf(top, x);
          }
        top = quad_max(top);
        top = top == -INFINITY ? 0.f : top;
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            sum += ptx::exp2(scores[n][2 * h + e] - top);
        sum = quad_sum(sum);
        if ((lane & 3) == 0 && s.token[row] >= 0)
          p.statistics[(static_cast<int64_t>(s.token[row]) * p.proxy_heads + item.proxy_head) *
                           p.index.top_k +
                       s.slot[row]] = make_float2(top, sum);
      }
      __syncthreads(); // rows and the token list are overwritten by the next tile
    }
  }
}

__global__ void __launch_bounds__(256)
    merge_proxy_lse_kernel(BlockIndex index, const float2* statistics, TensorView<float> proxy_lse,
                           int32_t tokens, int32_t proxy_heads) {
  const int64_t rows = static_cast<int64_t>(tokens) * proxy_heads;
  for (int64_t row = blockIdx.x * 256ll + threadIdx.x; row < rows; row += gridDim.x * 256ll) {
    const int token = static_cast<int>(row / proxy_heads);
    const int head = static_cast<int>(row % proxy_heads);
    const int slots = __ldg(index.slot_count + static_cast<int64_t>(head) * index.tokens + token);
    const float2* ml = statistics + row * index.top_k;
    float top = -INFINITY, sum = 0.f;
    for (int slot = 0; slot < slots; ++slot)
      top = fmaxf(top, ml[slot].x);
    for (int slot = 0; slot < slots; ++slot)
      sum += ml[slot].y * ptx::exp2(ml[slot].x - top);
    *proxy_lse.at(token, head) = slots > 0 ? (top + __log2f(sum)) * 0.6931471805599453f : -INFINITY;
  }
}

} // namespace thresher::cuda::sm90::forward
