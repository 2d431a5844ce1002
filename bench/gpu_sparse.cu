// Forward and backward kernels alone: checked against a naive double-precision kernel, then timed.
//   gpu_sparse sm90|portable check | time TOKENS [64|16]   prints JSON lines
// TFLOP/s count the main attention's five products of the selected pairs only.
#include "cuda/common/launch.h"
#include "cuda/kernel.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using namespace thresher;
using bf16 = __nv_bfloat16;

#define CHECK(call)                                                                                \
  do {                                                                                             \
    cudaError_t status_ = (call);                                                                  \
    if (status_ != cudaSuccess) {                                                                  \
      std::printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(status_));                  \
      std::exit(1);                                                                                \
    }                                                                                              \
  } while (0)

namespace {

struct Case {
  int tokens, q_heads, kv_heads, proxy_heads, proxy_kv_heads, top_k;
  std::vector<int> docs; // cu_seqlens; empty: one document
  bool proxy = true;
};

template <class T>
T* device(size_t count) {
  T* p;
  CHECK(cudaMalloc(&p, std::max<size_t>(count, 1) * sizeof(T)));
  CHECK(cudaMemset(p, 0xff, count * sizeof(T))); // NaN, or -1
  return p;
}

__global__ void fill(bf16* p, size_t n, uint32_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n;
       i += size_t(gridDim.x) * blockDim.x) {
    uint64_t x = (i + seed * 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
    x ^= x >> 29;
    x *= 0x94D049BB133111EBull;
    x ^= x >> 32;
    const float u = (uint32_t(x) + 1.f) * 2.3283064e-10f, v = uint32_t(x >> 32) * 2.3283064e-10f;
    p[i] = __float2bfloat16(scale * sqrtf(-2.f * logf(fminf(u, 1.f))) * cospif(2.f * v));
  }
}

// One block a (token, proxy head). Everything in double from the bf16 inputs.
struct Naive {
  const bf16 *q, *k, *v, *qp, *kp, *dout;
  const int *ids, *doc_begin; // doc_begin[token]
  int T, Hq, Hkv, Hp, Hpk, K;
  double *out, *lse, *plse, *kl, *dq, *dk, *dv, *dqp, *dkp;
  const float* dkl;
};
__global__ void naive(Naive n) {
  extern __shared__ double mem[];
  const int t = blockIdx.x, p = blockIdx.y, G = n.Hq / n.Hp, begin = n.doc_begin[t], D = 128;
  double *teacher = mem, *prob = mem + n.K * 128, *ds = prob + n.K * 128;
  __shared__ double red[256];
  const int count = n.K * 128;
  auto reduce = [&](double x, bool maximum) {
    red[threadIdx.x] = x;
    __syncthreads();
    for (int s = 128; s > 0; s >>= 1) {
      if (threadIdx.x < s)
        red[threadIdx.x] = maximum ? fmax(red[threadIdx.x], red[threadIdx.x + s])
                                   : red[threadIdx.x] + red[threadIdx.x + s];
      __syncthreads();
    }
    x = red[0];
    __syncthreads();
    return x;
  };
  auto key_of = [&](int i) {
    const int id = n.ids[(size_t(p) * n.T + t) * n.K + i / 128];
    const int pos = id * 128 + i % 128;
    return id >= 0 && pos <= t - begin ? begin + pos : -1;
  };
  const double scale = 1 / sqrt(128.0);
  for (int i = threadIdx.x; i < count; i += 256)
    teacher[i] = 0;
  for (int g = 0; g < G; ++g) {
    const int h = p * G + g, kv = h / (n.Hq / n.Hkv);
    double top = -INFINITY;
    for (int i = threadIdx.x; i < count; i += 256) {
      const int key = key_of(i);
      double s = -INFINITY;
      if (key >= 0) {
        s = 0;
        for (int d = 0; d < D; ++d)
          s += double(__bfloat162float(n.q[(size_t(t) * n.Hq + h) * D + d])) *
               __bfloat162float(n.k[(size_t(key) * n.Hkv + kv) * D + d]);
        s *= scale;
      }
      prob[i] = s;
      top = fmax(top, s);
    }
    top = reduce(top, true);
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += 256)
      sum += exp(prob[i] - top);
    sum = reduce(sum, false);
    double delta = 0;
    for (int i = threadIdx.x; i < count; i += 256) {
      const int key = key_of(i);
      prob[i] = exp(prob[i] - top) / sum;
      teacher[i] += prob[i] / G;
      double dp = 0;
      if (key >= 0)
        for (int d = 0; d < D; ++d)
          dp += double(__bfloat162float(n.dout[(size_t(t) * n.Hq + h) * D + d])) *
                __bfloat162float(n.v[(size_t(key) * n.Hkv + kv) * D + d]);
      ds[i] = dp;
      delta += prob[i] * dp;
    }
    delta = reduce(delta, false);
    for (int i = threadIdx.x; i < count; i += 256)
      ds[i] = prob[i] * (ds[i] - delta);
    __syncthreads();
    if (threadIdx.x == 0)
      n.lse[size_t(t) * n.Hq + h] = top + log(sum);
    if (threadIdx.x < D) {
      const int d = threadIdx.x;
      double o = 0, dq = 0;
      for (int i = 0; i < count; ++i) {
        const int key = key_of(i);
        if (key < 0)
          continue;
        const size_t at = (size_t(key) * n.Hkv + kv) * D + d, row = (size_t(t) * n.Hq + h) * D + d;
        o += prob[i] * __bfloat162float(n.v[at]);
        dq += ds[i] * __bfloat162float(n.k[at]) * scale;
        atomicAdd(n.dk + at, ds[i] * __bfloat162float(n.q[row]) * scale);
        atomicAdd(n.dv + at, prob[i] * __bfloat162float(n.dout[row]));
      }
      n.out[(size_t(t) * n.Hq + h) * D + d] = o;
      n.dq[(size_t(t) * n.Hq + h) * D + d] = dq;
    }
    __syncthreads();
  }
  // Proxy.
  const int ph = p / (n.Hp / n.Hpk);
  double top = -INFINITY;
  for (int i = threadIdx.x; i < count; i += 256) {
    const int key = key_of(i);
    double s = -INFINITY;
    if (key >= 0) {
      s = 0;
      for (int d = 0; d < D; ++d)
        s += double(__bfloat162float(n.qp[(size_t(t) * n.Hp + p) * D + d])) *
             __bfloat162float(n.kp[(size_t(key) * n.Hpk + ph) * D + d]);
      s *= scale;
    }
    prob[i] = s;
    top = fmax(top, s);
  }
  top = reduce(top, true);
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += 256)
    sum += exp(prob[i] - top);
  sum = reduce(sum, false);
  const double lse = top + log(sum);
  double kl = 0;
  for (int i = threadIdx.x; i < count; i += 256) {
    if (teacher[i] > 0)
      kl += teacher[i] * (log(teacher[i]) - (prob[i] - lse));
    ds[i] = key_of(i) >= 0 ? n.dkl[size_t(t) * n.Hp + p] * (exp(prob[i] - lse) - teacher[i]) : 0;
  }
  kl = reduce(kl, false);
  if (threadIdx.x == 0)
    n.plse[size_t(t) * n.Hp + p] = lse, n.kl[size_t(t) * n.Hp + p] = kl;
  if (threadIdx.x < D) {
    const int d = threadIdx.x;
    double dq = 0;
    for (int i = 0; i < count; ++i) {
      const int key = key_of(i);
      if (key < 0)
        continue;
      const size_t at = (size_t(key) * n.Hpk + ph) * D + d;
      dq += ds[i] * __bfloat162float(n.kp[at]) * scale;
      atomicAdd(n.dkp + at, ds[i] * __bfloat162float(n.qp[(size_t(t) * n.Hp + p) * D + d]) * scale);
    }
    n.dqp[(size_t(t) * n.Hp + p) * D + d] = dq;
  }
}

