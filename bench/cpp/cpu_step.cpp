// Times one MSA step on the CPU, phase by phase: selection, forward, backward with KL rows and
// gradient; optionally the dense warm-up. Prints one JSON object.
//
//   cpu_step [tokens=16384] [repeats=3] [dtype=fp32|fp64|bf16|fp16] [heads=8/2/2/1] [dim=64]
//            [block=128] [top_k=8] [warmup=0|1]
#include <sys/resource.h>
#include <thresher/msa.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

using thresher::DType;
using thresher::Tensor;

struct Buffer {
  std::vector<char> bytes;
  Tensor tensor;
};

size_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 || dtype == DType::kInt32 ? 4 : 2;
}

Buffer make(DType dtype, std::vector<int64_t> shape) {
  Buffer b;
  b.tensor.dtype = dtype;
  b.tensor.rank = static_cast<int32_t>(shape.size());
  int64_t count = 1;
  for (int i = b.tensor.rank - 1; i >= 0; --i) {
    b.tensor.shape[i] = shape[static_cast<size_t>(i)];
    b.tensor.stride[i] = count;
    count *= shape[static_cast<size_t>(i)];
  }
  b.bytes.resize(static_cast<size_t>(count) * size_of(dtype));
  b.tensor.data = b.bytes.data();
  return b;
}

