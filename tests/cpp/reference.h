// The operations as plain loops over doubles, written from the formulas and from nothing of the
// library: what every C++ test compares with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace reference {

struct Problem {
  int64_t T = 0, Tk = 0;
  int Hq = 1, Hkv = 1, Hp = 1, Hpk = 1, D = 8, Dp = 8, B = 16, K = 4, init = 0, local = 1;
  double scale = 1, proxy_scale = 1;
  std::vector<int32_t> q_begin, k_begin, k_len; // fragments; k_begin and k_len always filled
  // Packed, row-major: [T, Hq, D], [Tk, Hkv, D], [T, Hp, Dp], [Tk, Hpk, Dp], [T, Hq, D], [T, Hp].
  std::vector<double> q, k, v, q_proxy, k_proxy, dout, dkl;

  int group() const { return Hq / Hp; }
};

struct Results {
  std::vector<double> out, lse, proxy_lse, kl, dq, dk, dv, dq_proxy, dk_proxy;
};

struct Query {
  int64_t key_row = 0;   // of its document's position 0
  int64_t position = -1; // sees positions 0 .. position
};

inline Query query_of(const Problem& p, int64_t t) {
  for (size_t f = 0; f + 1 < p.q_begin.size(); ++f)
    if (t >= p.q_begin[f] && t < p.q_begin[f + 1])
      return {p.k_begin[f], p.k_len[f] - (p.q_begin[f + 1] - p.q_begin[f]) + (t - p.q_begin[f])};
  return {};
}

inline double dot(const double* a, const double* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i)
    sum += a[i] * b[i];
  return sum;
}
inline const double* row(const std::vector<double>& x, int64_t token, int head, int heads,
                         int dim) {
  return &x[static_cast<size_t>((token * heads + head) * dim)];
}
inline double* row(std::vector<double>& x, int64_t token, int head, int heads, int dim) {
  return &x[static_cast<size_t>((token * heads + head) * dim)];
}

inline double proxy_score(const Problem& p, int64_t t, int head, int64_t key) {
  return p.proxy_scale * dot(row(p.q_proxy, t, head, p.Hp, p.Dp),
                             row(p.k_proxy, key, head / (p.Hp / p.Hpk), p.Hpk, p.Dp), p.Dp);
}

// Scores of the visible blocks of a token; a block with a NaN scores NaN.
inline std::vector<double> block_scores(const Problem& p, int64_t t, int head) {
  const Query query = query_of(p, t);
  std::vector<double> scores;
  for (int64_t position = 0; position <= query.position; ++position) {
    const double s = proxy_score(p, t, head, query.key_row + position);
    if (position % p.B == 0)
      scores.push_back(s);
    else if (std::isnan(s) || s > scores.back())
      scores.back() = std::isnan(scores.back()) ? scores.back() : s;
  }
  return scores;
}

// [Hp, T, K]: forced blocks, then the best, lower ids first among equals; ascending, then -1.
inline std::vector<int32_t> select(const Problem& p) {
  std::vector<int32_t> ids(static_cast<size_t>(p.Hp * p.T * p.K), -1);
  for (int head = 0; head < p.Hp; ++head)
    for (int64_t t = 0; t < p.T; ++t) {
      const std::vector<double> scores = block_scores(p, t, head);
      const int blocks = static_cast<int>(scores.size());
      std::vector<int32_t> order;
      for (int b = 0; b < blocks; ++b)
        order.push_back(b);
      auto forced = [&](int b) { return b < p.init || b >= blocks - p.local; };
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
        if (forced(a) != forced(b))
          return forced(a);
        if (forced(a))
          return false;
        const double x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
        if (std::isnan(x) || std::isnan(y))
          return !std::isnan(x) && std::isnan(y);
        return x > y;
      });
      order.resize(static_cast<size_t>(std::min(blocks, p.K)));
      std::sort(order.begin(), order.end());
      std::copy(order.begin(), order.end(),
                ids.begin() + static_cast<std::ptrdiff_t>((head * p.T + t) * p.K));
    }
  return ids;
}

