// The proxy's share of the backward, from the teacher's rows that the main kernel left behind:
// student = exp(s_proxy - proxy_lse), dS = dkl (student - teacher), dq_proxy, dk_proxy, KL rows.
// 4 % of the main kernel's FLOPs, so mma.sync serves: 8 warps, a tile of 128 tokens x 128 keys.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/sm90/backward/epilogue.cuh"
#include "cuda/sm90/backward/proxy_stream.cuh"

namespace thresher::cuda::sm90::backward {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f, kTiny = 1e-37f;

template <class T>
struct ProxyParams {
  BlockIndex index;
  int32_t first_segment, last_segment, first_token;
  int32_t parts, proxy_heads, proxy_kv_heads;
  const __half* teacher; // see Params
  int64_t teacher_part_stride;
  TensorView<const T> q_proxy, k_proxy;
  TensorView<const float> proxy_lse, dkl; // dkl.data null: values only
  // Zero at launch, columns permuted as dK's (see epilogue.cuh); null: not wanted.
  float* dq_proxy;   // [tokens of the pass, Hp, Dp]; deterministic: partial, [.., Hp, K, Dp]
  float* dk_proxy;   // [Tk, Hpk, Dp]
  float* kl_partial; // [tokens of the pass, Hp, K]; null: not wanted
  float scale;       // proxy_scale
  // Deterministic only.
  int32_t* next_item; // work counter, zero at launch
  int32_t* turns;     // counters of (proxy key head, block row, warp)
};

template <class T, int kDim, bool kDeterministic>
using ProxyBackwardStream = ProxyStream<T, kDim, 8, kDeterministic>;

template <class T, int kDim, bool kDeterministic>
class ProxyBackward {
  using Stream = ProxyBackwardStream<T, kDim, kDeterministic>;

 public:
  __device__ __forceinline__ explicit ProxyBackward(const ProxyParams<T>& p)
      : p_(p), warp_(threadIdx.x >> 5), lane_(threadIdx.x & 31) {}

  __device__ __forceinline__ void run(typename Stream::Shared& s) {
    const ProxySource<T> source = {p_.index,
                                   __ldg(p_.index.segment_items + p_.first_segment),
                                   __ldg(p_.index.segment_items + p_.last_segment),
                                   p_.q_proxy,
                                   p_.k_proxy,
                                   p_.proxy_heads / p_.proxy_kv_heads,
                                   p_.teacher,
                                   p_.first_segment,
                                   p_.next_item};
    auto facts = [&](int token, int head) {
      return make_float2(-*p_.proxy_lse.at(token, head) * kLog2e,
                         p_.dkl.data ? *p_.dkl.at(token, head) : 0.f);
    };
    typename Stream::template Feed<decltype(facts)> feed(s, source, facts);
    float dk[kDim / 8][4];
    WorkItem item;
    while (feed.next()) {
      item = feed.info().item;
      if (feed.info().new_key) {
#pragma unroll
        for (auto& quad : dk)
          quad[0] = quad[1] = quad[2] = quad[3] = 0.f;
      }
      uint32_t ds[8][4];
      {
        float scores[16][4];
        Stream::scores(feed.rows(), feed.keys(), scores);
        differentiate(feed, source, scores, ds);
      }
      if (p_.dkl.data && p_.dq_proxy)
        put_dq(feed, ds);
      if (p_.dkl.data && p_.dk_proxy) {
        multiply_dk(feed, ds, dk);
        if (feed.info().entry + Stream::kTokens >= item.entry_count)
          add_dk(item, feed.turn(), dk);
      }
    }
  }

 private:
  static constexpr int kSixteenRows = 16 * Tile<kDim>::kRowBytes;

  __device__ __forceinline__ int row(int h) const { return warp_ * 16 + (lane_ >> 2) + 8 * h; }

