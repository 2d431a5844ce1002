#include "cpu/check.h"

#include <thresher/error.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "core/backend.h"

namespace thresher::cpu {
namespace {

const int32_t* row_of(const View& v, int64_t token, int64_t head) {
  return static_cast<const int32_t*>(v.data) + token / v.per_row * v.batch +
         token % v.per_row * v.token + head * v.head;
}

// Slot of the first entry that may not be, or -1.
int32_t first_bad_slot(const int32_t* ids, int32_t count, int64_t visible) {
  bool ascending = true;
  int32_t last = -1;
  for (int32_t s = 0; s < count; ++s) {
    if (ids[s] == -1)
      continue;
    if (ids[s] < 0 || ids[s] >= visible) {
      if (ascending)
        return s;
      count = s + 1; // a duplicate may come before it
      break;
    }
    ascending = ascending && ids[s] > last;
    last = ids[s];
  }
  if (ascending)
    return -1;
  for (int32_t s = 0; s < count; ++s) {
    if (ids[s] == -1)
      continue;
    if (ids[s] < 0 || ids[s] >= visible)
      return s;
    for (int32_t earlier = 0; earlier < s; ++earlier)
      if (ids[earlier] == ids[s])
        return s;
  }
  return -1;
}

struct Query {
  int64_t token, position;
};
// Visits real tokens [begin, end) with their positions.
template <class Visit>
bool for_each_token(const Geometry& g, int64_t begin, int64_t end, Visit&& visit) {
  for (int64_t lo = 0, hi = g.run_count; begin < end && lo < g.run_count;) {
    while (hi - lo > 1) {
      const int64_t middle = (lo + hi) / 2;
      (g.runs[middle].q_begin <= begin ? lo : hi) = middle;
    }
    const Run& run = g.runs[lo];
    const int64_t stop = std::min(end, run.q_begin + run.q_len);
    for (; begin < stop; ++begin)
      if (!visit(Query{begin, run.document < 0 ? -1 : run.first_position + begin - run.q_begin}))
        return false;
    ++lo;
    hi = lo + 1;
  }
  return true;
}

int64_t visible_blocks(int64_t position, int32_t block_size) {
  return position < 0 ? 0 : position / block_size + 1;
}

[[noreturn]] void fail(const Shapes& s, const int32_t* ids, int64_t head, int64_t token,
                       int32_t slot, int64_t visible) {
  std::string where = "head " + std::to_string(head) + ", token " + std::to_string(token);
  if (s.batch > 1)
    where += " (row " + std::to_string(token / s.tokens_per_row) + ", position " +
             std::to_string(token % s.tokens_per_row) + ")";
  where += ", slot " + std::to_string(slot) + ": block " + std::to_string(ids[slot]);
  std::string why;
  if (ids[slot] < 0)
    why = " is negative; an empty slot is -1";
  else if (ids[slot] >= visible)
    why = visible == 0
              ? " is given, but the token sees no key"
              : " is out of range: the token sees blocks 0 to " + std::to_string(visible - 1);
  else
    why = " is in the row twice";
  throw Error(ErrorCode::kInvalidValue, "block_indices", where + why);
}

} // namespace

void check_indices(const Threads& threads, const Geometry& g, const View& indices,
                   const Shapes& s) {
  constexpr int64_t kPiece = 4096;
  const int64_t pieces = (g.real_tokens + kPiece - 1) / kPiece;
  for (int32_t head = 0; head < s.proxy_heads; ++head) {
    std::atomic<int64_t> first_bad_piece{pieces};
    auto scan = [&](int64_t piece, auto&& on_bad) {
      for_each_token(g, piece * kPiece, std::min(g.real_tokens, (piece + 1) * kPiece),
                     [&](const Query& q) {
                       const int64_t visible = visible_blocks(q.position, s.block_size);
                       const int32_t* ids = row_of(indices, q.token, head);
                       const int32_t slot = first_bad_slot(ids, s.top_k, visible);
                       if (slot < 0)
                         return true;
                       on_bad(ids, q.token, slot, visible);
                       return false;
                     });
    };
    threads.for_each(pieces, [&](int64_t piece, void*) {
      scan(piece, [&](auto&&...) {
        int64_t seen = first_bad_piece.load();
        while (piece < seen && !first_bad_piece.compare_exchange_weak(seen, piece)) {
        }
      });
    });
    if (first_bad_piece < pieces)
      scan(first_bad_piece, [&](const int32_t* ids, int64_t token, int32_t slot, int64_t visible) {
        fail(s, ids, head, token, slot, visible);
      });
  }
}

namespace {

struct Memory {
  Arena arena;
  Geometry geometry;
  Threads threads;
  Memory(const ForwardParams& p, const Shapes& s, const Workspace& w)
      : arena(w.data), geometry(arena, p.problem, s), threads(arena, 0, w.bytes) {}
};

} // namespace

size_t check_block_indices_workspace_size(const ForwardParams& p, const Shapes& s, const Device&) {
  return Memory(p, s, {}).arena.used();
}

void check_block_indices(const ForwardParams& p, const Shapes& s, const Workspace& workspace,
                         const Device&) {
  Memory m(p, s, workspace);
  m.geometry.build(p.problem, s);
  check_indices(m.threads, m.geometry, index_tensor(p.block_indices), s);
}

} // namespace thresher::cpu