// Attention, KL and all gradients over the selected keys, or over all visible ones without ids.
inline Results attend(const Problem& p, const std::vector<int32_t>* ids) {
  const double minus_infinity = -std::numeric_limits<double>::infinity();
  Results r;
  auto zeros = [](int64_t n) { return std::vector<double>(static_cast<size_t>(n), 0.0); };
  r.out = zeros(p.T * p.Hq * p.D);
  r.lse.assign(static_cast<size_t>(p.T * p.Hq), minus_infinity);
  r.proxy_lse.assign(static_cast<size_t>(p.T * p.Hp), minus_infinity);
  r.kl = zeros(p.T * p.Hp);
  r.dq = zeros(p.T * p.Hq * p.D);
  r.dk = zeros(p.Tk * p.Hkv * p.D);
  r.dv = zeros(p.Tk * p.Hkv * p.D);
  r.dq_proxy = zeros(p.T * p.Hp * p.Dp);
  r.dk_proxy = zeros(p.Tk * p.Hpk * p.Dp);

  for (int64_t t = 0; t < p.T; ++t)
    for (int head = 0; head < p.Hp; ++head) {
      const Query query = query_of(p, t);
      std::vector<int64_t> keys;
      for (int64_t position = 0; position <= query.position; ++position) {
        bool chosen = ids == nullptr;
        for (int s = 0; !chosen && s < p.K; ++s)
          chosen = (*ids)[static_cast<size_t>((head * p.T + t) * p.K + s)] == position / p.B;
        if (chosen)
          keys.push_back(query.key_row + position);
      }
      if (keys.empty())
        continue;
      const size_t n = keys.size();
      auto softmax = [&](std::vector<double>& x) { // returns the log-sum-exp
        const double top = *std::max_element(x.begin(), x.end());
        double sum = 0;
        for (double s : x)
          sum += std::exp(s - top);
        const double lse = top + std::log(sum);
        for (double& s : x)
          s = std::exp(s - lse);
        return lse;
      };

      std::vector<double> teacher(n, 0.0);
      for (int h = head * p.group(); h < (head + 1) * p.group(); ++h) {
        const int kv = h / (p.Hq / p.Hkv);
        const double* q = row(p.q, t, h, p.Hq, p.D);
        const double* dout = row(p.dout, t, h, p.Hq, p.D);
        std::vector<double> P(n);
        for (size_t i = 0; i < n; ++i)
          P[i] = p.scale * dot(q, row(p.k, keys[i], kv, p.Hkv, p.D), p.D);
        r.lse[static_cast<size_t>(t * p.Hq + h)] = softmax(P);
        double* out = row(r.out, t, h, p.Hq, p.D);
        for (size_t i = 0; i < n; ++i) {
          const double* v = row(p.v, keys[i], kv, p.Hkv, p.D);
          for (int d = 0; d < p.D; ++d)
            out[d] += P[i] * v[d];
          teacher[i] += P[i] / p.group();
        }
        const double delta = dot(dout, out, p.D);
        double* dq = row(r.dq, t, h, p.Hq, p.D);
        for (size_t i = 0; i < n; ++i) {
          const double* k = row(p.k, keys[i], kv, p.Hkv, p.D);
          const double dS = P[i] * (dot(dout, row(p.v, keys[i], kv, p.Hkv, p.D), p.D) - delta);
          double* dk = row(r.dk, keys[i], kv, p.Hkv, p.D);
          double* dv = row(r.dv, keys[i], kv, p.Hkv, p.D);
          for (int d = 0; d < p.D; ++d) {
            dq[d] += p.scale * dS * k[d];
            dk[d] += p.scale * dS * q[d];
            dv[d] += P[i] * dout[d];
          }
        }
      }

      const double* q = row(p.q_proxy, t, head, p.Hp, p.Dp);
      const int key_head = head / (p.Hp / p.Hpk);
      std::vector<double> score(n);
      for (size_t i = 0; i < n; ++i)
        score[i] = proxy_score(p, t, head, keys[i]);
      std::vector<double> student = score;
      const double lse = softmax(student);
      r.proxy_lse[static_cast<size_t>(t * p.Hp + head)] = lse;
      const double g = p.dkl[static_cast<size_t>(t * p.Hp + head)];
      double* dq = row(r.dq_proxy, t, head, p.Hp, p.Dp);
      for (size_t i = 0; i < n; ++i) {
        if (teacher[i] > 0)
          r.kl[static_cast<size_t>(t * p.Hp + head)] +=
              teacher[i] * (std::log(teacher[i]) - (score[i] - lse));
        const double dS = g * (student[i] - teacher[i]);
        const double* k = row(p.k_proxy, keys[i], key_head, p.Hpk, p.Dp);
        double* dk = row(r.dk_proxy, keys[i], key_head, p.Hpk, p.Dp);
        for (int d = 0; d < p.Dp; ++d) {
          dq[d] += p.proxy_scale * dS * k[d];
          dk[d] += p.proxy_scale * dS * q[d];
        }
      }
    }
  return r;
}

// |a - b| / |b| over all elements; infinities must agree, NaN never does.
inline double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (std::isinf(b[i])) {
      if (a[i] != b[i])
        return std::numeric_limits<double>::infinity();
      continue;
    }
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  if (std::isnan(difference))
    return std::numeric_limits<double>::infinity();
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

} // namespace reference
