// A backward case: inputs, upstream gradients and what the forward left behind, a run through a
// kernel's own interface into poisoned memory, and its judgement against loops over doubles.
//
// The reference takes out, lse and proxy_lse as the kernel is given them. Plain arithmetic rounds
// P, dS, the teacher and the results to 16 bits and nothing else; a kernel may be off by twice its
// error and one rounding of the result.
#pragma once

#include "forward_case.h"

#include "cuda/kernel.h"

#include <memory>

namespace thresher::test {

struct BackwardCase : ForwardCase {
  bool dq = true, dk = true, dv = true, dq_proxy = true, dk_proxy = true, kl = true;
  bool deterministic = false;
  bool kl_alone = false; // proxy_kl instead of a backward
  const cuda::Kernel<KlParams>* kl_kernel = &cuda::portable::proxy_kl;
  bool hopper = false; // by the kernels that need compute capability 9.0, not the portable ones
  double dkl_size = 1;

  bool main() const { return (dq || dk || dv) && !kl_alone; }
  bool student() const { return proxy && (dq_proxy || dk_proxy) && !kl_alone; }
};

template <class T>
struct BackwardInputs { // contiguous, token-major
  Inputs<T> x;
  std::vector<int32_t> ids;
  std::vector<T> out, dout;
  std::vector<float> lse, proxy_lse, dkl;
};

struct Gradients { // contiguous, token-major
  std::vector<double> dq, dk, dv, dq_proxy, dk_proxy, kl;
};

template <class T>
using Change = std::function<void(Inputs<T>&)>;
template <class T>
using ChangeUpstream = std::function<void(BackwardInputs<T>&)>;

// change: of the forward's inputs, before it runs; upstream: of dout and dkl.
template <class T>
BackwardInputs<T> make_backward_inputs(const BackwardCase& c, const Change<T>& change = nullptr,
                                       const ChangeUpstream<T>& upstream = nullptr) {
  BackwardInputs<T> in;
  in.x = make_inputs<T>(c);
  if (change)
    change(in.x);
  if (!c.dense)
    in.ids = make_ids(c);
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const int64_t tokens = c.batch.tokens, real = c.batch.first_query(c.batch.fragments());
  in.out.assign(tokens * c.q_heads * c.dim, from_double<T>(kNan));
  in.lse.assign(tokens * c.q_heads, NAN);
  in.proxy_lse.assign(tokens * c.proxy_heads, NAN);
  in.dout = random_values<T>(tokens * c.q_heads * c.dim, 11);
  in.dkl = random_values<float>(tokens * c.proxy_heads, 12, c.dkl_size);
  std::fill(in.dout.begin() + real * c.q_heads * c.dim, in.dout.end(), from_double<T>(kNan));
  std::fill(in.dkl.begin() + real * c.proxy_heads, in.dkl.end(), NAN);
  const auto described = c.batch.describe();
  const int group = c.q_heads / c.proxy_heads;
  parallel_for(real * c.proxy_heads, [&](int64_t n) {
    const int64_t t = n / c.proxy_heads;
    const int p = static_cast<int>(n % c.proxy_heads);
    const auto keys = keys_of(c, in.ids, described[static_cast<size_t>(t)], t, p);
    std::vector<double> row(c.dim);
    double lse;
    for (int h = p * group; h < (p + 1) * group; ++h) {
      const int64_t at = t * c.q_heads + h;
      reference_row<T, false>(in.x.q.data() + at * c.dim, in.x.k.data(), in.x.v.data(), keys,
                              c.kv_heads, h / (c.q_heads / c.kv_heads), c.dim, c.softmax_scale(),
                              row.data(), &lse);
      in.lse[at] = static_cast<float>(lse);
      for (int d = 0; d < c.dim; ++d)
        in.out[at * c.dim + d] = from_double<T>(row[d]);
    }
    if (c.proxy) {
      reference_row<T, false>(in.x.q_proxy.data() + n * c.proxy_dim, in.x.k_proxy.data(), nullptr,
                              keys, c.proxy_kv_heads, p / (c.proxy_heads / c.proxy_kv_heads),
                              c.proxy_dim, c.student_scale(), nullptr, &lse);
      in.proxy_lse[n] = static_cast<float>(lse);
    }
  });
  if (upstream)
    upstream(in);
  return in;
}

// --- a run
// ------------------------------------------------------------------------------------------
template <class T>
class BackwardRun {
 public:
  BackwardParams params;
  KlParams kl_params;
  Shapes shapes;

