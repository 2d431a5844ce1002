// A forward case: its inputs in any layout, a run through a kernel's own interface into poisoned
// memory, and its judgement against loops over doubles.
//
// The bounds are the contract's: twice the error that plain 16-bit arithmetic (scores,
// probabilities and output rounded to the type) makes on the same problem, plus one rounding of the
// result.
#pragma once

#include "harness.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>

namespace thresher::test {

enum class Ids { kRandom, kHoles, kAll, kSame, kNone };
enum class Layout { kPacked, kHeadMajor, kBatchedHeads }; // [T,H,D]; [H,T,D + 8]; [N,H,S,D]

template <class T>
struct Inputs { // contiguous, token-major
  std::vector<T> q, k, v, q_proxy, k_proxy;
};

struct ForwardCase {
  std::string name;
  Batch batch;
  int q_heads = 4, kv_heads = 2, proxy_heads = 2, proxy_kv_heads = 1;
  int dim = 128, proxy_dim = 128, block_size = 128, top_k = 4;
  Ids ids = Ids::kRandom;
  Layout layout = Layout::kPacked;
  bool dense = false, proxy = true;
  double scale = 0, proxy_scale = 0; // 0: dim ** -0.5
  int64_t pass_bytes = 0;
  int64_t check_every = 1; // tokens that are compared

  double softmax_scale() const { return scale != 0 ? scale : 1 / std::sqrt(dim); }
  double student_scale() const { return proxy_scale != 0 ? proxy_scale : 1 / std::sqrt(proxy_dim); }
};

struct ForwardResults { // contiguous, token-major
  std::vector<double> out, lse, proxy_lse;
};

template <class F>
void parallel_for(int64_t count, F&& f) {
  std::atomic<int64_t> next = 0;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i)
    threads.emplace_back([&] {
      for (int64_t n; (n = next++) < count;)
        f(n);
    });
  for (std::thread& thread : threads)
    thread.join();
}

// --- inputs
// -----------------------------------------------------------------------------------------
template <class T>
Inputs<T> make_inputs(const ForwardCase& c) {
  const int64_t tokens = c.batch.tokens, keys = c.batch.keys;
  Inputs<T> x = {random_values<T>(tokens * c.q_heads * c.dim, 1),
                 random_values<T>(keys * c.kv_heads * c.dim, 2),
                 random_values<T>(keys * c.kv_heads * c.dim, 3),
                 random_values<T>(tokens * c.proxy_heads * c.proxy_dim, 4),
                 random_values<T>(keys * c.proxy_kv_heads * c.proxy_dim, 5)};
  // Padding must not be read.
  const T nan = from_double<T>(std::numeric_limits<double>::quiet_NaN());
  const int64_t real = c.batch.first_query(c.batch.fragments());
  std::fill(x.q.begin() + real * c.q_heads * c.dim, x.q.end(), nan);
  std::fill(x.q_proxy.begin() + real * c.proxy_heads * c.proxy_dim, x.q_proxy.end(), nan);
  if (c.batch.k_begin.empty() && !c.batch.q_begin.empty()) {
    std::fill(x.k.begin() + real * c.kv_heads * c.dim, x.k.end(), nan);
    std::fill(x.v.begin() + real * c.kv_heads * c.dim, x.v.end(), nan);
    std::fill(x.k_proxy.begin() + real * c.proxy_kv_heads * c.proxy_dim, x.k_proxy.end(), nan);
  }
  return x;
}

