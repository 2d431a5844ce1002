#include "cpu/geometry.h"

#include <thresher/error.h>

#include <algorithm>
#include <limits>
#include <string>

namespace thresher::cpu {

Geometry::Geometry(Arena& arena, const Problem& problem, const Shapes& shapes) {
  const int64_t fragments = fragment_count(problem, shapes);
  runs = arena.take<Run>(fragments);
  documents = arena.take<Document>(fragments);
  order_ = arena.take<int32_t>(fragments);
  max_blocks = shapes.keys / shapes.block_size + fragments + 1;
}

void Geometry::build(const Problem& problem, const Shapes& shapes) {
  const Fragments& given = problem.fragments;
  const int64_t fragments = fragment_count(problem, shapes);
  auto q_begin = [&](int64_t f) -> int64_t {
    return given.q_begin ? given.q_begin[f] : f * shapes.tokens_per_row;
  };
  auto k_begin = [&](int64_t f) -> int64_t {
    if (!given.q_begin)
      return f * shapes.keys_per_row;
    return given.k_begin ? given.k_begin[f] : given.q_begin[f];
  };
  auto k_len = [&](int64_t f) -> int64_t {
    if (!given.q_begin)
      return shapes.keys_per_row;
    return given.k_len ? given.k_len[f] : q_begin(f + 1) - q_begin(f);
  };

  // Documents: the fragments with keys, by first key row; several fragments may share one.
  int64_t with_keys = 0;
  for (int64_t f = 0; f < fragments; ++f)
    if (k_len(f) > 0)
      order_[with_keys++] = static_cast<int32_t>(f);
  auto earlier = [&](int32_t a, int32_t b) { return k_begin(a) < k_begin(b); };
  if (!std::is_sorted(order_, order_ + with_keys, earlier))
    std::sort(order_, order_ + with_keys, earlier);
  document_count = 0;
  for (int64_t i = 0; i < with_keys; ++i) {
    const int64_t begin = k_begin(order_[i]), length = k_len(order_[i]);
    Document* last = document_count ? &documents[document_count - 1] : nullptr;
    if (last && last->k_begin == begin) {
      last->k_len = std::max(last->k_len, static_cast<int32_t>(length));
      continue;
    }
    if (last && last->k_begin + last->k_len > begin)
      throw Error(ErrorCode::kInvalidValue, "k_begin",
                  "documents overlap: keys " + std::to_string(last->k_begin) + " to " +
                      std::to_string(last->k_begin + last->k_len) + " and keys from " +
                      std::to_string(begin) + "; fragments must share a k_begin or no key");
    documents[document_count++] = {begin, 0, static_cast<int32_t>(length), 0};
  }
  int64_t blocks = 0;
  for (int64_t d = 0; d < document_count; ++d) {
    documents[d].first_block = blocks;
    documents[d].blocks = (documents[d].k_len + shapes.block_size - 1) / shapes.block_size;
    blocks += documents[d].blocks;
  }

  run_count = 0;
  for (int64_t f = 0; f < fragments; ++f) {
    const int64_t begin = q_begin(f), length = q_begin(f + 1) - begin;
    if (length == 0)
      continue;
    const Document* end = documents + document_count;
    const Document* found =
        std::lower_bound(static_cast<const Document*>(documents), end, k_begin(f),
                         [](const Document& d, int64_t key) { return d.k_begin < key; });
    const bool has_keys = k_len(f) > 0 && found != end;
    runs[run_count++] = {begin, k_len(f) - length, static_cast<int32_t>(length),
                         has_keys ? static_cast<int32_t>(found - documents) : -1};
  }
  real_tokens = q_begin(fragments);
}

Sizes sizes_of(const Problem& problem, const Shapes& s) {
  Sizes z{};
  z.q_heads = s.q_heads;
  z.kv_heads = s.kv_heads;
  z.proxy_heads = s.proxy_heads ? s.proxy_heads : s.kv_heads; // warm-up without a proxy
  z.proxy_kv_heads = s.proxy_kv_heads;
  z.group = s.q_heads / z.proxy_heads;
  z.dim = s.dim;
  z.proxy_dim = s.proxy_dim;
  z.padded_dim = static_cast<int32_t>(padded(s.dim));
  z.padded_proxy_dim = static_cast<int32_t>(padded(s.proxy_dim));
  z.block_size = s.block_size;
  z.top_k = s.top_k;
  z.softmax_scale = problem.softmax_scale;
  z.proxy_scale = problem.proxy_scale;
  return z;
}

Tiling tiling_of(const Sizes& z) {
  // A score tile of 128 x 128 fp32 is 64 KiB: two of them and the packed rows stay in a 1 MiB
  // cache.
  constexpr int32_t kScores = 128 * 128;
  Tiling t{};
  t.row_stride = static_cast<int32_t>(padded(z.block_size));
  t.rows = std::clamp(kScores / t.row_stride, 32, 128);
  t.tokens = std::clamp(t.rows / std::max(z.group, 1), 32, t.rows);
  t.chunk_tokens = std::max(256, t.row_stride);
  return t;
}

View token_tensor(const Tensor& tensor) {
  const TokenView<void> v = token_view<void>(tensor);
  return {v.data, v.batch_stride, v.token_stride, v.head_stride, v.per_row};
}
View row_tensor(const Tensor& tensor) {
  const TokenView<void> v = token_view<void>(tensor, false);
  return {v.data, v.batch_stride, v.token_stride, v.head_stride, v.per_row};
}
View index_tensor(const Tensor& tensor) {
  const bool batched = tensor.rank == 4;
  return {tensor.data, batched ? tensor.stride[0] : 0, tensor.stride[tensor.rank - 2],
          tensor.stride[tensor.rank - 3], std::max<int64_t>(tensor.shape[tensor.rank - 2], 1)};
}

int64_t window_tokens(double bytes_per_token, int32_t slots, int64_t tokens) {
  constexpr double kBudget = 96 << 20;
  constexpr int64_t kStep = 64, kLeast = 256;
  // Items (token, slot) of a window are counted in 32 bits.
  if (slots > std::numeric_limits<int32_t>::max() / kLeast)
    throw Error(ErrorCode::kNotSupported, "top_k_blocks",
                std::to_string(slots) + ", but the CPU backend takes at most " +
                    std::to_string(std::numeric_limits<int32_t>::max() / kLeast));
  const int64_t fit =
      static_cast<int64_t>(kBudget / std::max(bytes_per_token, 1.0)) / kStep * kStep;
  return std::min(std::max(fit, kLeast), (tokens + kStep - 1) / kStep * kStep);
}

} // namespace thresher::cpu
