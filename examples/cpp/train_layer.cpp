// Trains one MSA layer in plain C++: projections of a packed batch of three documents, block
// selection, sparse attention, the proxy's KL loss, and Adam on all weights. The target is what a
// second, fixed layer computes with dense attention, so the loss can fall towards zero.
#include <thresher/msa.h>

#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <random>
#include <vector>

using thresher::Tensor;

namespace {

constexpr int kModel = 32, kQueryHeads = 4, kKvHeads = 2, kProxyHeads = 2, kProxyKeyHeads = 1;
constexpr int kDim = 16, kBlock = 16, kTopK = 4, kSteps = 60;
const std::vector<int32_t> kCuSeqlens = {0, 150, 160, 384}; // documents of 150, 10 and 224 tokens
const int kTokens = kCuSeqlens.back();
const thresher::Device kCpu;

std::mt19937 rng(0);

Tensor view(std::vector<float>& values, std::initializer_list<int64_t> shape) {
  Tensor t{.data = values.data(), .rank = static_cast<int32_t>(shape.size())};
  int axis = 0;
  for (int64_t size : shape)
    t.shape[axis++] = size;
  int64_t stride = 1;
  while (axis-- > 0) {
    t.stride[axis] = stride;
    stride *= t.shape[axis];
  }
  return t;
}

// y = x W with W [kModel, width], and its gradient by Adam.
struct Projection {
  int heads;
  std::vector<float> weight, first, second, y, dy;

  explicit Projection(int heads_) : heads(heads_), weight(kModel * heads_ * kDim) {
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(float(kModel)));
    for (float& w : weight)
      w = normal(rng);
    first.assign(weight.size(), 0.0f);
    second.assign(weight.size(), 0.0f);
    y.assign(size_t(kTokens) * width(), 0.0f);
    dy.assign(y.size(), 0.0f);
  }
  int width() const { return heads * kDim; }
  Tensor values() { return view(y, {kTokens, heads, kDim}); }
  Tensor gradient() { return view(dy, {kTokens, heads, kDim}); }

  void forward(const std::vector<float>& x) {
    y.assign(y.size(), 0.0f);
    for (int t = 0; t < kTokens; ++t)
      for (int i = 0; i < kModel; ++i)
        for (int j = 0; j < width(); ++j)
          y[size_t(t) * width() + j] += x[t * kModel + i] * weight[i * width() + j];
  }
  void step(const std::vector<float>& x, int number, float rate) {
    std::vector<float> dw(weight.size(), 0.0f);
    for (int t = 0; t < kTokens; ++t)
      for (int i = 0; i < kModel; ++i)
        for (int j = 0; j < width(); ++j)
          dw[i * width() + j] += x[t * kModel + i] * dy[size_t(t) * width() + j];
    for (size_t i = 0; i < weight.size(); ++i) {
      first[i] = 0.9f * first[i] + 0.1f * dw[i];
      second[i] = 0.99f * second[i] + 0.01f * dw[i] * dw[i];
      const float m = first[i] / (1 - std::pow(0.9f, float(number)));
      const float v = second[i] / (1 - std::pow(0.99f, float(number)));
      weight[i] -= rate * m / (std::sqrt(v) + 1e-8f);
    }
  }
};

struct Layer {
  Projection q{kQueryHeads}, k{kKvHeads}, v{kKvHeads}, q_proxy{kProxyHeads},
      k_proxy{kProxyKeyHeads};
  std::vector<float> out = std::vector<float>(size_t(kTokens) * kQueryHeads * kDim);
  std::vector<float> lse = std::vector<float>(size_t(kTokens) * kQueryHeads);
  std::vector<float> proxy_lse = std::vector<float>(size_t(kTokens) * kProxyHeads);
  std::vector<int32_t> ids = std::vector<int32_t>(size_t(kProxyHeads) * kTokens * kTopK);

  Projection* projections[5] = {&q, &k, &v, &q_proxy, &k_proxy};