  BackwardRun(const BackwardCase& c, const BackwardInputs<T>& in)
      : dense_(c.dense), kl_alone_(c.kl_alone), hopper_(c.hopper), kl_kernel_(*c.kl_kernel),
        forward_(c, in.x, in.ids),
        q_rows_(c.layout, dtype_of<T>(), c.batch.rows, c.batch.tokens, c.q_heads, c.dim),
        k_rows_(c.layout, dtype_of<T>(), c.batch.rows, c.batch.keys, c.kv_heads, c.dim),
        q_proxy_rows_(c.layout, dtype_of<T>(), c.batch.rows, c.batch.tokens, c.proxy_heads,
                      c.proxy_dim),
        k_proxy_rows_(c.layout, dtype_of<T>(), c.batch.rows, c.batch.keys, c.proxy_kv_heads,
                      c.proxy_dim),
        per_proxy_(c.layout, DType::kFloat32, c.batch.rows, c.batch.tokens, c.proxy_heads, 0),
        per_head_(c.layout, DType::kFloat32, c.batch.rows, c.batch.tokens, c.q_heads, 0),
        dout_(q_rows_.scatter(in.dout)), dkl_(per_proxy_.scatter(in.dkl)), dq_(q_rows_.extent()),
        dk_(k_rows_.extent()), dv_(k_rows_.extent()), dq_proxy_(q_proxy_rows_.extent()),
        dk_proxy_(k_proxy_rows_.extent()), kl_(per_proxy_.extent()) {
    shapes = forward_.shapes;
    const ForwardParams& f = forward_.params;
    upload(f.out, q_rows_.scatter(in.out));
    upload(f.lse, per_head_.scatter(in.lse));
    if (c.proxy)
      upload(f.proxy_lse, per_proxy_.scatter(in.proxy_lse));
    params.problem = f.problem;
    params.problem.deterministic = c.deterministic;
    params.q = f.q;
    params.k = f.k;
    params.v = f.v;
    params.block_indices = f.block_indices;
    params.lse = f.lse;
    if (c.main()) {
      params.out = f.out;
      params.dout = with(q_rows_, dout_);
      if (c.dq)
        params.dq = with(q_rows_, dq_);
      if (c.dk)
        params.dk = with(k_rows_, dk_);
      if (c.dv)
        params.dv = with(k_rows_, dv_);
    }
    if (c.proxy && (c.student() || c.kl)) {
      params.q_proxy = f.q_proxy;
      params.k_proxy = f.k_proxy;
      params.proxy_lse = f.proxy_lse;
      if (c.kl)
        params.kl = with(per_proxy_, kl_);
      if (c.student())
        params.dkl = with(per_proxy_, dkl_);
      if (c.student() && c.dq_proxy)
        params.dq_proxy = with(q_proxy_rows_, dq_proxy_);
      if (c.student() && c.dk_proxy)
        params.dk_proxy = with(k_proxy_rows_, dk_proxy_);
    }
    kl_params = {params.problem,       params.q,   params.k,         params.q_proxy, params.k_proxy,
                 params.block_indices, params.lse, params.proxy_lse, params.kl};
  }