void fill(Buffer& b, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const size_t count = b.bytes.size() / size_of(b.tensor.dtype);
  for (size_t i = 0; i < count; ++i) {
    const float x = normal(random);
    uint32_t u;
    std::memcpy(&u, &x, 4);
    switch (b.tensor.dtype) {
    case DType::kFloat32:
      reinterpret_cast<float*>(b.bytes.data())[i] = x;
      break;
    case DType::kFloat64:
      reinterpret_cast<double*>(b.bytes.data())[i] = x;
      break;
    case DType::kBFloat16:
      reinterpret_cast<uint16_t*>(b.bytes.data())[i] = static_cast<uint16_t>(u >> 16);
      break;
    case DType::kFloat16: { // truncated; numbers below the normal range become 0
      const int exponent = static_cast<int>(u >> 23 & 255) - 112;
      const uint32_t half =
          (u >> 16 & 0x8000) | (exponent <= 0 ? 0 : exponent << 10 | (u >> 13 & 1023));
      reinterpret_cast<uint16_t*>(b.bytes.data())[i] = static_cast<uint16_t>(half);
      break;
    }
    default:
      break;
    }
  }
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
double peak_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

template <class Params, class Size, class Run>
double timed(const Params& params, Size size, Run run, int repeats, double* workspace_mib) {
  double best = 1e30;
  for (int r = 0; r < repeats; ++r) {
    // Like a training step: every call gets its workspace anew.
    const double start = now();
    const size_t bytes = size(params, thresher::Device{});
    thresher::Workspace workspace{std::aligned_alloc(256, (bytes + 255) / 256 * 256), bytes};
    run(params, workspace, thresher::Device{});
    std::free(workspace.data);
    best = std::min(best, now() - start);
    *workspace_mib = static_cast<double>(bytes) / (1 << 20);
  }
  return best;
}

} // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> options{
      {"tokens", "16384"}, {"repeats", "3"}, {"dtype", "fp32"}, {"heads", "8/2/2/1"},
      {"dim", "64"},       {"block", "128"}, {"top_k", "8"},    {"warmup", "0"}};
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const size_t equals = text.find('=');
    if (equals == std::string::npos || !options.count(text.substr(0, equals))) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
    options[text.substr(0, equals)] = text.substr(equals + 1);
  }
  auto number = [&](const char* name) { return std::atoll(options[name].c_str()); };
  const int64_t T = number("tokens"), D = number("dim"), B = number("block"), K = number("top_k");
  const int repeats = static_cast<int>(number("repeats"));
  int Hq, Hkv, Hp, Hpk;
  if (std::sscanf(options["heads"].c_str(), "%d/%d/%d/%d", &Hq, &Hkv, &Hp, &Hpk) != 4)
    return 2;
  const std::map<std::string, DType> dtypes{{"fp32", DType::kFloat32},
                                            {"fp64", DType::kFloat64},
                                            {"bf16", DType::kBFloat16},
                                            {"fp16", DType::kFloat16}};
  const DType dtype = dtypes.at(options["dtype"]);
  const DType acc = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;

  std::mt19937 random(1);
  Buffer q = make(dtype, {T, Hq, D}), k = make(dtype, {T, Hkv, D}), v = make(dtype, {T, Hkv, D});
  Buffer qp = make(dtype, {T, Hp, D}), kp = make(dtype, {T, Hpk, D}),
         dout = make(dtype, {T, Hq, D});
  for (Buffer* b : {&q, &k, &v, &qp, &kp, &dout})
    fill(*b, random);
  Buffer dkl = make(acc, {T, Hp}), ids = make(DType::kInt32, {Hp, T, K});
  for (int64_t i = 0; i < T * Hp; ++i) {
    if (acc == DType::kFloat64)
      reinterpret_cast<double*>(dkl.bytes.data())[i] = 1e-3;
    else
      reinterpret_cast<float*>(dkl.bytes.data())[i] = 1e-3F;
  }
  Buffer out = make(dtype, {T, Hq, D}), lse = make(acc, {T, Hq}), plse = make(acc, {T, Hp});
  Buffer dq = make(dtype, {T, Hq, D}), dk = make(dtype, {T, Hkv, D}), dv = make(dtype, {T, Hkv, D});
  Buffer dqp = make(dtype, {T, Hp, D}), dkp = make(dtype, {T, Hpk, D}), kl = make(acc, {T, Hp});
  const double before = peak_mib();

  thresher::Problem problem;
  problem.block_size = static_cast<int32_t>(B);
  problem.top_k_blocks = static_cast<int32_t>(K);
  problem.softmax_scale = problem.proxy_scale = 1 / std::sqrt(static_cast<double>(D));

  thresher::SelectParams select{problem, qp.tensor, kp.tensor, ids.tensor};
  thresher::ForwardParams forward{problem,   q.tensor,   k.tensor,   v.tensor,   qp.tensor,
                                  kp.tensor, ids.tensor, out.tensor, lse.tensor, plse.tensor};
  thresher::BackwardParams backward{};
  backward.problem = problem;
  backward.q = q.tensor, backward.k = k.tensor, backward.v = v.tensor;
  backward.q_proxy = qp.tensor, backward.k_proxy = kp.tensor, backward.block_indices = ids.tensor;
  backward.out = out.tensor, backward.lse = lse.tensor, backward.proxy_lse = plse.tensor;
  backward.dout = dout.tensor, backward.dkl = dkl.tensor;
  backward.dq = dq.tensor, backward.dk = dk.tensor, backward.dv = dv.tensor;
  backward.dq_proxy = dqp.tensor, backward.dk_proxy = dkp.tensor, backward.kl = kl.tensor;

  // Multiply-adds that the operation needs, times two; the causal half of local blocks counts
  // whole.
  double pairs = 0; // (token, selected key) pairs of one head
  for (int64_t t = 0; t < T; ++t)
    pairs += static_cast<double>(std::min(K, t / B + 1) * B);
  const double dense_pairs = static_cast<double>(T) * static_cast<double>(T + 1) / 2;
  const double d = static_cast<double>(D);
  struct Phase {
    const char* name;
    double seconds, gflop, workspace;
  };
  std::vector<Phase> phases;
  double mib = 0;
  if (number("warmup") == 0) {
    double s = timed(select, thresher::select_blocks_workspace_size, thresher::select_blocks,
                     repeats, &mib);
    phases.push_back({"select", s, 2e-9 * dense_pairs * Hp * d, mib});
    s = timed(forward, thresher::sparse_forward_workspace_size, thresher::sparse_forward, repeats,
              &mib);
    phases.push_back({"forward", s, 2e-9 * pairs * d * (2 * Hq + Hp), mib});
    s = timed(backward, thresher::sparse_backward_workspace_size, thresher::sparse_backward,
              repeats, &mib);
    phases.push_back({"backward", s, 2e-9 * pairs * d * (5 * Hq + 3 * Hp), mib});
  } else {
    forward.block_indices = backward.block_indices = {};
    double s = timed(forward, thresher::warmup_forward_workspace_size, thresher::warmup_forward,
                     repeats, &mib);
    phases.push_back({"forward", s, 2e-9 * dense_pairs * d * (2 * Hq + Hp), mib});
    s = timed(backward, thresher::warmup_backward_workspace_size, thresher::warmup_backward,
              repeats, &mib);
    phases.push_back({"backward", s, 2e-9 * dense_pairs * d * (5 * Hq + 3 * Hp), mib});
  }
  double total = 0;
  for (const Phase& p : phases)
    total += p.seconds;
  std::printf("{\"bench\": \"cpu_step\", \"tokens\": %lld, \"dtype\": \"%s\", \"heads\": \"%s\", "
              "\"dim\": %lld, "
              "\"block\": %lld, \"top_k\": %lld, \"warmup\": %s, \"phases\": {",
              static_cast<long long>(T), options["dtype"].c_str(), options["heads"].c_str(),
              static_cast<long long>(D), static_cast<long long>(B), static_cast<long long>(K),
              number("warmup") ? "true" : "false");
  for (size_t i = 0; i < phases.size(); ++i)
    std::printf("%s\"%s\": {\"seconds\": %.4f, \"gflops\": %.1f, \"workspace_mib\": %.1f}",
                i ? ", " : "", phases[i].name, phases[i].seconds,
                phases[i].gflop / phases[i].seconds, phases[i].workspace);
  std::printf("}, \"seconds\": %.4f, \"peak_extra_mib\": %.1f}\n", total, peak_mib() - before);
  return 0;
}