// [Hp, T, K]; what is not a visible block stands for a hole.
inline std::vector<int32_t> make_ids(const ForwardCase& c) {
  const auto tokens = c.batch.describe();
  std::vector<int32_t> ids(static_cast<size_t>(c.proxy_heads * c.batch.tokens * c.top_k), -1);
  std::mt19937 random(7);
  for (int head = 0; head < c.proxy_heads; ++head)
    for (int64_t t = 0; t < c.batch.tokens; ++t) {
      int32_t* row = ids.data() + (head * c.batch.tokens + t) * c.top_k;
      const Batch::Token& token = tokens[static_cast<size_t>(t)];
      if (token.fragment < 0 || c.ids == Ids::kNone) {
        if (token.fragment < 0)
          std::fill(row, row + c.top_k, 0); // padding: whatever stands there is not used
        continue;
      }
      const int visible =
          token.position < 0 ? 0 : static_cast<int>(token.position / c.block_size + 1);
      const int count = std::min(visible, c.top_k);
      std::vector<int32_t> chosen;
      if (c.ids == Ids::kSame && visible > 0) {
        chosen = {0};
      } else if (c.ids == Ids::kAll) {
        for (int i = 0; i < count; ++i)
          chosen.push_back(i);
      } else if (count > 0) { // the local block and others
        chosen.push_back(visible - 1);
        while (static_cast<int>(chosen.size()) < count) {
          const auto id = static_cast<int32_t>(random() % static_cast<unsigned>(visible));
          if (std::find(chosen.begin(), chosen.end(), id) == chosen.end())
            chosen.push_back(id);
        }
        if (c.ids == Ids::kRandom)
          std::sort(chosen.begin(), chosen.end());
      }
      std::copy(chosen.begin(), chosen.end(), row);
      if (c.ids == Ids::kHoles) { // any order, holes, later blocks, repetitions, rows without any
        for (int i = 0; i < c.top_k; ++i)
          switch (random() % 6) {
          case 0:
            row[i] = -1;
            break;
          case 1:
            row[i] = visible + static_cast<int32_t>(random() % 3);
            break;
          case 2:
            row[i] = row[random() % static_cast<unsigned>(c.top_k)];
            break;
          }
        if (random() % 20 == 0)
          std::fill(row, row + c.top_k, -1);
      }
    }
  return ids;
}

// --- layouts
// ----------------------------------------------------------------------------------------
// A tensor of token rows under a layout; dim 0: [T, H] results.
struct Placed {
  Tensor tensor;
  int64_t tokens, heads, dim, per_row;

  Placed(Layout layout, DType dtype, int64_t rows, int64_t tokens, int64_t heads, int64_t dim)
      : tokens(tokens), heads(heads), dim(dim), per_row(tokens / rows) {
    const int64_t step = std::max<int64_t>(dim, 1);
    tensor.dtype = dtype;
    int axis = 0;
    const auto add = [&](int64_t size, int64_t stride) {
      tensor.shape[axis] = size;
      tensor.stride[axis++] = stride;
    };
    if (layout == Layout::kBatchedHeads) {
      add(rows, heads * per_row * step);
      add(per_row, step);
      add(heads, per_row * step);
    } else if (layout == Layout::kHeadMajor) {
      const int64_t padded = step + (dim ? 8 : 0);
      add(tokens, padded);
      add(heads, tokens * padded);
    } else {
      add(tokens, heads * step);
      add(heads, step);
    }
    if (dim)
      add(dim, 1);
    tensor.rank = axis;
  }
  int64_t at(int64_t token, int64_t head) const {
    const int heads_axis = tensor.rank - (dim ? 2 : 1);
    const int64_t row = heads_axis == 2 ? token / per_row : 0;
    return row * (heads_axis == 2 ? tensor.stride[0] : 0) +
           (token - row * per_row) * tensor.stride[heads_axis - 1] +
           head * tensor.stride[heads_axis];
  }
  // Contiguous [T, H, D] -> memory, NaN between.
  template <class T>
  std::vector<T> scatter(const std::vector<T>& values) const {
    std::vector<T> memory(static_cast<size_t>(extent()),
                          from_double<T>(std::numeric_limits<double>::quiet_NaN()));
    for_each([&](int64_t from, int64_t to) { memory[to] = values[from]; });
    return memory;
  }
  template <class T>
  std::vector<double> gather(const std::vector<T>& memory) const {
    std::vector<double> values(static_cast<size_t>(tokens * heads * span()));
    for_each([&](int64_t to, int64_t from) { values[to] = to_double(memory[from]); });
    return values;
  }
  int64_t extent() const {
    int64_t last = 0;
    for (int axis = 0; axis < tensor.rank; ++axis)
      last += (tensor.shape[axis] - 1) * tensor.stride[axis];
    return last + 1;
  }

 private:
  int64_t span() const { return std::max<int64_t>(dim, 1); }
  template <class F>
  void for_each(F&& f) const {
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < span(); ++d)
          f((t * heads + h) * span() + d, at(t, h) + d);
  }
};

// --- a run
// ------------------------------------------------------------------------------------------
// Everything a call needs, on the device.
template <class T>
class ForwardRun {
 public:
  ForwardParams params;
  Shapes shapes;