  // Empty: the kernel takes the case.
  std::string refuses() const { return kernel().refuses(params, shapes, cuda::device_facts()); }
  size_t workspace_size() const {
    return kl_alone_ ? kl_kernel_.workspace_size(kl_params, shapes)
                     : kernel().workspace_size(params, shapes);
  }
  void enqueue(const Workspace& workspace, cudaStream_t stream) const {
    if (kl_alone_)
      kl_kernel_.run(kl_params, shapes, workspace, stream);
    else
      kernel().run(params, shapes, workspace, stream);
  }
  void run() const {
    const DeviceArray<char> memory(static_cast<int64_t>(workspace_size()));
    enqueue({memory.data(), memory.bytes()}, nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    EXPECT_TRUE(memory.guards_intact()) << "workspace";
  }

  void poison() {
    for (auto* array : {&dq_, &dk_, &dv_, &dq_proxy_, &dk_proxy_})
      array->poison();
    kl_.poison();
  }
  // What was not asked for stays empty.
  Gradients results() const {
    return {collect(params.dq, q_rows_, dq_, "dq"),
            collect(params.dk, k_rows_, dk_, "dk"),
            collect(params.dv, k_rows_, dv_, "dv"),
            collect(params.dq_proxy, q_proxy_rows_, dq_proxy_, "dq_proxy"),
            collect(params.dk_proxy, k_proxy_rows_, dk_proxy_, "dk_proxy"),
            collect(params.kl, per_proxy_, kl_, "kl")};
  }

 private:
  const cuda::Kernel<BackwardParams>& kernel() const {
#if THRESHER_CUDA_SM90
    if (hopper_)
      return cuda::sm90::sparse_backward;
#endif
    return dense_ ? cuda::portable::warmup_backward : cuda::portable::sparse_backward;
  }
  template <class Array>
  static Tensor with(const Placed& placed, const Array& array) {
    Tensor tensor = placed.tensor;
    tensor.data = array.data();
    return tensor;
  }
  template <class U>
  static void upload(const Tensor& tensor, const std::vector<U>& values) {
    CUDA_CHECK(
        cudaMemcpy(tensor.data, values.data(), values.size() * sizeof(U), cudaMemcpyHostToDevice));
  }
  template <class U>
  static std::vector<double> collect(const Tensor& tensor, const Placed& placed,
                                     const DeviceArray<U>& array, const char* what) {
    EXPECT_TRUE(array.guards_intact()) << what;
    const std::vector<U> memory = array.download();
    // Between the rows, and in what was not asked for, nothing is written.
    std::vector<U> written(memory.size(), from_double<U>(NAN));
    if (tensor)
      written = placed.scatter(std::vector<U>(
          static_cast<size_t>(placed.tokens * placed.heads * std::max<int64_t>(placed.dim, 1)),
          from_double<U>(1)));
    for (size_t i = 0; i < memory.size(); ++i)
      if (std::isnan(to_double(written[i])) && !std::isnan(to_double(memory[i]))) {
        ADD_FAILURE() << what << " is written outside its rows";
        break;
      }
    return tensor ? placed.gather(memory) : std::vector<double>();
  }

  bool dense_, kl_alone_, hopper_;
  const cuda::Kernel<KlParams>& kl_kernel_;
  ForwardRun<T> forward_;
  Placed q_rows_, k_rows_, q_proxy_rows_, k_proxy_rows_, per_proxy_, per_head_;
  DeviceArray<T> dout_;
  DeviceArray<float> dkl_;
  DeviceArray<T> dq_, dk_, dv_, dq_proxy_, dk_proxy_;
  DeviceArray<float> kl_;
};

// --- reference
// --------------------------------------------------------------------------------------
// x with the significand of T and no bounds to its exponent.
template <class T>
double rounded_significand(double x) {
  constexpr int kBits = std::is_same_v<T, __half> ? 11 : 8;
  int exponent;
  const double significand = std::frexp(x, &exponent);
  return std::isfinite(x)
             ? std::ldexp(std::nearbyint(std::ldexp(significand, kBits)), exponent - kBits)
             : x;
}

// Of a gradient's rows: nothing adds to them, or something that is not finite does; and what fp32
// arithmetic may leave of terms that cancel (a token that sees one key has dS = 0).
struct RowFacts {
  std::vector<uint8_t> used, tainted;
  std::vector<double> slack;
  explicit RowFacts(int64_t rows) : used(rows), tainted(rows), slack(rows) {}
  void add(int64_t row, bool taint, double rounding) {
    used[row] = 1;
    slack[row] += rounding;
    if (taint)
      tainted[row] = 1;
  }
  void merge(const RowFacts& other) {
    for (size_t i = 0; i < used.size(); ++i) {
      used[i] |= other.used[i];
      tainted[i] |= other.tainted[i];
      slack[i] += other.slack[i];
    }
  }
};

struct Sums {
  Gradients exact, plain;
  RowFacts q, k, v, q_proxy, k_proxy, kl;
  // of_tokens: with the rows of tokens; otherwise those of keys alone.
  Sums(const BackwardCase& c, bool of_tokens)
      : q(of_tokens ? c.batch.tokens * c.q_heads : 0), k(c.batch.keys * c.kv_heads), v(k),
        q_proxy(of_tokens ? c.batch.tokens * c.proxy_heads : 0),
        k_proxy(c.batch.keys * c.proxy_kv_heads), kl(q_proxy) {
    for (Gradients* g : {&exact, &plain}) {
      g->dq.resize(q.used.size() * c.dim);
      g->dk.resize(k.used.size() * c.dim);
      g->dv.resize(v.used.size() * c.dim);
      g->dq_proxy.resize(q_proxy.used.size() * c.proxy_dim);
      g->dk_proxy.resize(k_proxy.used.size() * c.proxy_dim);
      g->kl.resize(q_proxy.used.size());
    }
  }
  void add_keys(const Sums& other) {
    const auto sum = [](std::vector<double>& to, const std::vector<double>& from) {
      for (size_t i = 0; i < to.size(); ++i)
        to[i] += from[i];
    };
    for (auto [to, from] : {std::pair{&exact, &other.exact}, std::pair{&plain, &other.plain}}) {
      sum(to->dk, from->dk);
      sum(to->dv, from->dv);
      sum(to->dk_proxy, from->dk_proxy);
    }
    k.merge(other.k);
    v.merge(other.v);
    k_proxy.merge(other.k_proxy);
  }
};

inline double dot(const double* a, const double* b, int dim) {
  double sum = 0;
  for (int d = 0; d < dim; ++d)
    sum += a[d] * b[d];
  return sum;
}
inline double norm(const double* a, int dim) {
  return std::sqrt(dot(a, a, dim));
}
inline void add_scaled(double* to, double factor, const double* x, int dim) {
  for (int d = 0; d < dim; ++d)
    to[d] += factor * x[d];
}

// The whole reference. Every formula is section 4 to 6 of the specification.
template <class T>
class BackwardReference {
 public:
  BackwardReference(const BackwardCase& c, const BackwardInputs<T>& in)
      : c_(c), in_(in), q_(doubles(in.x.q)), k_(doubles(in.x.k)), v_(doubles(in.x.v)),
        q_proxy_(doubles(in.x.q_proxy)), k_proxy_(doubles(in.x.k_proxy)), out_(doubles(in.out)),
        dout_(doubles(in.dout)), tokens_(c.batch.describe()), sums_(c, true) {
    // Few threads, each with sums over its tokens.
    const int64_t threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 8);
    std::vector<std::unique_ptr<Sums>> parts(static_cast<size_t>(threads));
    parallel_for(threads, [&](int64_t n) {
      auto& part = parts[static_cast<size_t>(n)];
      part = std::make_unique<Sums>(c, false);
      for (int64_t t = n; t < c.batch.tokens; t += threads)
        if (tokens_[static_cast<size_t>(t)].fragment >= 0)
          for (int p = 0; p < c.proxy_heads; ++p)
            add_token(*part, t, p);
    });
    for (const auto& part : parts)
      sums_.add_keys(*part);
  }

