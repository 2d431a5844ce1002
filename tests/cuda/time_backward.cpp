// Times of the portable sparse and warm-up backward, and of the Hopper backward. Not a test.
#include "backward_case.h"

using namespace thresher;
using namespace thresher::test;

namespace {

struct Heads {
  int q, kv, proxy, proxy_kv;
};

void time_case(int64_t length, Heads heads, int dim, int block_size, int top_k, bool dense,
               bool proxy, bool deterministic, bool hopper = false) {
  using T = __nv_bfloat16;
  BackwardCase c;
  c.batch = packed({length});
  c.q_heads = heads.q;
  c.kv_heads = heads.kv;
  c.proxy_heads = heads.proxy;
  c.proxy_kv_heads = heads.proxy_kv;
  c.dim = c.proxy_dim = dim;
  c.block_size = block_size;
  c.top_k = top_k;
  c.dense = dense;
  c.proxy = c.kl = proxy;
  c.deterministic = deterministic;
  c.hopper = hopper;
  // Times do not depend on what the forward left behind, as long as it is finite.
  BackwardInputs<T> in;
  in.x = make_inputs<T>(c);
  if (!dense)
    in.ids = make_ids(c);
  in.out = random_values<T>(length * c.q_heads * dim, 10);
  in.dout = random_values<T>(length * c.q_heads * dim, 11);
  in.lse.assign(length * c.q_heads, 8.f);
  in.proxy_lse.assign(length * c.proxy_heads, 8.f);
  in.dkl.assign(length * c.proxy_heads, 1e-4f);
  const BackwardRun<T> call(c, in);
  const DeviceArray<char> memory(static_cast<int64_t>(call.workspace_size()));
  const double ms = median_ms(5, [&] { call.enqueue({memory.data(), memory.bytes()}, nullptr); });
  double pairs = 0; // (token, key)
  for (int64_t t = 0; t < length; ++t)
    pairs +=
        static_cast<double>(dense ? t + 1 : std::min<int64_t>(t + 1, int64_t{top_k} * block_size));
  std::printf("%s %6lld tokens, heads %d/%d/%d/%d, D %d, B %d, K %d, proxy %d, deterministic %d: "
              "%.3f ms, main %.0f TFLOP/s, workspace %.0f MiB\n",
              dense    ? "dense "
              : hopper ? "hopper"
                       : "sparse",
              static_cast<long long>(length), heads.q, heads.kv, heads.proxy, heads.proxy_kv, dim,
              block_size, top_k, proxy, deterministic, ms, 10 * pairs * heads.q * dim / ms * 1e-9,
              static_cast<double>(memory.bytes()) / 1048576);
  std::fflush(stdout);
}

} // namespace

// time_backward [sparse | dense | hopper]
int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  constexpr Heads kSmall = {16, 2, 4, 1}, kLarge = {64, 4, 4, 1};
  if (only.empty() || only == "sparse") {
    for (bool proxy : {false, true})
      for (bool deterministic : {false, true})
        time_case(16384, kSmall, 128, 128, 16, false, proxy, deterministic);
    time_case(65536, kSmall, 128, 128, 16, false, true, false);
    time_case(16384, kLarge, 128, 128, 16, false, true, false);
    time_case(16384, kSmall, 64, 128, 16, false, true, false);
    time_case(16384, kSmall, 256, 128, 16, false, true, false);
    time_case(16384, kSmall, 128, 64, 32, false, true, false);
  }
  if (only.empty() || only == "dense")
    for (bool proxy : {false, true})
      time_case(16384, kSmall, 128, 128, 16, true, proxy, false);
#if THRESHER_CUDA_SM90
  if ((only.empty() || only == "hopper") && cuda::device_facts().major == 9)
    for (auto [length, heads] : {std::pair{16384, kSmall}, {4096, kLarge}, {32768, kLarge}})
      for (bool proxy : {false, true})
        for (bool deterministic : {false, true})
          time_case(length, heads, 128, 128, 16, false, proxy, deterministic, true);
#endif
}