  ForwardRun(const ForwardCase& c, const Inputs<T>& x, const std::vector<int32_t>& ids)
      : batch_(c.batch), q_(place(c, c.batch.tokens, c.q_heads, c.dim)),
        k_(place(c, c.batch.keys, c.kv_heads, c.dim)), v_(k_),
        q_proxy_(place(c, c.batch.tokens, c.proxy_heads, c.proxy_dim)),
        k_proxy_(place(c, c.batch.keys, c.proxy_kv_heads, c.proxy_dim)), out_(q_),
        lse_(place(c, c.batch.tokens, c.q_heads, 0)),
        proxy_lse_(place(c, c.batch.tokens, c.proxy_heads, 0)), device_q_(q_.scatter(x.q)),
        device_k_(k_.scatter(x.k)), device_v_(v_.scatter(x.v)),
        device_q_proxy_(q_proxy_.scatter(x.q_proxy)), device_k_proxy_(k_proxy_.scatter(x.k_proxy)),
        device_ids_(in_rows(c, ids)), device_out_(out_.extent()), device_lse_(lse_.extent()),
        device_proxy_lse_(proxy_lse_.extent()) {
    batch_.describe(params.problem, shapes);
    shapes.q_heads = c.q_heads;
    shapes.kv_heads = c.kv_heads;
    shapes.proxy_heads = c.proxy_heads;
    shapes.proxy_kv_heads = c.proxy ? c.proxy_kv_heads : 0;
    shapes.dim = c.dim;
    shapes.proxy_dim = c.proxy ? c.proxy_dim : 0;
    shapes.block_size = params.problem.block_size = c.block_size;
    shapes.top_k = params.problem.top_k_blocks = c.top_k;
    shapes.dtype = dtype_of<T>();
    params.problem.softmax_scale = c.softmax_scale();
    params.problem.proxy_scale = c.student_scale();
    const auto with = [](Placed& placed, auto& array) {
      placed.tensor.data = array.data();
      return placed.tensor;
    };
    params.q = with(q_, device_q_);
    params.k = with(k_, device_k_);
    params.v = with(v_, device_v_);
    params.out = with(out_, device_out_);
    params.lse = with(lse_, device_lse_);
    if (c.proxy) {
      params.q_proxy = with(q_proxy_, device_q_proxy_);
      params.k_proxy = with(k_proxy_, device_k_proxy_);
      params.proxy_lse = with(proxy_lse_, device_proxy_lse_);
    }
    if (!c.dense) {
      Tensor& tensor = params.block_indices;
      tensor.data = device_ids_.data();
      tensor.dtype = DType::kInt32;
      const bool batched = c.layout == Layout::kBatchedHeads;
      const int64_t rows = batched ? c.batch.rows : 1, per_row = c.batch.tokens / rows;
      const int64_t sizes[4] = {rows, c.proxy_heads, per_row, c.top_k};
      tensor.rank = batched ? 4 : 3;
      int64_t stride = 1;
      for (int axis = tensor.rank - 1; axis >= 0; --axis) {
        tensor.shape[axis] = sizes[axis + 4 - tensor.rank];
        tensor.stride[axis] = stride;
        stride *= tensor.shape[axis];
      }
    }
  }

  void poison() {
    device_out_.poison();
    device_lse_.poison();
    device_proxy_lse_.poison();
  }
  ForwardResults results(const ForwardCase& c) {
    CUDA_CHECK(cudaDeviceSynchronize());
    EXPECT_TRUE(device_out_.guards_intact() && device_lse_.guards_intact() &&
                device_proxy_lse_.guards_intact());
    ForwardResults r;
    r.out = out_.gather(device_out_.download());
    r.lse = lse_.gather(device_lse_.download());
    if (c.proxy)
      r.proxy_lse = proxy_lse_.gather(device_proxy_lse_.download());
    return r;
  }

 private:
  static Placed place(const ForwardCase& c, int64_t tokens, int64_t heads, int64_t dim) {
    return Placed(c.layout, dim ? dtype_of<T>() : DType::kFloat32, c.batch.rows, tokens, heads,
                  dim);
  }
  // [Hp, T, K] -> [N, Hp, S, K].
  static std::vector<int32_t> in_rows(const ForwardCase& c, const std::vector<int32_t>& ids) {
    if (c.layout != Layout::kBatchedHeads || ids.empty())
      return ids;
    std::vector<int32_t> result;
    const int64_t per_row = c.batch.tokens / c.batch.rows * c.top_k;
    for (int64_t row = 0; row < c.batch.rows; ++row)
      for (int head = 0; head < c.proxy_heads; ++head) {
        const auto from = ids.begin() + head * c.batch.tokens * c.top_k + row * per_row;
        result.insert(result.end(), from, from + per_row);
      }
    return result;
  }