  const Sums& sums() const { return sums_; }

 private:
  static constexpr double kFloatRounding = 0x1p-23;

  static std::vector<double> doubles(const std::vector<T>& values) {
    std::vector<double> result(values.size());
    std::transform(values.begin(), values.end(), result.begin(), to_double<T>);
    return result;
  }
  static bool finite(const double* row, int dim) {
    return std::all_of(row, row + dim, [](double x) { return std::isfinite(x); });
  }

  // sums: of this thread's keys; rows of tokens belong to one thread anyway.
  void add_token(Sums& sums, int64_t t, int p) {
    const std::vector<int64_t> keys = keys_of(c_, in_.ids, tokens_[static_cast<size_t>(t)], t, p);
    if (keys.empty())
      return;
    const int group = c_.q_heads / c_.proxy_heads, dim = c_.dim;
    std::vector<double> teacher(keys.size()), plain_teacher(keys.size());
    bool bad_teacher = false;
    for (int h = p * group; h < (p + 1) * group; ++h) {
      const int kv = h / (c_.q_heads / c_.kv_heads);
      const int64_t row = t * c_.q_heads + h;
      const double *q = q_.data() + row * dim, *dout = dout_.data() + row * dim;
      const double lse = in_.lse[row], delta = dot(dout, out_.data() + row * dim, dim);
      bool bad_scores = !finite(q, dim) || !std::isfinite(lse);
      bool bad_values = !finite(dout, dim) || !std::isfinite(delta);
      for (int64_t key : keys) {
        bad_scores |= !finite(k_.data() + (key * c_.kv_heads + kv) * dim, dim);
        bad_values |= !finite(v_.data() + (key * c_.kv_heads + kv) * dim, dim);
      }
      bad_teacher |= bad_scores;
      const bool taint = bad_scores || bad_values;
      const double dout_norm = norm(dout, dim), q_norm = norm(q, dim);
      const double out_norm = norm(out_.data() + row * dim, dim);
      sums_.q.add(row, taint, 0);
      for (size_t i = 0; i < keys.size(); ++i) {
        const int64_t key_row = keys[i] * c_.kv_heads + kv;
        const double *k = k_.data() + key_row * dim, *v = v_.data() + key_row * dim;
        const double score = c_.softmax_scale() * dot(q, k, dim);
        const double probability = std::exp(score - lse);
        const double ds = c_.main() ? probability * (dot(dout, v, dim) - delta) : 0;
        teacher[i] += probability / group;
        plain_teacher[i] += rounded_significand<__half>(probability) / group;
        if (!c_.main())
          continue;
        const double size = dout_norm * (norm(v, dim) + out_norm);
        const double rounding = std::abs(c_.softmax_scale()) * kFloatRounding * probability * size;
        sums_.q.slack[row] += rounding * norm(k, dim);
        sums.k.add(key_row, taint, rounding * q_norm);
        sums.v.add(key_row, taint, 0);
        const double plain_p = rounded_significand<T>(probability);
        const double plain_ds = rounded_significand<T>(ds);
        add_scaled(sums_.exact.dq.data() + row * dim, c_.softmax_scale() * ds, k, dim);
        add_scaled(sums_.plain.dq.data() + row * dim, c_.softmax_scale() * plain_ds, k, dim);
        add_scaled(sums.exact.dk.data() + key_row * dim, c_.softmax_scale() * ds, q, dim);
        add_scaled(sums.plain.dk.data() + key_row * dim, c_.softmax_scale() * plain_ds, q, dim);
        add_scaled(sums.exact.dv.data() + key_row * dim, probability, dout, dim);
        add_scaled(sums.plain.dv.data() + key_row * dim, plain_p, dout, dim);
      }
    }
    if (c_.proxy)
      add_student(sums, t, p, keys, teacher, plain_teacher, bad_teacher);
  }

