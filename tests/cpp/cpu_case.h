// A random problem in a given dtype: its tensors with odd strides, outputs and workspaces poisoned
// with NaN, calls of the library, results as doubles for the comparison with reference.h.
#pragma once

#include <thresher/msa.h>

#include <bit>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/shapes.h"
#include "reference.h"

namespace cpu_test {

using thresher::DType;

inline DType accumulation(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

inline double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double mantissa = bits & 1023;
  double x = exponent == 0    ? std::ldexp(mantissa, -24)
             : exponent == 31 ? (mantissa != 0 ? std::nan("") : HUGE_VAL)
                              : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -x : x;
}
// Nearest, ties to even, by the definition: steps of the binade of |x|.
inline uint16_t half_bits(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (std::isnan(x))
    return 0x7e00;
  if (x >= 65520)
    return sign | 0x7c00;
  const int exponent = x < 0x1p-14 ? -14 : std::ilogb(x);
  const double steps = std::nearbyint(std::ldexp(x, 10 - exponent)); // 1024 .. 2048 if normal
  const int base = x < 0x1p-14 ? 0 : (exponent + 14) * 1024;
  return static_cast<uint16_t>(sign | (base + static_cast<int>(steps)));
}
inline uint16_t bfloat_bits(double x) {
  const float f = static_cast<float>(x);
  if (std::isnan(f))
    return 0x7fc0;
  const uint32_t u = std::bit_cast<uint32_t>(f);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline double get(const char* at, DType dtype) {
  uint16_t bits;
  float f;
  double d;
  switch (dtype) {
  case DType::kFloat64:
    std::memcpy(&d, at, 8);
    return d;
  case DType::kFloat32:
    std::memcpy(&f, at, 4);
    return static_cast<double>(f);
  case DType::kBFloat16:
    std::memcpy(&bits, at, 2);
    return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
  default:
    std::memcpy(&bits, at, 2);
    return half_value(bits);
  }
}
inline void put(char* at, DType dtype, double x) {
  const float f = static_cast<float>(x);
  uint16_t bits;
  switch (dtype) {
  case DType::kFloat64:
    std::memcpy(at, &x, 8);
    break;
  case DType::kFloat32:
    std::memcpy(at, &f, 4);
    break;
  case DType::kBFloat16:
    bits = bfloat_bits(x);
    std::memcpy(at, &bits, 2);
    break;
  default:
    bits = half_bits(x);
    std::memcpy(at, &bits, 2);
    break;
  }
}

// How tensors lie in memory.
enum class Layout { kPacked, kGaps, kHeadMajor };

// A tensor with its memory. Gaps between rows hold NaN: reading or writing them shows.
class Array {
 public:
  // dim 0: a [T, heads] tensor.
  Array(DType dtype, int64_t tokens, int64_t heads, int64_t dim, Layout layout = Layout::kPacked) {
    const int64_t d = dim ? dim : 1, gap = layout == Layout::kGaps ? 16 : 0;
    tensor_.dtype = dtype;
    tensor_.rank = dim ? 3 : 2;
    const int64_t head_stride = layout == Layout::kHeadMajor ? tokens * d : d + gap;
    const int64_t token_stride = layout == Layout::kHeadMajor ? d : heads * (d + gap) + gap;
    const int64_t shape[3] = {tokens, heads, dim}, stride[3] = {token_stride, head_stride, 1};
    std::copy_n(shape, tensor_.rank, tensor_.shape);
    std::copy_n(stride, tensor_.rank, tensor_.stride);
    count_ = tokens * heads * (d + gap) + tokens * gap + 1;
    memory_.reset(new char[static_cast<size_t>(count_) * thresher::element_size(dtype)]);
    poison();
    tensor_.data = memory_.get();
  }
  void poison() {
    for (int64_t i = 0; i < count_; ++i)
      put(memory_.get() + i * size(), tensor_.dtype, std::nan(""));
  }
  void set(const std::vector<double>& values) {
    visit([&](char* at, size_t i) { put(at, tensor_.dtype, values[i]); });
  }
  std::vector<double> values() const {
    std::vector<double> x;
    const_cast<Array*>(this)->visit([&](char* at, size_t) { x.push_back(get(at, tensor_.dtype)); });
    return x;
  }
  // True if nothing but the elements themselves was written.
  bool gaps_untouched() const {
    std::vector<bool> element(static_cast<size_t>(count_), false);
    const_cast<Array*>(this)->visit([&](char* at, size_t) {
      element[static_cast<size_t>((at - memory_.get()) / size())] = true;
    });
    for (int64_t i = 0; i < count_; ++i)
      if (!element[static_cast<size_t>(i)] &&
          !std::isnan(get(memory_.get() + i * size(), tensor_.dtype)))
        return false;
    return true;
  }
  std::vector<char> bytes() const { return {memory_.get(), memory_.get() + count_ * size()}; }
  const thresher::Tensor& tensor() const { return tensor_; }

 private:
  int64_t size() const { return static_cast<int64_t>(thresher::element_size(tensor_.dtype)); }
  template <class Visit>
  void visit(Visit&& each) {
    const int64_t dim = tensor_.rank == 3 ? tensor_.shape[2] : 1;
    size_t i = 0;
    for (int64_t t = 0; t < tensor_.shape[0]; ++t)
      for (int64_t h = 0; h < tensor_.shape[1]; ++h)
        for (int64_t d = 0; d < dim; ++d)
          each(memory_.get() + (t * tensor_.stride[0] + h * tensor_.stride[1] + d) * size(), i++);
  }

  thresher::Tensor tensor_;
  int64_t count_ = 0;
  std::unique_ptr<char[]> memory_;
};

inline void append_document(reference::Problem* p, int64_t length) {
  if (p->q_begin.empty())
    p->q_begin.push_back(0);
  p->k_begin.push_back(static_cast<int32_t>(p->Tk));
  p->k_len.push_back(static_cast<int32_t>(length));
  p->T += length;
  p->Tk += length;
  p->q_begin.push_back(static_cast<int32_t>(p->T));
}

inline void fill_random(reference::Problem* p, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  auto fill = [&](std::vector<double>& x, int64_t n) {
    x.resize(static_cast<size_t>(n));
    for (double& value : x)
      value = normal(random);
  };
  fill(p->q, p->T * p->Hq * p->D);
  fill(p->k, p->Tk * p->Hkv * p->D);
  fill(p->v, p->Tk * p->Hkv * p->D);
  fill(p->q_proxy, p->T * p->Hp * p->Dp);
  fill(p->k_proxy, p->Tk * p->Hpk * p->Dp);
  fill(p->dout, p->T * p->Hq * p->D);
  fill(p->dkl, p->T * p->Hp);
  p->scale = 1 / std::sqrt(static_cast<double>(p->D));
  p->proxy_scale = 1 / std::sqrt(static_cast<double>(p->Dp));
}

// A problem in one dtype. The reference must see the rounded inputs, so the constructor rounds the
// problem's own.
struct Case {
  reference::Problem p;
  DType dtype, acc;
  thresher::Problem problem;
  Array q, k, v, q_proxy, k_proxy, dout, dkl;
  Array out, lse, proxy_lse, kl, dq, dk, dv, dq_proxy, dk_proxy;
  std::vector<int32_t> ids;

  Case(reference::Problem given, DType type, Layout layout = Layout::kPacked)
      : p(std::move(given)), dtype(type), acc(accumulation(type)), q(type, p.T, p.Hq, p.D, layout),
        k(type, p.Tk, p.Hkv, p.D, layout), v(type, p.Tk, p.Hkv, p.D, layout),
        q_proxy(type, p.T, p.Hp, p.Dp, layout), k_proxy(type, p.Tk, p.Hpk, p.Dp, layout),
        dout(type, p.T, p.Hq, p.D, layout), dkl(acc, p.T, p.Hp, 0, layout),
        out(type, p.T, p.Hq, p.D, layout), lse(acc, p.T, p.Hq, 0, layout),
        proxy_lse(acc, p.T, p.Hp, 0, layout), kl(acc, p.T, p.Hp, 0, layout),
        dq(type, p.T, p.Hq, p.D, layout), dk(type, p.Tk, p.Hkv, p.D, layout),
        dv(type, p.Tk, p.Hkv, p.D, layout), dq_proxy(type, p.T, p.Hp, p.Dp, layout),
        dk_proxy(type, p.Tk, p.Hpk, p.Dp, layout),
        ids(static_cast<size_t>(p.Hp * p.T * p.K), 0x55555555) {
    load();
    problem.fragments = {static_cast<int64_t>(p.k_len.size()), p.q_begin.data(), p.k_begin.data(),
                         p.k_len.data()};
    problem.block_size = p.B;
    problem.top_k_blocks = p.K;
    problem.init_blocks = p.init;
    problem.local_blocks = p.local;
    problem.softmax_scale = p.scale;
    problem.proxy_scale = p.proxy_scale;
  }
  Case(const Case&) = delete;

  // Writes p's inputs into the tensors and takes back what the dtype made of them.
  void load() {
    auto round = [](Array& array, std::vector<double>& x) {
      array.set(x);
      x = array.values();
    };
    round(q, p.q);
    round(k, p.k);
    round(v, p.v);
    round(q_proxy, p.q_proxy);
    round(k_proxy, p.k_proxy);
    round(dout, p.dout);
    round(dkl, p.dkl);
  }

  thresher::Tensor indices() {
    thresher::Tensor t;
    t.data = ids.data();
    t.dtype = DType::kInt32;
    t.rank = 3;
    const int64_t shape[3] = {p.Hp, p.T, p.K}, stride[3] = {p.T * p.K, p.K, 1};
    std::copy_n(shape, 3, t.shape);
    std::copy_n(stride, 3, t.stride);
    return t;
  }
  thresher::SelectParams select_params() {
    return {problem, q_proxy.tensor(), k_proxy.tensor(), indices()};
  }
  thresher::ForwardParams forward_params(bool sparse) {
    return {problem,
            q.tensor(),
            k.tensor(),
            v.tensor(),
            q_proxy.tensor(),
            k_proxy.tensor(),
            sparse ? indices() : thresher::Tensor{},
            out.tensor(),
            lse.tensor(),
            proxy_lse.tensor()};
  }
  thresher::BackwardParams backward_params(bool sparse) {
    thresher::BackwardParams b;
    b.problem = problem;
    b.q = q.tensor(), b.k = k.tensor(), b.v = v.tensor();
    b.q_proxy = q_proxy.tensor(), b.k_proxy = k_proxy.tensor();
    if (sparse)
      b.block_indices = indices();
    b.out = out.tensor(), b.lse = lse.tensor(), b.proxy_lse = proxy_lse.tensor();
    b.dout = dout.tensor(), b.dkl = dkl.tensor();
    b.dq = dq.tensor(), b.dk = dk.tensor(), b.dv = dv.tensor();
    b.dq_proxy = dq_proxy.tensor(), b.dk_proxy = dk_proxy.tensor(), b.kl = kl.tensor();
    return b;
  }
  thresher::KlParams kl_params(bool sparse) {
    return {problem,          q.tensor(),         k.tensor(),
            q_proxy.tensor(), k_proxy.tensor(),   sparse ? indices() : thresher::Tensor{},
            lse.tensor(),     proxy_lse.tensor(), kl.tensor()};
  }

  void select() {
    call(select_params(), thresher::select_blocks_workspace_size, thresher::select_blocks);
  }
  void forward(bool sparse) {
    if (sparse)
      call(forward_params(true), thresher::sparse_forward_workspace_size, thresher::sparse_forward);
    else
      call(forward_params(false), thresher::warmup_forward_workspace_size,
           thresher::warmup_forward);
  }
  void backward(bool sparse) { backward(backward_params(sparse), sparse); }
  void backward(const thresher::BackwardParams& b, bool sparse) {
    if (sparse)
      call(b, thresher::sparse_backward_workspace_size, thresher::sparse_backward);
    else
      call(b, thresher::warmup_backward_workspace_size, thresher::warmup_backward);
  }
  void proxy_kl(bool sparse) {
    call(kl_params(sparse), thresher::proxy_kl_workspace_size, thresher::proxy_kl);
  }

  // Calls with a workspace full of NaN (all bits set).
  template <class Params, class Size, class Run>
  static void call(const Params& params, Size size, Run run) {
    const size_t bytes = size(params, thresher::Device{});
    std::unique_ptr<void, decltype(&std::free)> memory(
        std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256), &std::free);
    std::memset(memory.get(), 0xff, (bytes + 255) / 256 * 256 + 256);
    run(params, thresher::Workspace{memory.get(), bytes}, thresher::Device{});
    const auto* end = static_cast<unsigned char*>(memory.get()) + bytes;
    for (size_t i = 0; i < 256 && bytes + i < (bytes + 255) / 256 * 256 + 256; ++i)
      if (end[i] != 0xff)
        throw std::runtime_error("wrote beyond its workspace");
  }
};

// Names of parametrised tests.
inline std::string name_of(std::initializer_list<std::pair<const char*, int>> parts) {
  std::string name;
  for (const auto& [label, value] : parts) {
    name += label;
    name += std::to_string(value);
  }
  return name;
}
inline std::string dtype_name(DType dtype) {
  static const char* const names[] = {"fp32", "fp64", "bf16", "fp16"};
  return names[static_cast<int>(dtype)];
}

struct Tolerance {
  double forward, backward;
};
// fp32 and fp64: what the library promises. 16-bit: rounding of the results, and in the backward of
// `out`, which delta is computed from.
inline Tolerance tolerance(DType dtype) {
  switch (dtype) {
  case DType::kFloat64:
    return {1e-10, 1e-10};
  case DType::kFloat32:
    return {2e-5, 5e-5};
  case DType::kBFloat16:
    return {0x1p-8, 0x1p-7};
  default:
    return {0x1p-11, 0x1p-10};
  }
}

} // namespace cpu_test
