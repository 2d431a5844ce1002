// block_indices from outside: any values. Accepted exactly when a validator written from the
// contract accepts them, refused with the place that it names; then forward, KL and backward replay
// them.
#include <cmath>
#include <optional>

#include "call.h"
#include "draw.h"

namespace {

using namespace fuzz;

int32_t* row_of(Case& c, const Sizes& s, int64_t head, int64_t token) {
  const Tensor& ids = c.tensor[kIndices];
  const int64_t* stride = ids.stride + (s.batched ? 1 : 0);
  return static_cast<int32_t*>(ids.data) + (s.batched ? token / s.tokens * ids.stride[0] : 0) +
         head * stride[0] + (s.batched ? token % s.tokens : token) * stride[1];
}

// Blocks that the token sees; -1: padding, whose ids nobody reads.
int64_t visible_blocks(const Case& c, const Sizes& s, int64_t token) {
  int64_t position = token % s.tokens;
  if (!c.q_begin.empty()) {
    size_t f = 0;
    while (f + 1 < c.q_begin.size() && token >= c.q_begin[f + 1])
      ++f;
    if (f + 1 == c.q_begin.size())
      return -1;
    const int64_t length = c.q_begin[f + 1] - c.q_begin[f];
    position = (c.k_len.empty() ? length : c.k_len[f]) - length + token - c.q_begin[f];
  }
  return position < 0 ? 0 : position / c.problem.block_size + 1;
}

// "head 1, token 2" and the slot of the first entry that may not be.
std::optional<std::pair<std::string, int64_t>> first_offender(Case& c, const Sizes& s) {
  for (int64_t head = 0; head < s.proxy_heads; ++head)
    for (int64_t token = 0; token < s.batch * s.tokens; ++token) {
      const int64_t visible = visible_blocks(c, s, token);
      const int32_t* ids = row_of(c, s, head, token);
      for (int64_t slot = 0; visible >= 0 && slot < s.top_k; ++slot) {
        bool bad = ids[slot] < -1 || ids[slot] >= visible;
        for (int64_t earlier = 0; earlier < slot; ++earlier)
          bad = bad || (ids[slot] != -1 && ids[earlier] == ids[slot]);
        if (bad)
          return std::pair("head " + std::to_string(head) + ", token " + std::to_string(token),
                           slot);
      }
    }
  return {};
}

void draw_indices(Bytes& in, Case& c, const Sizes& s) {
  // Legal rows first (-1 or rising), so that many inputs get past the validation.
  for (int64_t head = 0; head < s.proxy_heads; ++head)
    for (int64_t token = 0; token < s.batch * s.tokens; ++token) {
      const int64_t visible = visible_blocks(c, s, token);
      int32_t* ids = row_of(c, s, head, token);
      int32_t next = 0;
      for (int64_t slot = 0; slot < s.top_k; ++slot) {
        next += in.below(3);
        ids[slot] = next < visible && in.below(4) ? next++ : -1;
      }
      if (in.flag())
        std::reverse(ids, ids + s.top_k);
      if (visible < 0)
        ids[0] = in.wild32();
    }
  const int64_t count = s.batch * s.proxy_heads * s.tokens * s.top_k;
  for (int changes = in.below(8) - 4; changes > 0 && count > 0; --changes) {
    auto* ids = static_cast<int32_t*>(c.tensor[kIndices].data);
    ids[in.raw<uint16_t>() % count] = in.flag() ? in.below(8) - 1 : in.wild32();
  }
}

// A row that chose nothing has out 0 and lse -inf.
void check_empty_rows(Case& c, const Sizes& s) {
  if (s.dtype != DType::kFloat32)
    return;
  const Tensor& lse = c.tensor[kLse];
  for (int64_t token = 0; token < s.batch * s.tokens; ++token)
    for (int64_t h = 0; h < s.q_heads; ++h) {
      const int32_t* ids = row_of(c, s, h / (s.q_heads / s.proxy_heads), token);
      const bool real = visible_blocks(c, s, token) >= 0;
      const bool chose =
          real && std::any_of(ids, ids + s.top_k, [](int32_t id) { return id >= 0; });
      const int64_t* stride = lse.stride + (s.batched ? 1 : 0);
      const float got = static_cast<const float*>(
          lse.data)[(s.batched ? token / s.tokens * lse.stride[0] : 0) +
                    (s.batched ? token % s.tokens : token) * stride[0] + h * stride[1]];
      if (!chose && !(std::isinf(got) && got < 0))
        fail("sparse_forward", "lse of an empty row is " + std::to_string(got));
    }
}

void one(Bytes& in) {
  const Sizes s = draw_sizes(in);
  Case c;
  draw_problem(in, s, &c.problem);
  draw_fragments(in, s, &c);
  c.describe(s);
  c.allocate();
  draw_values(in, &c);
  draw_indices(in, c, s);
  const auto offender = first_offender(c, s);

  using namespace thresher;
  auto replay = [&](const char* name, const auto& params, auto size, auto run) {
    const auto error = call(name, c, params, size, run, true);
    if (error.has_value() != offender.has_value())
      fail(name, error ? "refused: " + *error : "took a bad entry: " + offender->first);
    const std::string slot = offender ? "slot " + std::to_string(offender->second) + ":" : "";
    if (offender && (error->find(offender->first) == std::string::npos ||
                     error->find(slot) == std::string::npos))
      fail(name, "names another place: " + *error + "; right: " + offender->first + ", " + slot);
  };
  replay("check_block_indices", c.forward(true), check_block_indices_workspace_size,
         check_block_indices);
  replay("sparse_forward", c.forward(true), sparse_forward_workspace_size, sparse_forward);
  if (!offender)
    check_empty_rows(c, s);
  replay("proxy_kl", c.kl(true), proxy_kl_workspace_size, proxy_kl);
  replay("sparse_backward", c.backward(true), sparse_backward_workspace_size, sparse_backward);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size);
  one(in);
  return 0;
}