  void add_student(Sums& sums, int64_t t, int p, const std::vector<int64_t>& keys,
                   const std::vector<double>& teacher, const std::vector<double>& plain_teacher,
                   bool bad_teacher) {
    const int key_head = p / (c_.proxy_heads / c_.proxy_kv_heads), dim = c_.proxy_dim;
    const int64_t row = t * c_.proxy_heads + p;
    const double* q = q_proxy_.data() + row * dim;
    const double lse = in_.proxy_lse[row], upstream = in_.dkl[row];
    bool taint = bad_teacher || !finite(q, dim) || !std::isfinite(lse) || !std::isfinite(upstream);
    for (int64_t key : keys)
      taint |= !finite(k_proxy_.data() + (key * c_.proxy_kv_heads + key_head) * dim, dim);
    const double q_norm = norm(q, dim);
    double kl_slack = 0;
    sums_.q_proxy.add(row, taint, 0);
    for (size_t i = 0; i < keys.size(); ++i) {
      const int64_t key_row = keys[i] * c_.proxy_kv_heads + key_head;
      const double* k = k_proxy_.data() + key_row * dim;
      const double score = c_.student_scale() * dot(q, k, dim), log_student = score - lse;
      const double rounding = kFloatRounding * (8 + std::abs(score) + std::abs(lse)) *
                              (std::exp(log_student) + teacher[i]);
      const double ds_rounding = std::abs(c_.student_scale() * upstream) * rounding;
      const double plain = rounded_significand<__half>(plain_teacher[i]);
      const double ds = upstream * (std::exp(log_student) - teacher[i]);
      const double plain_ds = rounded_significand<T>(upstream * (std::exp(log_student) - plain));
      if (teacher[i] != 0)
        sums_.exact.kl[row] += teacher[i] * (std::log(teacher[i]) - log_student);
      if (plain != 0)
        sums_.plain.kl[row] += plain * (std::log(plain) - log_student);
      kl_slack += rounding;
      sums_.q_proxy.slack[row] += ds_rounding * norm(k, dim);
      sums.k_proxy.add(key_row, taint, ds_rounding * q_norm);
      add_scaled(sums_.exact.dq_proxy.data() + row * dim, c_.student_scale() * ds, k, dim);
      add_scaled(sums_.plain.dq_proxy.data() + row * dim, c_.student_scale() * plain_ds, k, dim);
      add_scaled(sums.exact.dk_proxy.data() + key_row * dim, c_.student_scale() * ds, q, dim);
      add_scaled(sums.plain.dk_proxy.data() + key_row * dim, c_.student_scale() * plain_ds, q, dim);
    }
    sums_.kl.add(row, taint, kl_slack);
  }

