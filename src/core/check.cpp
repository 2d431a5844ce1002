#include "core/check.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>

namespace thresher {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr int32_t kMaxBlockSize = 1024;

[[noreturn]] void invalid(const char* argument, const std::string& text) {
  throw Error(ErrorCode::kInvalidValue, argument, text);
}

const char* name_of(DType dtype) {
  switch (dtype) {
  case DType::kFloat32:
    return "float32";
  case DType::kFloat64:
    return "float64";
  case DType::kBFloat16:
    return "bfloat16";
  case DType::kFloat16:
    return "float16";
  case DType::kInt32:
    return "int32";
  }
  return "an unknown dtype";
}

std::string text_of(const Tensor& tensor) {
  std::string text = "[";
  for (int axis = 0; axis < tensor.rank && axis < 4; ++axis)
    text += (axis ? ", " : "") + std::to_string(tensor.shape[axis]);
  return text + "]";
}

std::string text_of(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (int64_t size : shape)
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

bool is_input_dtype(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kBFloat16 ||
         dtype == DType::kFloat16;
}

bool is_empty(const Tensor& tensor) {
  return std::find(tensor.shape, tensor.shape + tensor.rank, 0) != tensor.shape + tensor.rank;
}

// Reads and writes are of whole elements.
void check_aligned(const char* argument, const Tensor& tensor) {
  const auto size = static_cast<int64_t>(element_size(tensor.dtype));
  if (!is_empty(tensor) &&
      reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(size) != 0)
    invalid(argument, "data is not aligned to its elements of " + std::to_string(size) + " bytes");
}

// Two elements of a result in one place would be written by two threads.
void check_result(const char* argument, const Tensor& tensor) {
  for (int axis = 0; axis < tensor.rank; ++axis)
    if (tensor.shape[axis] > 1 && tensor.stride[axis] == 0 && !is_empty(tensor))
      invalid(argument,
              "stride 0 in dimension " + std::to_string(axis) + ", which only inputs may have");
}

// Sizes and offsets (in bytes, of any dtype) must stay within 64 bits. An axis of size 1 has no
// offset, whatever its stride.
void check_span(const char* argument, const Tensor& tensor) {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max() / 8;
  int64_t count = 1, span = 0;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    int64_t offset = 0;
    const bool wraps =
        __builtin_mul_overflow(count, tensor.shape[axis], &count) ||
        (tensor.shape[axis] > 1 &&
         __builtin_mul_overflow(tensor.shape[axis] - 1, tensor.stride[axis], &offset)) ||
        offset < -kLargest || offset > kLargest - span;
    if (wraps || count > kLargest)
      invalid(argument, "shape " + text_of(tensor) + " with stride " +
                            std::to_string(tensor.stride[axis]) + " in dimension " +
                            std::to_string(axis) + " leaves the 64-bit address space");
    span += offset < 0 ? -offset : offset;
    if (span > kLargest)
      invalid(argument, "shape " + text_of(tensor) + " leaves the 64-bit address space");
  }
}

void check_dtype(const char* argument, const Tensor& tensor, DType expected, const char* why) {
  if (tensor.dtype != expected)
    throw Error(ErrorCode::kInvalidType, argument,
                std::string("dtype ") + name_of(tensor.dtype) + ", but " + name_of(expected) +
                    " is needed (" + why + ")");
}

void check_shape(const char* argument, const Tensor& tensor,
                 std::initializer_list<int64_t> expected, const char* meaning) {
  bool equal = tensor.rank == static_cast<int32_t>(expected.size());
  int axis = 0;
  for (int64_t size : expected)
    equal = equal && tensor.shape[axis++] == size;
  if (!equal)
    invalid(argument, "shape " + text_of(tensor) + ", but " + text_of(expected) + " = " + meaning +
                          " is needed");
}

// One call's tensors against each other. The first token tensor fixes batch form and dtype.
class Checker {
 public:
  Checker(const Problem& problem, const Device& device) : problem_(problem), device_(device) {
    if (device.type != DeviceType::kCpu && device.type != DeviceType::kCuda)
      throw Error(ErrorCode::kInvalidType, "device", "neither the CPU nor CUDA");
    if (device.index < 0)
      invalid("device", "index " + std::to_string(device.index) + " is negative");
  }

