// NOT YET RUN ON A GPU: compiled with -DTHRESHER_UNPROVEN=ON only, in the place of proxy.cuh.
//
// The proxy's share of the backward, from the teacher's rows that the main kernel left behind:
// student = exp(s_proxy - proxy_lse), dS = dkl (student - teacher), dq_proxy, dk_proxy, KL rows.
// One CTA a multiprocessor: warpgroups 0 and 1 consume, warpgroup 2 produces. Roles, barriers and
// the shared-memory map: docs/kernels/backward.md.
#pragma once

#include "cuda/sm90/backward/epilogue.cuh"
#include "cuda/sm90/backward/proxy_wgmma_producer.cuh"

namespace thresher::cuda::sm90::backward {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f, kTiny = 1e-30f;
inline constexpr float kLog2TeacherScale = 12.f;
static_assert(kTeacherScale == 4096.f);

// A consumer warpgroup: 64 keys of the item's block against all tiles of its list. A lane holds two
// places of keys (`place_` and + 8) x 16 tokens of a tile (8 j + column_ and + 1).
template <class T, class C, bool kDeterministic>
class ProxyConsumer {
 public:
  __device__ __forceinline__ ProxyConsumer(ProxyShared<C>& shared, const ProxyParams<T>& params)
      : s_(shared), p_(params), group_(__shfl_sync(~0u, threadIdx.x >> 7, 0)),
        warp_(__shfl_sync(~0u, threadIdx.x >> 5 & 3, 0)), lane_(threadIdx.x & 31),
        column_((lane_ & 3) * 2), place_(group_ * 64 + warp_ * 16 + (lane_ >> 2)) {}

  __device__ __forceinline__ void run() {
    const int last = p_.last_item();
    uint32_t tile = 0, number = 0;
    for (int i = p_.first_item() + blockIdx.x; kDeterministic || i < last;
         i += gridDim.x, ++number) {
      const int slot = number % C::kBlocks;
      if constexpr (kDeterministic) {
        barrier_wait(s_.keys_full[slot], number / C::kBlocks & 1);
        i = s_.item[slot];
        if (i >= last)
          return;
      }
      const WorkItem item = p_.index.items[i];
      const int tiles = (item.entry_count + C::kTokens - 1) / C::kTokens;
      float dk[C::kDim / 2];
#pragma unroll
      for (float& x : dk)
        x = 0.f;
      if constexpr (!kDeterministic)
        barrier_wait(s_.keys_full[slot], number / C::kBlocks & 1);
#pragma unroll 1
      for (int t = 0; t < tiles; ++t, ++tile)
        step(t > 0, tile, shared_u32(s_.keys[slot]), dk);
      wgmma_wait<0>();
      keep(dk);
      __syncwarp();
      if (lane_ == 0) {
        barrier_arrive(s_.rows_empty[(tile - 1) % C::kStages]);
        barrier_arrive(s_.keys_empty[slot]);
      }
      if (p_.dk_proxy)
        add_dk(i, item, dk);
    }
  }

 private:
  __device__ __forceinline__ void step(bool follows, uint32_t tile, uint32_t keys,
                                       float (&dk)[C::kDim / 2]) {
    const int stage = tile % C::kStages;
    const uint32_t rows = shared_u32(s_.rows[stage]);
    barrier_wait(s_.rows_full[stage], tile / C::kStages & 1);
    fence_async_proxy(); // rows and keys came by cp.async

    float scores[32]; // S^T = K Q^T
    {
      const uint64_t a = shared_matrix(keys + group_ * 8192, 16), b = shared_matrix(rows, 16);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < C::kDim / 16; ++k)
        products_ss<T, 0, 0>(scores, a + (k >> 2) * (C::kKeyHalfBytes >> 4) + (k & 3) * 2,
                             b + (k >> 2) * (C::kRowHalfBytes >> 4) + (k & 3) * 2, k > 0);
      wgmma_commit();
    }
    wgmma_wait<0>();
    keep(scores);
    if (follows && lane_ == 0) // the last tile's dK is done with its rows
      barrier_arrive(s_.rows_empty[(tile - 1) % C::kStages]);

    uint32_t ds[4][4];
    differentiate(s_.tokens[stage], shared_u32(s_.teacher[stage]), tile & 1, scores, ds);
    const uint32_t ds_tile = shared_u32(s_.ds[tile & 1]);
    store_scores(ds_tile, ds, group_ * 64 + warp_ * 16, lane_);
    fence_async_proxy();
    ptx::barrier_sync(kProxyScoresWritten, 128 * C::kConsumers);