  thresher::Problem problem() const {
    return {.fragments = {.count = int64_t(kCuSeqlens.size()) - 1, .q_begin = kCuSeqlens.data()},
            .block_size = kBlock,
            .top_k_blocks = kTopK,
            .softmax_scale = 1 / std::sqrt(double(kDim)),
            .proxy_scale = 1 / std::sqrt(double(kDim))};
  }
  Tensor indices() {
    return {.data = ids.data(),
            .dtype = thresher::DType::kInt32,
            .rank = 3,
            .shape = {kProxyHeads, kTokens, kTopK},
            .stride = {int64_t(kTokens) * kTopK, kTopK, 1}};
  }
  thresher::ForwardParams forward_params() {
    return {.problem = problem(),
            .q = q.values(),
            .k = k.values(),
            .v = v.values(),
            .q_proxy = q_proxy.values(),
            .k_proxy = k_proxy.values(),
            .block_indices = indices(),
            .out = view(out, {kTokens, kQueryHeads, kDim}),
            .lse = view(lse, {kTokens, kQueryHeads}),
            .proxy_lse = view(proxy_lse, {kTokens, kProxyHeads})};
  }
  void project(const std::vector<float>& x) {
    for (Projection* p : projections)
      p->forward(x);
  }
};

// Every operation takes scratch memory whose size it tells first.
template <class Params, class Size, class Run>
void call(const Params& params, Size size, Run run) {
  const size_t bytes = size(params, kCpu);
  std::vector<std::byte> memory(bytes + 256);
  void* start =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) & ~uintptr_t(255));
  run(params, {start, bytes}, kCpu);
}

} // namespace

int main() try {
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t(kTokens) * kModel);
  for (float& value : x)
    value = normal(rng);

  Layer target;
  target.project(x);
  thresher::ForwardParams dense = target.forward_params();
  dense.block_indices = {};
  call(dense, thresher::warmup_forward_workspace_size, thresher::warmup_forward);

  Layer layer;
  std::vector<float> dout(layer.out.size()), dkl(layer.proxy_lse.size()), kl(dkl.size());
  double first_loss = 0, loss = 0;
  for (int step = 1; step <= kSteps; ++step) {
    layer.project(x);
    thresher::SelectParams select{.problem = layer.problem(),
                                  .q_proxy = layer.q_proxy.values(),
                                  .k_proxy = layer.k_proxy.values(),
                                  .block_indices = layer.indices()};
    call(select, thresher::select_blocks_workspace_size, thresher::select_blocks);
    const thresher::ForwardParams forward = layer.forward_params();
    call(forward, thresher::sparse_forward_workspace_size, thresher::sparse_forward);

    loss = 0;
    for (size_t i = 0; i < dout.size(); ++i) {
      const float difference = layer.out[i] - target.out[i];
      loss += difference * difference / dout.size();
      dout[i] = 2 * difference / dout.size();
    }
    dkl.assign(dkl.size(), 1.0f / dkl.size()); // mean of the KL rows

    const thresher::BackwardParams backward{.problem = layer.problem(),
                                            .q = forward.q,
                                            .k = forward.k,
                                            .v = forward.v,
                                            .q_proxy = forward.q_proxy,
                                            .k_proxy = forward.k_proxy,
                                            .block_indices = forward.block_indices,
                                            .out = forward.out,
                                            .lse = forward.lse,
                                            .proxy_lse = forward.proxy_lse,
                                            .dout = view(dout, {kTokens, kQueryHeads, kDim}),
                                            .dkl = view(dkl, {kTokens, kProxyHeads}),
                                            .dq = layer.q.gradient(),
                                            .dk = layer.k.gradient(),
                                            .dv = layer.v.gradient(),
                                            .dq_proxy = layer.q_proxy.gradient(),
                                            .dk_proxy = layer.k_proxy.gradient(),
                                            .kl = view(kl, {kTokens, kProxyHeads})};
    call(backward, thresher::sparse_backward_workspace_size, thresher::sparse_backward);
    for (Projection* p : layer.projections)
      p->step(x, step, 0.01f);

    double kl_mean = 0;
    for (float row : kl)
      kl_mean += row / kl.size();
    if (step == 1)
      first_loss = loss;
    if (step == 1 || step % 10 == 0)
      std::printf("step %3d  loss %.4f  kl %.4f\n", step, loss, kl_mean);
  }
  if (!(loss < 0.5 * first_loss)) {
    std::fprintf(stderr, "the loss did not fall by half: %.4f -> %.4f\n", first_loss, loss);
    return 1;
  }
  return 0;
} catch (const thresher::Error& error) {
  std::fprintf(stderr, "thresher: %s\n", error.what());
  return 1;
}