  Shapes shapes;

  // [T, heads, dim] or [N, S, heads, dim].
  void queries(const char* argument, const Tensor& tensor, int32_t& heads, int32_t& dim) {
    form(argument, tensor);
    const int64_t rows = row_count(argument, tensor, shapes.tokens_per_row, "query tokens");
    shapes.tokens = rows;
    head_vector(argument, tensor, heads, dim);
  }
  void keys(const char* argument, const Tensor& tensor, int32_t& heads, int32_t& dim) {
    form(argument, tensor);
    const int64_t rows = row_count(argument, tensor, shapes.keys_per_row, "key tokens");
    shapes.keys = rows;
    head_vector(argument, tensor, heads, dim);
  }

  // Results and gradients that have the shape of a query or key tensor.
  void like_queries(const char* argument, const Tensor& tensor, int32_t heads, int32_t dim) {
    like(argument, tensor, shapes.tokens_per_row, heads, dim);
  }
  void like_keys(const char* argument, const Tensor& tensor, int32_t heads, int32_t dim) {
    like(argument, tensor, shapes.keys_per_row, heads, dim);
  }
  // [T, heads] or [N, S, heads] in the accumulation dtype.
  void rows(const char* argument, const Tensor& tensor, int32_t heads) {
    require(argument, tensor);
    const DType accumulation = shapes.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    check_dtype(argument, tensor, accumulation, "the accumulation dtype of the inputs");
    if (rank_ == 4)
      check_shape(argument, tensor, {shapes.batch, shapes.tokens_per_row, heads},
                  "[batch, tokens, heads]");
    else
      check_shape(argument, tensor, {shapes.tokens, heads}, "[tokens, heads]");
    check_aligned(argument, tensor);
  }
  void result_rows(const char* argument, const Tensor& tensor, int32_t heads) {
    rows(argument, tensor, heads);
    check_result(argument, tensor);
  }
  // [Hp, T, K] or [N, Hp, S, K]; fixes K.
  void indices(const Tensor& tensor) {
    const char* argument = "block_indices";
    require(argument, tensor);
    check_dtype(argument, tensor, DType::kInt32, "block ids");
    shapes.top_k = problem_.top_k_blocks;
    if (rank_ == 4)
      check_shape(argument, tensor,
                  {shapes.batch, shapes.proxy_heads, shapes.tokens_per_row, shapes.top_k},
                  "[batch, proxy heads, tokens, top_k_blocks]");
    else
      check_shape(argument, tensor, {shapes.proxy_heads, shapes.tokens, shapes.top_k},
                  "[proxy heads, tokens, top_k_blocks]");
    contiguous_last(argument, tensor);
    check_aligned(argument, tensor);
  }

  void require(const char* argument, const Tensor& tensor) {
    if (tensor.rank == 0 && !tensor)
      invalid(argument, "missing, but this operation needs it");
    if (tensor.rank < 0 || tensor.rank > 4)
      invalid(argument, "rank " + std::to_string(tensor.rank) + ", but at most 4 is supported");
    for (int axis = 0; axis < tensor.rank; ++axis)
      if (tensor.shape[axis] < 0)
        invalid(argument, "shape " + text_of(tensor) + " has a negative size");
    if (!tensor && !is_empty(tensor))
      invalid(argument, "data is null, but the shape is " + text_of(tensor));
    check_span(argument, tensor);
  }
  static bool given(const Tensor& tensor) { return static_cast<bool>(tensor); }