    float dq[C::kDim / 4]; // dQ = dS K, half of the columns a warpgroup
    {
      const uint64_t a = shared_matrix(ds_tile, 16384);
      const uint64_t b = shared_matrix(
          C::kDim == 128 ? keys + group_ * C::kKeyHalfBytes : keys + group_ * 64, 16384);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 8; ++k)
        products_ss<T, 1, 1>(dq, a + k * 128, b + k * 128, k > 0);
      wgmma_commit();
      const uint64_t b_q = shared_matrix(rows, C::kRowHalfBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        products_rs<T, 1>(dk, ds[k], b_q + k * 128, 1);
      wgmma_commit();
    }
    if (p_.kl_partial)
      store_kl(s_.tokens[stage], tile & 1);
    wgmma_wait<1>();
    keep(dq);
    if (p_.dq_proxy)
      put_dq(s_.tokens[stage], dq);
    __syncwarp(); // every lane is done with the stage's tokens before it is given back
  }

  // Student, KL and dS. Student and teacher are kept times kTeacherScale.
  __device__ __forceinline__ void differentiate(const ProxyTokens<C>& tokens, uint32_t teacher_tile,
                                                int parity, const float (&scores)[32],
                                                uint32_t (&ds)[4][4]) {
    const float scale = p_.scale * kLog2e;
    const int key = proxy_key(place_), other_key = proxy_key(place_ + 8);
    // Four 8 x 8 matrices: this warp's 16 places x 16 tokens, read transposed.
    const int source_token = (lane_ & 7) + (lane_ >> 4) * 8;
    const int chunk = (group_ * 8) + warp_ * 2 + (lane_ >> 3 & 1);
    float kl[16];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) { // of groups of 8 tokens
      uint32_t teacher[4];
      ptx::ldmatrix_x4_trans(
          teacher, teacher_tile + swizzled(pair * 16 + source_token, chunk, C::kTeacherHalfBytes));
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const int j = 2 * pair + g, at = 8 * j + column_;
        const float2 lse = *reinterpret_cast<const float2*>(tokens.minus_lse + at);
        const int2 last_key = *reinterpret_cast<const int2*>(tokens.last_key + at);
        float2 dkl = {0.f, 0.f};
        if (p_.dkl.data)
          dkl = *reinterpret_cast<const float2*>(tokens.dkl + at);
        float2 low = ptx::unpack<fp16>(teacher[2 * g]),
               high = ptx::unpack<fp16>(teacher[2 * g + 1]);
        float mean[4] = {low.x, low.y, high.x, high.y};
        const float minus_lse[2] = {fmaf(lse.x, -kLog2e, kLog2TeacherScale),
                                    fmaf(lse.y, -kLog2e, kLog2TeacherScale)};
        const float gradient[2] = {dkl.x * (1.f / kTeacherScale), dkl.y * (1.f / kTeacherScale)};
        const int last[2] = {last_key.x, last_key.y};
        float value[4];
        kl[2 * j] = kl[2 * j + 1] = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int e = i & 1;
          const bool visible = (i < 2 ? key : other_key) <= last[e];
          const float log_student = fmaf(scores[4 * j + i], scale, minus_lse[e]); // base 2
          const float difference = visible ? ptx::exp2(log_student) - mean[i] : 0.f;
          value[i] = visible ? gradient[e] * difference : 0.f;
          // Both distributions sum to one, so adding the differences changes nothing; but now every
          // term is least where t is right, and its rounding does not come through.
          float term = difference;
          if (visible)
            term = fmaf(mean[i] * kLn2, __log2f(fmaxf(mean[i], kTiny)) - log_student, term);
          kl[2 * j + e] += term;
        }
        ds[j >> 1][(j & 1) * 2] = ptx::pack<T>(value[0], value[1]);
        ds[j >> 1][(j & 1) * 2 + 1] = ptx::pack<T>(value[2], value[3]);
      }
    }
    if (p_.kl_partial)
      sum_kl(kl, parity);
  }

  // Sums of the warp's 16 keys: the eight lanes of a column exchange halves, so that each ends with
  // two of its 16 tokens.
  __device__ __forceinline__ void sum_kl(float (&kl)[16], int parity) {
#pragma unroll
    for (int step = 0; step < 3; ++step) {
      const int half = 8 >> step, bit = 4 << step;
      const bool upper = lane_ & bit;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i < half) {
          const float given = upper ? kl[i] : kl[i + half];
          kl[i] = (upper ? kl[i + half] : kl[i]) + __shfl_xor_sync(~0u, given, bit);
        }
    }
    // kl[0], kl[1]: tokens 8 j + column_, + 1 of j made of the bits, the first decides the highest.
    const int j = (lane_ >> 2 & 1) * 4 + (lane_ >> 3 & 1) * 2 + (lane_ >> 4 & 1);
    *reinterpret_cast<float2*>(s_.kl[parity][group_ * 4 + warp_] + 8 * j + column_) =
        make_float2(kl[0], kl[1]);
  }
  // After the barrier: one thread a token adds the eight warps' sums.
  __device__ __forceinline__ void store_kl(const ProxyTokens<C>& tokens, int parity) {
    const int i = threadIdx.x;
    if (i >= C::kTokens || tokens.last_key[i] < 0)
      return;
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < 4 * C::kConsumers; ++warp)
      sum += s_.kl[parity][warp][i];
    p_.kl_partial[static_cast<int64_t>(tokens.row[i]) * p_.index.top_k + tokens.slot[i]] =
        sum * (1.f / kTeacherScale);
  }

  // A tile's dQ, 16 tokens a warp: added to the sums, or stored as the tokens' partial result.
  __device__ __forceinline__ void put_dq(const ProxyTokens<C>& tokens,
                                         const float (&dq)[C::kDim / 4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = warp_ * 16 + (lane_ >> 2) + 8 * h;
      if (tokens.last_key[token] < 0)
        continue;
      int64_t place = tokens.row[token];
      if constexpr (kDeterministic)
        place = place * p_.index.top_k + tokens.slot[token];
      float* to = p_.dq_proxy + place * C::kDim + group_ * (C::kDim / 2) + column_ * 2;
#pragma unroll
      for (int m = 0; m < C::kDim / 32; ++m) {
        const int low = 8 * m + 2 * h, high = low + 4;
        const float4 four = make_float4(dq[low], dq[low + 1], dq[high], dq[high + 1]);
        if constexpr (kDeterministic)
          __stcs(reinterpret_cast<float4*>(to + m * 16), four);
        else
          ptx::reduce_add(to + m * 16, four);
      }
    }
  }

  __device__ __forceinline__ void add_dk(int number, const WorkItem& item,
                                         const float (&dk)[C::kDim / 2]) {
    Turn turn;
    if constexpr (kDeterministic) {
      turn = make_turn(p_.turns, p_.index.rows, p_.key_head(item), item.row,
                       __ldg(&p_.index.order[number].y));
      wait_for_turn(turn, group_ * 4 + warp_, lane_);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = proxy_key(place_ + 8 * h);
      if (key >= item.key_count)
        continue;
      float* to =
          p_.dk_proxy +
          (static_cast<int64_t>(item.key_begin + key) * p_.proxy_kv_heads + p_.key_head(item)) *
              C::kDim +
          column_ * 2;
#pragma unroll
      for (int m = 0; m < C::kDim / 16; ++m) {
        const int low = 8 * m + 2 * h, high = low + 4;
        ptx::reduce_add(to + m * 16, make_float4(dk[low], dk[low + 1], dk[high], dk[high + 1]));
      }
    }
    if constexpr (kDeterministic)
      pass_turn(turn, group_ * 4 + warp_, lane_);
  }

  ProxyShared<C>& s_;
  const ProxyParams<T>& p_;
  const int group_, warp_, lane_, column_, place_;
};

