// The proxy's share of the backward, from the teacher's rows that the main kernel left behind:
// student = exp(s_proxy - proxy_lse), dS = dkl (student - teacher), dq_proxy, dk_proxy, KL rows.
// 4 % of the main kernel's FLOPs, so mma.sync serves: 8 warps, a tile of 128 tokens x 128 keys.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/sm90/backward/epilogue.cuh"
#include "cuda/sm90/common/proxy_tile.cuh"

namespace thresher::cuda::sm90::backward {

template <class T>
struct ProxyParams {
  BlockIndex index;
  int32_t first_segment, last_segment, first_token;
  int32_t parts, proxy_heads, proxy_kv_heads;
  const __half* teacher; // see Params
  int64_t teacher_part_stride;
  TensorView<const T> q_proxy, k_proxy;
  TensorView<const float> proxy_lse, dkl; // dkl.data null: values only
  float* dq_proxy;   // [tokens of the pass, Hp, Dp], zero at launch; null: not wanted
  float* dk_proxy;   // [Tk, Hpk, Dp], zero at launch; null: not wanted
  float* kl_partial; // [tokens of the pass, Hp, K]; null: not wanted
  float scale;       // proxy_scale
};

template <class T, int kDim>
struct ProxyShared : ProxyTile<T, kDim>::Shared {
  alignas(128) uint8_t ds[128 * 128 * 2];
};

template <class T, int kDim>
__global__ void __launch_bounds__(256, 1)
    proxy_backward_kernel(const __grid_constant__ ProxyParams<T> p) {
  extern __shared__ __align__(128) uint8_t proxy_memory[];
  using ProxyTile = ProxyTile<T, kDim>;
  auto& s = *reinterpret_cast<ProxyShared<T, kDim>*>(proxy_memory);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const uint32_t keys = ptx::shared_address(s.keys), rows = ptx::shared_address(s.rows);
  const uint32_t ds_tile = ptx::shared_address(s.ds);
  const auto column_lane = TileLane<kDim>::b(lane);
  // This warp's 16 keys of dS, read transposed (see TileLane::at).
  const uint32_t ds_lane =
      ds_tile + Tile<128>::offset((lane & 7) + ((lane >> 4) << 3), 2 * warp + ((lane >> 3) & 1));
  constexpr int kSixteenRows = 16 * Tile<kDim>::kRowBytes;
  constexpr float kLog2e = 1.4426950408889634f;

  const int first = __ldg(p.index.segment_items + p.first_segment);
  const int last = __ldg(p.index.segment_items + p.last_segment);
  for (int number = first + blockIdx.x; number < last; number += gridDim.x) {
    const WorkItem item = p.index.items[number];
    const int key_head = item.proxy_head / (p.proxy_heads / p.proxy_kv_heads);
    const int64_t segment =
        static_cast<int64_t>(item.window) * p.proxy_heads + item.proxy_head - p.first_segment;
    const int64_t first_pair = segment * p.index.window_tokens * p.index.top_k + item.entry_begin;

    __syncthreads(); // the previous item's tiles are no longer read
    ProxyTile::load_keys(s, item, p.k_proxy, key_head);
    float dk[kDim / 8][4];
#pragma unroll
    for (auto& quad : dk)
      quad[0] = quad[1] = quad[2] = quad[3] = 0.f;

    for (int entry = 0; entry < item.entry_count; entry += 128) {
      ProxyTile::load_rows(s, p.index, item, entry, p.q_proxy);

      // This lane's two rows: row and row + 8 of the warp's 16 tokens.
      const int row = warp * 16 + (lane >> 2);
      float minus_lse[2], gradient[2], kl[2] = {0.f, 0.f};
      int last_key[2];
      const __half* teacher[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = s.token[row + 8 * h];
        const bool real = token >= 0;
        minus_lse[h] = real ? -*p.proxy_lse.at(token, item.proxy_head) : 0.f;
        gradient[h] = real && p.dkl.data ? *p.dkl.at(token, item.proxy_head) : 0.f;
        last_key[h] = ProxyTile::last_key(s, p.index, item, row + 8 * h);
        teacher[h] =
            real ? p.teacher + (first_pair + entry + row + 8 * h) * 128 + (lane & 3) * 4 : nullptr;
      }
      float scores[16][4];
      ProxyTile::scores(s, scores);

      // Student, KL and dS, 16 keys at a time.
      uint32_t ds[8][4];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float mean[4] = {0.f, 0.f, 0.f, 0.f};
          if (teacher[h])
            for (int part = 0; part < p.parts; ++part) {
              const uint2 packed = __ldg(reinterpret_cast<const uint2*>(
                  teacher[h] + part * p.teacher_part_stride + n * 16));
              const float2 low = ptx::unpack<fp16>(packed.x), high = ptx::unpack<fp16>(packed.y);
              mean[0] += low.x;
              mean[1] += low.y;
              mean[2] += high.x;
              mean[3] += high.y;
            }
          float value[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = n * 16 + (i >> 1) * 8 + (lane & 3) * 2 + (i & 1);
            const float log_student =
                fmaf(scores[2 * n + (i >> 1)][2 * h + (i & 1)], p.scale, minus_lse[h]);
            const float t = mean[i] * (1.f / kTeacherScale);
            const bool visible = key <= last_key[h];
            const float student = visible ? ptx::exp2(log_student * kLog2e) : 0.f;
            value[i] = visible ? gradient[h] * (student - t) : 0.f;
            if (visible && t != 0.f)
              kl[h] += t * (__logf(t) - log_student);
          }
          ds[n][h] = ptx::pack<T>(value[0], value[1]);
          ds[n][2 + h] = ptx::pack<T>(value[2], value[3]);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = quad_sum(kl[h]);
        const int token = s.token[row + 8 * h];
        if (p.kl_partial && (lane & 3) == 0 && token >= 0)
          p.kl_partial[(static_cast<int64_t>(token - p.first_token) * p.proxy_heads +
                        item.proxy_head) *
                           p.index.top_k +
                       s.slot[row + 8 * h]] = sum;
      }
      if (p.dkl.data && p.dq_proxy) {
        // dq_proxy = dS K, 16 columns at a time.
#pragma unroll
        for (int n = 0; n < kDim / 16; ++n) {
          float left[4] = {0.f, 0.f, 0.f, 0.f}, right[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, keys + k * kSixteenRows + column_lane(n));
            ptx::mma<T>(left, ds[k], b[0], b[1]);
            ptx::mma<T>(right, ds[k], b[2], b[3]);
          }
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int token = s.token[row + 8 * h];
            if (token < 0)
              continue;
            float* to =
                p.dq_proxy +
                (static_cast<int64_t>(token - p.first_token) * p.proxy_heads + item.proxy_head) *
                    kDim +
                n * 16 + (lane & 3) * 2;
            ptx::reduce_add(to, left[2 * h], left[2 * h + 1]);
            ptx::reduce_add(to + 8, right[2 * h], right[2 * h + 1]);
          }
        }
      }
      if (p.dkl.data && p.dk_proxy) {
        // dS^T as operand A: through shared memory, [token][key], read transposed.
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token_row = row + 8 * (i & 1), chunk = 2 * n + (i >> 1);
            *reinterpret_cast<uint32_t*>(s.ds + Tile<128>::offset(token_row, chunk) +
                                         (lane & 3) * 4) = ds[n][i];
          }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; ++k) { // 16 tokens
          uint32_t a[4];
          ptx::ldmatrix_x4_trans(a, ds_lane + k * 16 * Tile<128>::kRowBytes);
#pragma unroll
          for (int n = 0; n < kDim / 16; ++n) {
            uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, rows + k * kSixteenRows + column_lane(n));
            ptx::mma<T>(dk[2 * n], a, b[0], b[1]);
            ptx::mma<T>(dk[2 * n + 1], a, b[2], b[3]);
          }
        }
      }
      __syncthreads(); // rows, ds and the token list are overwritten by the next tile
    }

    if (p.dkl.data && p.dk_proxy) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = warp * 16 + (lane >> 2) + 8 * h;
        if (key >= item.key_count)
          continue;
        float* to =
            p.dk_proxy +
            (static_cast<int64_t>(item.key_begin + key) * p.proxy_kv_heads + key_head) * kDim +
            (lane & 3) * 2;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
          ptx::reduce_add(to + n * 8, dk[n][2 * h], dk[n][2 * h + 1]);
      }
    }
  }
}

} // namespace thresher::cuda::sm90::backward