  void main_heads() {
    divides("k", "key/value heads", shapes.kv_heads, "query heads", shapes.q_heads);
    if (shapes.proxy_heads)
      divides("block_indices", "proxy heads", shapes.proxy_heads, "query heads", shapes.q_heads);
  }
  void proxy_heads() {
    divides("k_proxy", "proxy key heads", shapes.proxy_kv_heads, "proxy heads", shapes.proxy_heads);
    if (shapes.q_heads)
      divides("q_proxy", "proxy heads", shapes.proxy_heads, "query heads", shapes.q_heads);
  }

  void block_size() {
    const int32_t size = problem_.block_size;
    if (size < 1 || size > kMaxBlockSize)
      invalid("block_size", std::to_string(size) + ", but 1 to " + std::to_string(kMaxBlockSize) +
                                " are supported");
    shapes.block_size = size;
  }
  void top_k() {
    const Problem& p = problem_;
    if (p.top_k_blocks < 1)
      invalid("top_k_blocks", std::to_string(p.top_k_blocks) + ", but at least 1 is needed");
    if (p.init_blocks < 0)
      invalid("init_blocks", std::to_string(p.init_blocks) + " is negative");
    if (p.local_blocks < 0)
      invalid("local_blocks", std::to_string(p.local_blocks) + " is negative");
    if (int64_t{p.init_blocks} + p.local_blocks > p.top_k_blocks)
      invalid("top_k_blocks", std::to_string(p.top_k_blocks) +
                                  " is less than init_blocks + local_blocks = " +
                                  std::to_string(int64_t{p.init_blocks} + p.local_blocks));
    shapes.top_k = p.top_k_blocks;
  }
  void scale(const char* argument, double value) {
    if (!std::isfinite(value))
      invalid(argument, std::to_string(value) + " is not a finite number");
  }

  void fragments() {
    const Fragments& f = problem_.fragments;
    if (!f.q_begin) {
      if (f.count != 0 || f.k_begin || f.k_len)
        invalid("fragments", "count, k_begin or k_len are given without q_begin");
      if (shapes.keys && shapes.keys_per_row != shapes.tokens_per_row)
        invalid("k", std::to_string(shapes.keys_per_row) + " key tokens for " +
                         std::to_string(shapes.tokens_per_row) +
                         " query tokens: different numbers need fragments with k_len");
      return;
    }
    if (f.count < 0 || f.count > kMaxTokens)
      invalid("fragments", "count " + std::to_string(f.count) + " is out of range");
    if (rank_ == 4 && shapes.batch > 1)
      invalid("fragments", "given for batched tensors: packed [T, heads, dim] ones are needed");
    if (!f.k_begin && !f.k_len && shapes.keys && shapes.keys != shapes.tokens)
      invalid("k", std::to_string(shapes.keys) + " key tokens for " +
                       std::to_string(shapes.tokens) +
                       " query tokens: different numbers need k_begin and k_len");
    if (device_.type == DeviceType::kCpu)
      fragment_values();
  }

 private:
  void form(const char* argument, const Tensor& tensor) {
    require(argument, tensor);
    if (tensor.rank != 3 && tensor.rank != 4)
      invalid(argument, "rank " + std::to_string(tensor.rank) +
                            ", but 3 [T, heads, dim] or 4 [N, S, heads, dim] is needed");
    if (rank_ == 0) {
      rank_ = tensor.rank;
      first_ = argument;
      shapes.dtype = tensor.dtype;
      if (!is_input_dtype(tensor.dtype))
        throw Error(ErrorCode::kInvalidType, argument,
                    std::string("dtype ") + name_of(tensor.dtype) +
                        ", but float32, float64, bfloat16 and float16 are supported");
      shapes.batch = rank_ == 4 ? tensor.shape[0] : 1;
    }
    if (tensor.rank != rank_)
      invalid(argument, "rank " + std::to_string(tensor.rank) + ", but " + first_ + " has rank " +
                            std::to_string(rank_));
    check_dtype(argument, tensor, shapes.dtype, "all inputs have one dtype");
    contiguous_last(argument, tensor);
    check_aligned(argument, tensor);
    if (rank_ == 4 && tensor.shape[0] != shapes.batch)
      invalid(argument, "batch size " + std::to_string(tensor.shape[0]) + ", but " + first_ +
                            " has " + std::to_string(shapes.batch));
  }