  // Student, KL and dS, 16 keys at a time.
  template <class Feed>
  __device__ __forceinline__ void differentiate(Feed& feed, const ProxySource<T>& source,
                                                const float (&scores)[16][4],
                                                uint32_t (&ds)[8][4]) {
    const uint8_t* teacher = feed.teacher();
    const float scale = p_.scale * kLog2e;
    float kl[2] = {0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float kl2 = 0.f; // in units of ln 2
      const ProxyRow facts = feed.row(row(h));
      const int last = facts.last_key - 2 * (lane_ & 3);
      const __half* further = nullptr; // of the other parts
      if (p_.parts > 1 && facts.token >= 0)
        further = p_.teacher + (source.first_pair(feed.info().item) + feed.info().entry + row(h)) *
                                   Stream::kKeys;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint2 packed = *reinterpret_cast<const uint2*>(
            teacher + Tile<128>::offset(row(h), 2 * n + ((lane_ & 3) >> 1)) + (lane_ & 1) * 8);
        float mean[4];
        unpack_four(packed, mean);
        if (further)
          for (int part = 1; part < p_.parts; ++part) {
            float x[4];
            unpack_four(__ldg(reinterpret_cast<const uint2*>(
                            further + part * p_.teacher_part_stride + n * 16 + (lane_ & 3) * 4)),
                        x);
#pragma unroll
            for (int i = 0; i < 4; ++i)
              mean[i] += x[i];
          }
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool visible = n * 16 + (i >> 1) * 8 + (i & 1) <= last;
          const float log_student =
              fmaf(scores[2 * n + (i >> 1)][2 * h + (i & 1)], scale, facts.minus_lse); // base 2
          const float t = mean[i] * (1.f / kTeacherScale);
          const float difference = visible ? ptx::exp2(log_student) - t : 0.f;
          value[i] = visible ? facts.gradient * difference : 0.f;
          // Both distributions sum to one, so adding the differences changes nothing; but now every
          // term is least where t is right, and its rounding does not come through.
          kl[h] += difference;
          if (visible)
            kl2 = fmaf(t, __log2f(fmaxf(t, kTiny)) - log_student, kl2);
        }
        ds[n][h] = ptx::pack<T>(value[0], value[1]);
        ds[n][2 + h] = ptx::pack<T>(value[2], value[3]);
      }
      const float sum = quad_sum(fmaf(kl2, kLn2, kl[h]));
      if (p_.kl_partial && (lane_ & 3) == 0 && facts.token >= 0)
        p_.kl_partial[pass_row(facts.token, feed.info().item.proxy_head) * p_.index.top_k +
                      facts.slot] = sum;
    }
  }

  static __device__ __forceinline__ void unpack_four(uint2 packed, float (&x)[4]) {
    const float2 low = ptx::unpack<fp16>(packed.x), high = ptx::unpack<fp16>(packed.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
  }

  __device__ __forceinline__ int64_t pass_row(int token, int head) const {
    return static_cast<int64_t>(token - p_.first_token) * p_.proxy_heads + head;
  }

  __device__ __forceinline__ int64_t dq_row(const ProxyRow& row, int head) const {
    const int64_t sum = pass_row(row.token, head);
    return kDeterministic ? sum * p_.index.top_k + row.slot : sum;
  }

  // dS K, 16 columns at a time: added to dq_proxy, or stored as the tokens' partial result.
  template <class Feed>
  __device__ __forceinline__ void put_dq(Feed& feed, const uint32_t (&ds)[8][4]) {
    const auto column_lane = TileLane<kDim>::b(lane_);
    const int head = feed.info().item.proxy_head;
    const uint32_t keys = feed.keys();
    float* to[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = feed.row(row(h)).token;
      to[h] = token < 0 ? nullptr
                        : p_.dq_proxy + dq_row(feed.row(row(h)), head) * kDim + (lane_ & 3) * 4;
    }
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
      for (int h = 0; h < 2; ++h)
        if (to[h]) {
          const float4 four =
              make_float4(left[2 * h], left[2 * h + 1], right[2 * h], right[2 * h + 1]);
          if constexpr (kDeterministic)
            __stcs(reinterpret_cast<float4*>(to[h] + n * 16), four);
          else
            ptx::reduce_add(to[h] + n * 16, four);
        }
    }
  }

  // dk_proxy += dS^T Q. dS^T as operand A goes through shared memory, in the place of the teacher's
  // rows that this warp has read: [token][key], read transposed.
  template <class Feed>
  __device__ __forceinline__ void multiply_dk(Feed& feed, const uint32_t (&ds)[8][4],
                                              float (&dk)[kDim / 8][4]) {
    uint8_t* tile = feed.teacher();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<uint32_t*>(tile + Tile<128>::offset(row(i & 1), 2 * n + (i >> 1)) +
                                     (lane_ & 3) * 4) = ds[n][i];
    __syncthreads();
    const auto column_lane = TileLane<kDim>::b(lane_);
    const uint32_t rows = feed.rows();
    // This warp's 16 keys (see TileLane::at).
    const uint32_t ds_lane =
        ptx::shared_address(tile) +
        Tile<128>::offset((lane_ & 7) + ((lane_ >> 4) << 3), 2 * warp_ + ((lane_ >> 3) & 1));
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

  // `turn_number`: deterministic only.
  __device__ __forceinline__ void add_dk(const WorkItem& item, int32_t turn_number,
                                         const float (&dk)[kDim / 8][4]) {
    const int key_head = item.proxy_head / (p_.proxy_heads / p_.proxy_kv_heads);
    Turn turn;
    if constexpr (kDeterministic) {
      turn = make_turn(p_.turns, p_.index.rows, key_head, item.row, turn_number);
      wait_for_turn(turn, warp_, lane_);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row(h) >= item.key_count)
        continue;
      float* to =
          p_.dk_proxy +
          (static_cast<int64_t>(item.key_begin + row(h)) * p_.proxy_kv_heads + key_head) * kDim +
          (lane_ & 3) * 4;
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n)
        ptx::reduce_add(to + n * 16, make_float4(dk[2 * n][2 * h], dk[2 * n][2 * h + 1],
                                                 dk[2 * n + 1][2 * h], dk[2 * n + 1][2 * h + 1]));
    }
    if constexpr (kDeterministic)
      pass_turn(turn, warp_, lane_);
  }

  const ProxyParams<T>& p_;
  const int warp_, lane_;
};

template <class T, int kDim, bool kDeterministic>
__global__ void __launch_bounds__(256, 1)
    proxy_backward_kernel(const __grid_constant__ ProxyParams<T> p) {
  extern __shared__ __align__(128) uint8_t proxy_memory[];
  ptx::wait_for_predecessor();
  using Shared = typename ProxyBackwardStream<T, kDim, kDeterministic>::Shared;
  ProxyBackward<T, kDim, kDeterministic>(p).run(*reinterpret_cast<Shared*>(proxy_memory));
}

} // namespace thresher::cuda::sm90::backward