// The teacher's rows of a proxy head that serves several kv heads: adds them up in the first part.
inline __global__ void __launch_bounds__(256)
    sum_parts_kernel(__half* teacher, int64_t part_stride, int32_t parts) {
  for (int64_t i = (blockIdx.x * 256ll + threadIdx.x) * 8; i < part_stride;
       i += gridDim.x * 256ll * 8) {
    float sum[8] = {};
    for (int part = 0; part < parts; ++part) {
      const uint4 packed = __ldcs(reinterpret_cast<const uint4*>(teacher + part * part_stride + i));
      const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = ptx::unpack<fp16>(pairs[j]);
        sum[2 * j] += x.x;
        sum[2 * j + 1] += x.y;
      }
    }
    *reinterpret_cast<uint4*>(teacher + i) =
        make_uint4(ptx::pack<fp16>(sum[0], sum[1]), ptx::pack<fp16>(sum[2], sum[3]),
                   ptx::pack<fp16>(sum[4], sum[5]), ptx::pack<fp16>(sum[6], sum[7]));
  }
}

// teacher: [pairs of the pass, 1, 128] of one part.
template <class T, class C, bool kDeterministic>
__global__ void __launch_bounds__(C::kThreads, 1)
    proxy_backward_kernel(const __grid_constant__ CUtensorMap teacher,
                          const __grid_constant__ ProxyParams<T> p) {
  extern __shared__ __align__(1024) uint8_t proxy_memory[];
  auto& s = *reinterpret_cast<ProxyShared<C>*>(proxy_memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kBlocks; ++i) {
      // Every producer's copies; with tickets also one arrival for the item's number.
      barrier_init(s.keys_full[i], C::kProducers + (kDeterministic ? 1 : 0));
      barrier_init(s.keys_empty[i], 4 * C::kConsumers);
    }
    for (int i = 0; i < C::kStages; ++i) {
      // Every producer's copies, one arrival a warp for what it stored, bulk copies.
      barrier_init(s.rows_full[i], C::kProducers + C::kProducers / 32);
      barrier_init(s.rows_empty[i], 4 * C::kConsumers);
    }
    fence_barrier_init();
    fence_async_proxy();
  }
  __syncthreads();
  ptx::wait_for_predecessor();
  if (__shfl_sync(~0u, threadIdx.x >> 7, 0) == C::kConsumers) {
    give_registers<C::kProducerRegisters>();
    ProxyProducer<T, C, kDeterministic>(s, p, &teacher).run();
  } else {
    take_registers<C::kConsumerRegisters>();
    ProxyConsumer<T, C, kDeterministic>(s, p).run();
  }
}

} // namespace thresher::cuda::sm90::backward