  void contiguous_last(const char* argument, const Tensor& tensor) {
    if (tensor.shape[tensor.rank - 1] > 1 && tensor.stride[tensor.rank - 1] != 1)
      invalid(argument, "stride " + std::to_string(tensor.stride[tensor.rank - 1]) +
                            " in the last dimension, which must be contiguous (stride 1)");
  }

  int64_t row_count(const char* argument, const Tensor& tensor, int64_t& per_row,
                    const char* meaning) {
    const int64_t rows = tensor.shape[rank_ - 3];
    if (seen(per_row) && rows != per_row)
      invalid(argument, std::to_string(rows) + " " + meaning + ", but an earlier tensor has " +
                            std::to_string(per_row));
    if (rows > kMaxTokens || shapes.batch > kMaxTokens || rows * shapes.batch > kMaxTokens)
      invalid(argument, "shape " + text_of(tensor) + " has more than " +
                            std::to_string(kMaxTokens) + " tokens");
    mark(per_row);
    per_row = rows;
    return rows * shapes.batch;
  }

  void head_vector(const char* argument, const Tensor& tensor, int32_t& heads, int32_t& dim) {
    const int64_t h = tensor.shape[rank_ - 2], d = tensor.shape[rank_ - 1];
    if (h < 1 || h > 65535)
      invalid(argument, std::to_string(h) + " heads, but 1 to 65535 are supported");
    if (d < 1 || d > 65535)
      invalid(argument, "head dimension " + std::to_string(d) + ", but 1 to 65535 are supported");
    if (heads != 0 && h != heads)
      invalid(argument, std::to_string(h) + " heads, but " + std::to_string(heads) +
                            " are needed to match the other tensors");
    if (dim != 0 && d != dim)
      invalid(argument, "head dimension " + std::to_string(d) + ", but " + std::to_string(dim) +
                            " is needed to match the other tensors");
    heads = static_cast<int32_t>(h);
    dim = static_cast<int32_t>(d);
  }

  void like(const char* argument, const Tensor& tensor, int64_t per_row, int32_t heads,
            int32_t dim) {
    require(argument, tensor);
    check_dtype(argument, tensor, shapes.dtype, "the dtype of the inputs");
    if (rank_ == 4)
      check_shape(argument, tensor, {shapes.batch, per_row, heads, dim},
                  "[batch, tokens, heads, dim]");
    else
      check_shape(argument, tensor, {per_row, heads, dim}, "[tokens, heads, dim]");
    contiguous_last(argument, tensor);
    check_aligned(argument, tensor);
  }

  static void divides(const char* argument, const char* few_name, int32_t few,
                      const char* many_name, int32_t many) {
    if (many % few != 0)
      invalid(argument, std::to_string(few) + " " + few_name + " do not divide " +
                            std::to_string(many) + " " + many_name);
  }

  void fragment_values() const {
    const Fragments& f = problem_.fragments;
    auto at = [](const char* array, int64_t i, int64_t value) {
      return std::string(array) + "[" + std::to_string(i) + "] = " + std::to_string(value);
    };
    if (f.q_begin[0] != 0)
      invalid("cu_seqlens", at("q_begin", 0, f.q_begin[0]) + ", but the first entry must be 0");
    for (int64_t i = 0; i < f.count; ++i) {
      if (f.q_begin[i + 1] < f.q_begin[i])
        invalid("cu_seqlens", at("q_begin", i + 1, f.q_begin[i + 1]) +
                                  " is less than the entry before it, " +
                                  std::to_string(f.q_begin[i]));
      if (f.q_begin[i + 1] > shapes.tokens)
        invalid("cu_seqlens", at("q_begin", i + 1, f.q_begin[i + 1]) + " is more than the " +
                                  std::to_string(shapes.tokens) + " tokens there are");
      const int64_t k_begin = f.k_begin ? f.k_begin[i] : f.q_begin[i];
      const int64_t k_len = f.k_len ? f.k_len[i] : f.q_begin[i + 1] - f.q_begin[i];
      if (k_begin < 0)
        invalid("fragments", at("k_begin", i, k_begin) + " is negative");
      if (k_len < 0)
        invalid("fragments", at("k_len", i, k_len) + " is negative");
      if (k_begin + k_len > shapes.keys)
        invalid("fragments", at("k_begin", i, k_begin) + " + " + at("k_len", i, k_len) +
                                 " is more than the " + std::to_string(shapes.keys) +
                                 " key tokens there are");
    }
  }