Tensor tensor(void* data, DType dtype, std::vector<int64_t> shape) {
  Tensor t;
  t.data = data;
  t.dtype = dtype;
  t.rank = int(shape.size());
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i)
    t.shape[i] = shape[i], t.stride[i] = stride, stride *= shape[i];
  return t;
}

template <class T>
double error(const char* name, const T* got, const double* want, size_t n) {
  std::vector<T> a(n);
  std::vector<double> b(n);
  CHECK(cudaMemcpy(a.data(), got, n * sizeof(T), cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(b.data(), want, n * 8, cudaMemcpyDeviceToHost));
  double e = 0, r = 0;
  for (size_t i = 0; i < n; ++i) {
    const double d = double(float(a[i])) - b[i];
    e += d * d;
    r += b[i] * b[i];
  }
  const double result = std::sqrt(e / (r + 1e-300));
  std::printf(" %s %.5f%s", name, result, result < 0.01 ? "" : " <-- WRONG");
  return result;
}

struct Implementation {
  const char* name;
  const cuda::Kernel<ForwardParams>* forward;
  const cuda::Kernel<BackwardParams>* backward;
  const cuda::Kernel<KlParams>* kl;
};
const Implementation kSm90 = {"sm90", &cuda::sm90::sparse_forward, &cuda::sm90::sparse_backward,
                              &cuda::sm90::proxy_kl};
const Implementation kPortable = {"portable", &cuda::portable::sparse_forward,
                                  &cuda::portable::sparse_backward, &cuda::portable::proxy_kl};
// The warm-up as a sparse call of which all blocks are selected: only for checks.
const Implementation kWarmup = {"warmup", &cuda::portable::warmup_forward,
                                &cuda::portable::warmup_backward, &cuda::portable::proxy_kl};

struct World {
  Case c;
  Implementation by;
  std::vector<int> cu;
  BackwardParams params;
  ForwardParams forward;
  KlParams kl_only;
  Shapes shapes;
  void* workspace = nullptr;
  size_t bytes = 0, forward_bytes = 0, pairs = 0;
  bf16 *q, *k, *v, *qp, *kp, *dout, *out;
  float *lse, *plse, *dkl, *kl;
  int *ids, *cu_device, *doc_begin;
  bf16 *dq, *dk, *dv, *dqp, *dkp;

  World(const Case& case_, const Implementation& by_) : c(case_), by(by_) {
    const int T = c.tokens, D = 128;
    cu = c.docs.empty() ? std::vector<int>{0, T} : c.docs;
    auto rows = [&](int h) { return size_t(T) * h * D; };
    q = device<bf16>(rows(c.q_heads)), dout = device<bf16>(rows(c.q_heads)),
    out = device<bf16>(rows(c.q_heads));
    k = device<bf16>(rows(c.kv_heads)), v = device<bf16>(rows(c.kv_heads));
    qp = device<bf16>(rows(c.proxy_heads)), kp = device<bf16>(rows(c.proxy_kv_heads));
    dq = device<bf16>(rows(c.q_heads)), dk = device<bf16>(rows(c.kv_heads)),
    dv = device<bf16>(rows(c.kv_heads));
    dqp = device<bf16>(rows(c.proxy_heads)), dkp = device<bf16>(rows(c.proxy_kv_heads));
    lse = device<float>(size_t(T) * c.q_heads), plse = device<float>(size_t(T) * c.proxy_heads);
    dkl = device<float>(size_t(T) * c.proxy_heads), kl = device<float>(size_t(T) * c.proxy_heads);
    fill<<<1024, 256>>>(q, rows(c.q_heads), 1, 1), fill<<<1024, 256>>>(dout, rows(c.q_heads), 2, 1);
    fill<<<1024, 256>>>(k, rows(c.kv_heads), 3, 1), fill<<<1024, 256>>>(v, rows(c.kv_heads), 4, 1);
    fill<<<1024, 256>>>(qp, rows(c.proxy_heads), 5, 1),
        fill<<<1024, 256>>>(kp, rows(c.proxy_kv_heads), 6, 1);
    fill<<<1024, 256>>>(out, rows(c.q_heads), 7, 0.02f);
    std::vector<int> sel(size_t(c.proxy_heads) * T * c.top_k, -1), begin(T, 0);
    std::mt19937 rng(1);
    for (size_t doc = 0; doc + 1 < cu.size(); ++doc)
      for (int t = cu[doc]; t < cu[doc + 1]; ++t) {
        begin[t] = cu[doc];
        const int blocks = (t - cu[doc]) / 128 + 1;
        for (int p = 0; p < c.proxy_heads; ++p) {
          int* row = &sel[(size_t(p) * T + t) * c.top_k];
          int n = 0;
          if (blocks <= c.top_k) {
            for (; n < blocks; ++n)
              row[n] = n;
          } else {
            row[n++] = blocks - 1;
            while (n < c.top_k) {
              const int b = rng() % (blocks - 1);
              if (std::find(row, row + n, b) == row + n)
                row[n++] = b;
            }
            std::sort(row, row + n);
          }
          pairs += n;
        }
      }
    ids = device<int>(sel.size()), cu_device = device<int>(cu.size()), doc_begin = device<int>(T);
    CHECK(cudaMemcpy(ids, sel.data(), sel.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(cu_device, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(doc_begin, begin.data(), T * 4, cudaMemcpyHostToDevice));
    std::vector<float> g(size_t(T) * c.proxy_heads);
    for (float& x : g)
      x = 0.5f + (rng() % 1000) / 1000.f;
    CHECK(cudaMemcpy(dkl, g.data(), g.size() * 4, cudaMemcpyHostToDevice));
    std::vector<float> l(size_t(T) * c.q_heads, std::log(2048.f) + 0.5f),
        pl(size_t(T) * c.proxy_heads, std::log(2048.f) + 0.5f);
    CHECK(cudaMemcpy(lse, l.data(), l.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(plse, pl.data(), pl.size() * 4, cudaMemcpyHostToDevice));

    auto bf = DType::kBFloat16, f = DType::kFloat32;
    params.problem.fragments = {int64_t(cu.size()) - 1, cu_device, nullptr, nullptr};
    params.problem.top_k_blocks = c.top_k;
    params.problem.softmax_scale = params.problem.proxy_scale = 1 / std::sqrt(128.0);
    auto heads = [&](void* p, int h) { return tensor(p, bf, {T, h, D}); };
    params.q = heads(q, c.q_heads), params.k = heads(k, c.kv_heads),
    params.v = heads(v, c.kv_heads);
    params.out = heads(out, c.q_heads), params.dout = heads(dout, c.q_heads);
    params.lse = tensor(lse, f, {T, c.q_heads});
    params.block_indices = tensor(ids, DType::kInt32, {c.proxy_heads, T, c.top_k});
    params.dq = heads(dq, c.q_heads), params.dk = heads(dk, c.kv_heads),
    params.dv = heads(dv, c.kv_heads);
    if (c.proxy) {
      params.q_proxy = heads(qp, c.proxy_heads), params.k_proxy = heads(kp, c.proxy_kv_heads);
      params.proxy_lse = tensor(plse, f, {T, c.proxy_heads}),
      params.dkl = tensor(dkl, f, {T, c.proxy_heads});
      params.kl = tensor(kl, f, {T, c.proxy_heads});
      params.dq_proxy = heads(dqp, c.proxy_heads), params.dk_proxy = heads(dkp, c.proxy_kv_heads);
    }
    shapes.tokens = shapes.keys = shapes.tokens_per_row = shapes.keys_per_row = T;
    shapes.q_heads = c.q_heads, shapes.kv_heads = c.kv_heads, shapes.proxy_heads = c.proxy_heads;
    shapes.proxy_kv_heads = c.proxy_kv_heads, shapes.dim = shapes.proxy_dim = D;
    shapes.block_size = 128, shapes.top_k = c.top_k, shapes.dtype = bf;
    forward.problem = params.problem;
    forward.q = params.q, forward.k = params.k, forward.v = params.v;
    forward.block_indices = params.block_indices;
    forward.out = params.out, forward.lse = params.lse;
    if (c.proxy)
      forward.q_proxy = params.q_proxy, forward.k_proxy = params.k_proxy,
      forward.proxy_lse = params.proxy_lse;
    if (by.forward == kWarmup.forward)
      params.block_indices = forward.block_indices = {};
    kl_only.problem = params.problem;
    kl_only.q = params.q, kl_only.k = params.k;
    kl_only.q_proxy = params.q_proxy, kl_only.k_proxy = params.k_proxy;
    kl_only.block_indices = params.block_indices;
    kl_only.lse = params.lse, kl_only.proxy_lse = params.proxy_lse, kl_only.kl = params.kl;
    forward_bytes = by.forward->workspace_size(forward, shapes);
    bytes = std::max(forward_bytes, by.backward->workspace_size(params, shapes));
    if (takes_kl())
      bytes = std::max(bytes, by.kl->workspace_size(kl_only, shapes));
    workspace = device<char>(bytes);
  }
  void run() { by.backward->run(params, shapes, {workspace, bytes}, nullptr); }
  void run_forward() { by.forward->run(forward, shapes, {workspace, bytes}, nullptr); }
  bool takes_kl() const {
    return c.proxy && by.kl->refuses(kl_only, shapes, cuda::device_facts()).empty();
  }
  void run_kl() { by.kl->run(kl_only, shapes, {workspace, bytes}, nullptr); }

  void check() {
    const int T = c.tokens, D = 128;
    auto d = [&](int h, int dim) {
      double* p = device<double>(size_t(T) * h * dim);
      CHECK(cudaMemset(p, 0, size_t(T) * h * dim * 8));
      return p;
    };
    Naive n{q,
            k,
            v,
            qp,
            kp,
            dout,
            ids,
            doc_begin,
            T,
            c.q_heads,
            c.kv_heads,
            c.proxy_heads,
            c.proxy_kv_heads,
            c.top_k,
            d(c.q_heads, D),
            d(c.q_heads, 1),
            d(c.proxy_heads, 1),
            d(c.proxy_heads, 1),
            d(c.q_heads, D),
            d(c.kv_heads, D),
            d(c.kv_heads, D),
            d(c.proxy_heads, D),
            d(c.proxy_kv_heads, D),
            dkl};
    const size_t mem = size_t(3) * c.top_k * 128 * 8;
    CHECK(cudaFuncSetAttribute(naive, cudaFuncAttributeMaxDynamicSharedMemorySize, int(mem)));
    naive<<<dim3(cu.back(), c.proxy_heads), 256, mem>>>(n);
    CHECK(cudaDeviceSynchronize());
    std::printf("check %s%s T %d heads %d/%d/%d/%d K %d docs %zu:", by.name,
                params.problem.deterministic ? " deterministic" : "", T, c.q_heads, c.kv_heads,
                c.proxy_heads, c.proxy_kv_heads, c.top_k, cu.size() - 1);
    CHECK(cudaMemset(workspace, 0xff, bytes));
    run_forward();
    CHECK(cudaDeviceSynchronize());
    const size_t real = cu.back(); // padding: lse is -inf there
    error("out", out, n.out, size_t(T) * c.q_heads * D);
    error("lse", lse, n.lse, real * c.q_heads);
    if (c.proxy)
      error("proxy_lse", plse, n.plse, real * c.proxy_heads);
    std::fflush(stdout);
    CHECK(cudaMemset(workspace, 0xff, bytes));
    auto to_float = [&](float* to, double* from, size_t count) {
      std::vector<double> a(count);
      CHECK(cudaMemcpy(a.data(), from, count * 8, cudaMemcpyDeviceToHost));
      std::vector<float> b(a.begin(), a.end());
      CHECK(cudaMemcpy(to, b.data(), count * 4, cudaMemcpyHostToDevice));
    };
    to_float(lse, n.lse, size_t(T) * c.q_heads), to_float(plse, n.plse, size_t(T) * c.proxy_heads);
    std::vector<double> o(size_t(T) * c.q_heads * D);
    CHECK(cudaMemcpy(o.data(), n.out, o.size() * 8, cudaMemcpyDeviceToHost));
    std::vector<bf16> ob(o.size());
    for (size_t i = 0; i < o.size(); ++i)
      ob[i] = __float2bfloat16(float(o[i]));
    CHECK(cudaMemcpy(out, ob.data(), ob.size() * 2, cudaMemcpyHostToDevice));
    run();
    CHECK(cudaDeviceSynchronize());
    error("dq", dq, n.dq, size_t(T) * c.q_heads * D);
    error("dk", dk, n.dk, size_t(T) * c.kv_heads * D);
    error("dv", dv, n.dv, size_t(T) * c.kv_heads * D);
    if (c.proxy) {
      error("dq_proxy", dqp, n.dqp, size_t(T) * c.proxy_heads * D);
      error("dk_proxy", dkp, n.dkp, size_t(T) * c.proxy_kv_heads * D);
      error("kl", kl, n.kl, size_t(T) * c.proxy_heads);
      if (takes_kl()) {
        CHECK(cudaMemset(workspace, 0xff, bytes));
        CHECK(cudaMemset(kl, 0xff, size_t(T) * c.proxy_heads * 4));
        run_kl();
        CHECK(cudaDeviceSynchronize());
        error("kl alone", kl, n.kl, size_t(T) * c.proxy_heads);
      }
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  template <class F>
  double median_ms(F&& f) {
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    std::vector<float> ms;
    for (int i = 0; i < 8; ++i) {
      CHECK(cudaEventRecord(a));
      f();
      CHECK(cudaEventRecord(b));
      CHECK(cudaEventSynchronize(b));
      float x;
      CHECK(cudaEventElapsedTime(&x, a, b));
      if (i > 1)
        ms.push_back(x);
    }
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
  }
  void time() {
    const double flops = double(pairs) * (c.q_heads / c.proxy_heads) * 128 * 128;
    auto report = [&](const std::string& op, double ms, double products, size_t workspace_bytes) {
      std::printf("{\"op\": \"%s\", \"T\": %d, \"heads\": \"%d/%d/%d/%d\", \"proxy\": %d, \"ms\": "
                  "%.3f, \"tflops\": %.1f, "
                  "\"workspace_mib\": %.0f}\n",
                  op.c_str(), c.tokens, c.q_heads, c.kv_heads, c.proxy_heads, c.proxy_kv_heads,
                  int(c.proxy), ms, products * flops / ms / 1e9, workspace_bytes / 1048576.0);
      std::fflush(stdout);
    };
    const std::string name = by.name;
    report(name + " forward", median_ms([&] { run_forward(); }), 4, forward_bytes);
    report(name + " backward", median_ms([&] { run(); }), 10, bytes);
    if (takes_kl())
      report(name + " kl", median_ms([&] { run_kl(); }), 2, bytes);
  }
};

} // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "sm90", mode = argc > 2 ? argv[2] : "check";
  const Implementation by = which == "portable" ? kPortable : kSm90;
  try {
    if (mode == "check") {
      std::vector<Case> cases = {{300, 16, 1, 1, 1, 16, {}},
                                 {700, 64, 4, 4, 1, 4, {}},
                                 {1000, 64, 4, 4, 1, 3, {0, 5, 300, 300, 777, 990}},
                                 {1000, 16, 2, 4, 1, 3, {0, 5, 300, 300, 777, 990}},
                                 {1000, 32, 4, 4, 2, 3, {0, 129, 300, 1000}},
                                 {1000, 16, 4, 2, 1, 3, {0, 129, 300, 1000}},
                                 {1000, 64, 4, 4, 1, 3, {}, false}};
      if (which == "portable") {
        cases.push_back({1000, 12, 2, 2, 1, 3, {0, 129, 300, 1000}});
        cases.push_back({1000, 12, 2, 3, 1, 3, {0, 129, 300, 1000}});
        cases.push_back({1000, 4, 4, 4, 4, 3, {0, 129, 300, 1000}});
      }
      for (const Case& c : cases)
        World(c, by).check();
      if (which == "portable") {
        World deterministic(cases[3], by);
        deterministic.params.problem.deterministic = true;
        deterministic.bytes =
            by.backward->workspace_size(deterministic.params, deterministic.shapes);
        deterministic.workspace = device<char>(deterministic.bytes);
        deterministic.check();
        for (Case c : cases) {
          c.top_k = 8; // all blocks: what the naive kernel attends to
          World(c, kWarmup).check();
        }
      }
    } else {
      const int T = argc > 3 ? std::atoi(argv[3]) : 32768;
      const bool m3 = argc <= 4 || std::string(argv[4]) == "64";
      for (bool proxy : {false, true}) {
        World w(m3 ? Case{T, 64, 4, 4, 1, 16, {}, proxy} : Case{T, 16, 2, 4, 1, 16, {}, proxy}, by);
        w.time();
        CHECK(cudaFree(w.workspace));
        for (void* p : {(void*)w.q, (void*)w.dout, (void*)w.out, (void*)w.dq})
          CHECK(cudaFree(p));
      }
    }
  } catch (const Error& e) {
    std::printf("Error: %s\n", e.what());
    return 1;
  }
}