  DeviceBatch batch_;
  Placed q_, k_, v_, q_proxy_, k_proxy_, out_, lse_, proxy_lse_;
  DeviceArray<T> device_q_, device_k_, device_v_, device_q_proxy_, device_k_proxy_;
  DeviceArray<int32_t> device_ids_;
  DeviceArray<T> device_out_;
  DeviceArray<float> device_lse_, device_proxy_lse_;
};

// --- judgement
// --------------------------------------------------------------------------------------
// Rows of a result, the reference's, and those of plain arithmetic in the type.
class Judge {
 public:
  Judge(const char* what, int64_t rows, int64_t width)
      : what_(what), width_(width), got_(rows * width), reference_(rows * width),
        plain_(rows * width) {}
  double* got(int64_t row) { return got_.data() + row * width_; }
  double* reference(int64_t row) { return reference_.data() + row * width_; }
  double* plain(int64_t row) { return plain_.data() + row * width_; }

  // unit: what one rounding of the result may add. Rows whose reference is not finite must
  // not be finite either; -inf must be met.
  void expect_close(double unit) const {
    const int64_t rows = static_cast<int64_t>(got_.size()) / width_;
    std::vector<double> norm(rows), error(rows), plain_error(rows), sizes;
    double total = 0, total_error = 0, total_plain = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const bool infinite = width_ == 1 && reference_[row] == -INFINITY;
      if (infinite) {
        ASSERT_EQ(got_[row], -INFINITY) << what_ << " row " << row;
      }
      bool finite = true, got_finite = true;
      for (int64_t i = row * width_; i < (row + 1) * width_; ++i) {
        finite &= std::isfinite(reference_[i]);
        got_finite &= std::isfinite(got_[i]);
      }
      ASSERT_TRUE(finite || !got_finite) << what_ << " row " << row << " must not be finite";
      for (int64_t i = row * width_; finite && i < (row + 1) * width_; ++i) {
        ASSERT_TRUE(std::isfinite(got_[i])) << what_ << " row " << row << " column " << i % width_;
        norm[row] += reference_[i] * reference_[i];
        error[row] += (got_[i] - reference_[i]) * (got_[i] - reference_[i]);
        plain_error[row] += (plain_[i] - reference_[i]) * (plain_[i] - reference_[i]);
      }
      total += norm[row];
      total_error += error[row];
      total_plain += plain_error[row];
      if (norm[row] > 0) {
        sizes.push_back(std::sqrt(norm[row]));
      } else if (finite) {
        ASSERT_EQ(error[row], 0) << what_ << " row " << row << " must be 0";
      }
    }
    if (sizes.empty())
      return;
    std::nth_element(sizes.begin(), sizes.begin() + sizes.size() / 2, sizes.end());
    const double middle = sizes[sizes.size() / 2];
    double worst = 0, worst_plain = 0;
    int64_t worst_row = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const double size = std::max(std::sqrt(norm[row]), middle);
      worst_plain = std::max(worst_plain, std::sqrt(plain_error[row]) / size);
      if (std::sqrt(error[row]) / size > worst) {
        worst = std::sqrt(error[row]) / size;
        worst_row = row;
      }
    }
    EXPECT_LE(std::sqrt(total_error / total), 2 * std::sqrt(total_plain / total) + unit) << what_;
    EXPECT_LE(worst, 2 * worst_plain + unit) << what_ << " row " << worst_row;
  }

 private:
  const char* what_;
  int64_t width_;
  std::vector<double> got_, reference_, plain_;
};

template <class T>
double rounded(double x) {
  return to_double(from_double<T>(x));
}

// One row: softmax over `keys` (rows of k and v), into out [dim] (none: values null) and lse; once
// in double, once as plain arithmetic in T.
template <class T, bool kPlain>
void reference_row(const T* q, const T* k, const T* v, const std::vector<int64_t>& keys,
                   int64_t heads, int64_t head, int dim, double scale, double* out, double* lse) {
  std::vector<double> s(keys.size());
  double top = -INFINITY, sum = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const T* key = k + (keys[i] * heads + head) * dim;
    double dot = 0;
    for (int d = 0; d < dim; ++d)
      dot += to_double(q[d]) * to_double(key[d]);
    s[i] = kPlain ? rounded<T>(rounded<T>(dot) * scale) : dot * scale;
    top = std::isnan(s[i]) || std::isnan(top) ? NAN : std::max(top, s[i]);
  }
  for (double x : s)
    sum += std::exp(x - top);
  *lse = keys.empty() ? -INFINITY : top + std::log(sum);
  if (!v)
    return;
  std::fill(out, out + dim, 0.0);
  for (size_t i = 0; i < keys.size(); ++i) {
    double p = std::exp(s[i] - top) / sum;
    if (kPlain)
      p = rounded<T>(p);
    const T* value = v + (keys[i] * heads + head) * dim;
    for (int d = 0; d < dim; ++d)
      out[d] += p * to_double(value[d]);
  }
  if (kPlain)
    for (int d = 0; d < dim; ++d)
      out[d] = rounded<T>(out[d]);
}