  bool seen(const int64_t& per_row) const {
    return &per_row == &shapes.tokens_per_row ? seen_queries_ : seen_keys_;
  }
  void mark(const int64_t& per_row) {
    (&per_row == &shapes.tokens_per_row ? seen_queries_ : seen_keys_) = true;
  }

  const Problem& problem_;
  const Device& device_;
  int32_t rank_ = 0;
  std::string first_;
  bool seen_queries_ = false, seen_keys_ = false;
};

// q, k, block_indices: what the main attention's geometry follows from.
void check_attention(Checker& c, const Problem& problem, const Tensor& q, const Tensor& k,
                     const Tensor& block_indices, bool selected) {
  c.queries("q", q, c.shapes.q_heads, c.shapes.dim);
  c.keys("k", k, c.shapes.kv_heads, c.shapes.dim);
  c.scale("softmax_scale", problem.softmax_scale);
  c.block_size();
  if (selected) {
    c.require("block_indices", block_indices);
    if (problem.top_k_blocks < 1)
      invalid("top_k_blocks", std::to_string(problem.top_k_blocks) + ", but at least 1 is needed");
    if (!c.shapes.proxy_heads && block_indices.rank >= 3)
      c.shapes.proxy_heads = static_cast<int32_t>(block_indices.shape[block_indices.rank - 3]);
    if (c.shapes.proxy_heads < 1)
      invalid("block_indices", "shape " + text_of(block_indices) + " has no proxy heads");
    c.indices(block_indices);
  } else if (Checker::given(block_indices)) {
    invalid("block_indices", "given, but the warm-up attends to every visible key");
  }
}

void check_proxy(Checker& c, const Problem& problem, const Tensor& q_proxy, const Tensor& k_proxy) {
  c.queries("q_proxy", q_proxy, c.shapes.proxy_heads, c.shapes.proxy_dim);
  c.keys("k_proxy", k_proxy, c.shapes.proxy_kv_heads, c.shapes.proxy_dim);
  c.scale("proxy_scale", problem.proxy_scale);
  c.proxy_heads();
}

} // namespace

Shapes check(const SelectParams& p, const Device& device) {
  Checker c(p.problem, device);
  check_proxy(c, p.problem, p.q_proxy, p.k_proxy);
  c.block_size();
  c.top_k();
  c.indices(p.block_indices);
  check_result("block_indices", p.block_indices);
  c.fragments();
  return c.shapes;
}

Shapes check(const ForwardParams& p, const Device& device, Keys keys) {
  Checker c(p.problem, device);
  check_attention(c, p.problem, p.q, p.k, p.block_indices, keys == Keys::kSelected);
  c.keys("v", p.v, c.shapes.kv_heads, c.shapes.dim);
  if (Checker::given(p.proxy_lse) || Checker::given(p.q_proxy)) {
    check_proxy(c, p.problem, p.q_proxy, p.k_proxy);
    c.result_rows("proxy_lse", p.proxy_lse, c.shapes.proxy_heads);
  }
  c.main_heads();
  c.like_queries("out", p.out, c.shapes.q_heads, c.shapes.dim);
  check_result("out", p.out);
  c.result_rows("lse", p.lse, c.shapes.q_heads);
  c.fragments();
  return c.shapes;
}