  const BackwardCase& c_;
  const BackwardInputs<T>& in_;
  std::vector<double> q_, k_, v_, q_proxy_, k_proxy_, out_, dout_;
  std::vector<Batch::Token> tokens_;
  Sums sums_;
};

// --- judgement
// --------------------------------------------------------------------------------------
// unit: relative size of one rounding of the result; smallest: of the type's numbers, where
// rounding is absolute. Rows that nothing adds to must be exactly 0. A row that reads something not
// finite must not be finite where the reference is not; otherwise it may be anything.
inline void expect_rows(const char* what, const std::vector<double>& got,
                        const std::vector<double>& exact, const std::vector<double>& plain,
                        int64_t width, const RowFacts& facts, double unit, double smallest) {
  if (got.empty())
    return;
  ASSERT_EQ(got.size(), exact.size()) << what;
  const auto rows = static_cast<int64_t>(got.size()) / width;
  std::vector<double> norm(rows), error(rows), plain_error(rows), sizes;
  double total = 0, total_error = 0, total_plain = 0;
  for (int64_t row = 0; row < rows; ++row) {
    bool finite = true, got_finite = true, zero = true;
    for (int64_t i = row * width; i < (row + 1) * width; ++i) {
      finite &= std::isfinite(exact[i]);
      got_finite &= std::isfinite(got[i]);
      zero &= got[i] == 0;
    }
    if (!facts.used[row]) {
      ASSERT_TRUE(zero) << what << " row " << row << " must be 0";
      continue;
    }
    if (facts.tainted[row]) {
      ASSERT_TRUE(finite || !got_finite) << what << " row " << row << " must not be finite";
      continue;
    }
    ASSERT_TRUE(got_finite) << what << " row " << row << " of " << rows << " must be finite";
    for (int64_t i = row * width; i < (row + 1) * width; ++i) {
      norm[row] += exact[i] * exact[i];
      error[row] += (got[i] - exact[i]) * (got[i] - exact[i]);
      plain_error[row] += (plain[i] - exact[i]) * (plain[i] - exact[i]);
    }
    total += norm[row];
    total_error += error[row];
    total_plain += plain_error[row];
    sizes.push_back(std::sqrt(norm[row]));
  }
  if (sizes.empty())
    return;
  std::nth_element(sizes.begin(), sizes.begin() + sizes.size() / 2, sizes.end());
  const double middle = std::max(sizes[sizes.size() / 2], 1e-30);
  double worst = 0, worst_plain = 0, total_absolute = 0;
  int64_t worst_row = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const double size = std::max(std::sqrt(norm[row]), middle);
    worst_plain = std::max(worst_plain, std::sqrt(plain_error[row]) / size);
    const double absolute = facts.slack[row] + smallest * std::sqrt(static_cast<double>(width));
    total_absolute += facts.tainted[row] ? 0 : absolute * absolute;
    const double excess = std::max(0.0, std::sqrt(error[row]) - absolute) / size;
    if (excess > worst) {
      worst = excess;
      worst_row = row;
    }
  }
  const double largest = std::max(std::sqrt(total), middle);
  EXPECT_LE(std::sqrt(total_error),
            2 * std::sqrt(total_plain) + unit * largest + std::sqrt(total_absolute))
      << what;
  EXPECT_LE(worst, 2 * worst_plain + 2 * unit)
      << what << " row " << worst_row << " of " << rows << ", its size "
      << std::sqrt(norm[worst_row]) << ", the middle one's " << middle;
}