// Keys that (token t, proxy head p) reads.
inline std::vector<int64_t> keys_of(const ForwardCase& c, const std::vector<int32_t>& ids,
                                    const Batch::Token& token, int64_t t, int p) {
  std::vector<int64_t> keys;
  if (c.dense) {
    for (int64_t j = 0; j <= token.position; ++j)
      keys.push_back(token.first_key + j);
  } else if (token.fragment >= 0) {
    const int32_t* row = ids.data() + (p * c.batch.tokens + t) * c.top_k;
    for (int i = 0; i < c.top_k; ++i)
      if (row[i] >= 0 && std::find(row, row + i, row[i]) == row + i)
        for (int64_t j = int64_t{row[i]} * c.block_size;
             j < std::min<int64_t>((row[i] + 1) * int64_t{c.block_size}, token.position + 1); ++j)
          keys.push_back(token.first_key + j);
  }
  return keys;
}

template <class T>
void expect_right(const ForwardCase& c, const Inputs<T>& x, const std::vector<int32_t>& ids,
                  const ForwardResults& got) {
  const auto tokens = c.batch.describe();
  const int64_t count = (c.batch.tokens + c.check_every - 1) / c.check_every;
  Judge out("out", count * c.q_heads, c.dim), lse("lse", count * c.q_heads, 1),
      proxy_lse("proxy_lse", c.proxy ? count * c.proxy_heads : 0, 1);
  const int group = c.q_heads / c.proxy_heads;
  parallel_for(count * c.proxy_heads, [&](int64_t n) {
    const int64_t index = n / c.proxy_heads, t = index * c.check_every;
    const int p = static_cast<int>(n % c.proxy_heads);
    const Batch::Token& token = tokens[static_cast<size_t>(t)];
    const std::vector<int64_t> keys = keys_of(c, ids, token, t, p);
    for (int h = p * group; h < (p + 1) * group; ++h) {
      const int64_t row = index * c.q_heads + h, from = t * c.q_heads + h;
      const T* q = x.q.data() + from * c.dim;
      const int kv = h / (c.q_heads / c.kv_heads);
      reference_row<T, false>(q, x.k.data(), x.v.data(), keys, c.kv_heads, kv, c.dim,
                              c.softmax_scale(), out.reference(row), lse.reference(row));
      reference_row<T, true>(q, x.k.data(), x.v.data(), keys, c.kv_heads, kv, c.dim,
                             c.softmax_scale(), out.plain(row), lse.plain(row));
      std::copy_n(got.out.data() + from * c.dim, c.dim, out.got(row));
      *lse.got(row) = got.lse[static_cast<size_t>(from)];
    }
    if (c.proxy) {
      const int64_t row = index * c.proxy_heads + p, from = t * c.proxy_heads + p;
      const T* q = x.q_proxy.data() + from * c.proxy_dim;
      const int kv = p / (c.proxy_heads / c.proxy_kv_heads);
      reference_row<T, false>(q, x.k_proxy.data(), nullptr, keys, c.proxy_kv_heads, kv, c.proxy_dim,
                              c.student_scale(), nullptr, proxy_lse.reference(row));
      reference_row<T, true>(q, x.k_proxy.data(), nullptr, keys, c.proxy_kv_heads, kv, c.proxy_dim,
                             c.student_scale(), nullptr, proxy_lse.plain(row));
      *proxy_lse.got(row) = got.proxy_lse[static_cast<size_t>(from)];
    }
  });
  constexpr double kResultUnit = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8; // eps / 2
  constexpr double kFloatUnit = 2e-5;
  out.expect_close(kResultUnit);
  lse.expect_close(kFloatUnit);
  proxy_lse.expect_close(kFloatUnit);
}

} // namespace thresher::test