Shapes check(const BackwardParams& p, const Device& device, Keys keys) {
  Checker c(p.problem, device);
  check_attention(c, p.problem, p.q, p.k, p.block_indices, keys == Keys::kSelected);
  c.keys("v", p.v, c.shapes.kv_heads, c.shapes.dim);
  c.rows("lse", p.lse, c.shapes.q_heads);
  const bool main = Checker::given(p.dout), proxy = Checker::given(p.dkl) || Checker::given(p.kl);
  if (proxy) {
    check_proxy(c, p.problem, p.q_proxy, p.k_proxy);
    c.rows("proxy_lse", p.proxy_lse, c.shapes.proxy_heads);
    if (Checker::given(p.dkl))
      c.rows("dkl", p.dkl, c.shapes.proxy_heads);
    if (Checker::given(p.kl))
      c.result_rows("kl", p.kl, c.shapes.proxy_heads);
  }
  c.main_heads();
  if (main) {
    c.like_queries("dout", p.dout, c.shapes.q_heads, c.shapes.dim);
    c.like_queries("out", p.out, c.shapes.q_heads, c.shapes.dim);
  }
  struct Gradient {
    const char* name;
    const Tensor& tensor;
    bool of_queries, of_proxy;
  };
  for (const Gradient& g :
       {Gradient{"dq", p.dq, true, false}, Gradient{"dk", p.dk, false, false},
        Gradient{"dv", p.dv, false, false}, Gradient{"dq_proxy", p.dq_proxy, true, true},
        Gradient{"dk_proxy", p.dk_proxy, false, true}}) {
    if (!Checker::given(g.tensor))
      continue;
    const bool wanted = g.of_proxy ? Checker::given(p.dkl) : main;
    if (!wanted)
      invalid(g.name,
              std::string("asked for, but ") + (g.of_proxy ? "dkl" : "dout") + " is not given");
    const Shapes& s = c.shapes;
    const int32_t heads = g.of_queries ? (g.of_proxy ? s.proxy_heads : s.q_heads)
                                       : (g.of_proxy ? s.proxy_kv_heads : s.kv_heads);
    const int32_t dim = g.of_proxy ? s.proxy_dim : s.dim;
    g.of_queries ? c.like_queries(g.name, g.tensor, heads, dim)
                 : c.like_keys(g.name, g.tensor, heads, dim);
    check_result(g.name, g.tensor);
  }
  c.fragments();
  return c.shapes;
}

Shapes check(const KlParams& p, const Device& device) {
  Checker c(p.problem, device);
  check_attention(c, p.problem, p.q, p.k, p.block_indices, Checker::given(p.block_indices));
  check_proxy(c, p.problem, p.q_proxy, p.k_proxy);
  c.main_heads();
  c.rows("lse", p.lse, c.shapes.q_heads);
  c.rows("proxy_lse", p.proxy_lse, c.shapes.proxy_heads);
  c.result_rows("kl", p.kl, c.shapes.proxy_heads);
  c.fragments();
  return c.shapes;
}

Shapes check_for_indices(const ForwardParams& p, const Device& device) {
  Checker c(p.problem, device);
  check_attention(c, p.problem, p.q, p.k, p.block_indices, true);
  c.main_heads();
  c.fragments();
  return c.shapes;
}

void check_workspace(const Workspace& workspace, size_t needed) {
  if (needed == 0)
    return;
  if (!workspace.data || workspace.bytes < needed)
    throw Error(ErrorCode::kOutOfMemory, "workspace",
                std::to_string(workspace.data ? workspace.bytes : 0) + " bytes, but " +
                    std::to_string(needed) + " are needed");
  if (reinterpret_cast<uintptr_t>(workspace.data) % 256 != 0)
    invalid("workspace", "data must be aligned to 256 bytes");
}

} // namespace thresher