template <class T>
void expect_right(const BackwardCase& c, const Sums& s, const Gradients& got) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr double kUnit = kHalf ? 0x1p-11 : 0x1p-8, kSmallest = kHalf ? 0x1p-25 : 0;
  expect_rows("dq", got.dq, s.exact.dq, s.plain.dq, c.dim, s.q, kUnit, kSmallest);
  expect_rows("dk", got.dk, s.exact.dk, s.plain.dk, c.dim, s.k, kUnit, kSmallest);
  expect_rows("dv", got.dv, s.exact.dv, s.plain.dv, c.dim, s.v, kUnit, kSmallest);
  expect_rows("dq_proxy", got.dq_proxy, s.exact.dq_proxy, s.plain.dq_proxy, c.proxy_dim, s.q_proxy,
              kUnit, kSmallest);
  expect_rows("dk_proxy", got.dk_proxy, s.exact.dk_proxy, s.plain.dk_proxy, c.proxy_dim, s.k_proxy,
              kUnit, kSmallest);
  expect_rows("kl", got.kl, s.exact.kl, s.plain.kl, 1, s.kl, 2e-5, 1e-7);
}
template <class T>
void expect_right(const BackwardCase& c, const BackwardInputs<T>& in, const Gradients& got) {
  expect_right<T>(c, BackwardReference<T>(c, in).sums(), got);
}

} // namespace thresher::test
