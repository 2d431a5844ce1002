#include "cpu/work.h"

#include <cstring>

namespace thresher::cpu {
namespace {

const int32_t* index_row(const View& v, int64_t token, int32_t head) {
  return static_cast<const int32_t*>(v.data) + token / v.per_row * v.batch +
         token % v.per_row * v.token + head * v.head;
}

// visit(run, first token, last token) for the parts of runs that lie in [begin, end).
template <class Visit>
void for_each_run(const Geometry& g, int64_t begin, int64_t end, Visit&& visit) {
  const Run* last = g.runs + g.run_count;
  const Run* run = std::upper_bound(static_cast<const Run*>(g.runs), last, begin,
                                    [](int64_t token, const Run& r) { return token < r.q_begin; });
  if (run != g.runs)
    --run;
  for (; run != last && run->q_begin < end; ++run) {
    const int64_t from = std::max(begin, run->q_begin);
    const int64_t to = std::min(end, run->q_begin + run->q_len);
    if (from < to)
      visit(*run, from, to);
  }
}

} // namespace

SparseWork::SparseWork(Arena& arena, const Geometry& geometry, const Sizes& sizes,
                       const Tiling& tiling, int64_t window)
    : geometry_(geometry), block_size_(sizes.block_size), slots_(sizes.top_k),
      chunk_tokens_(tiling.chunk_tokens) {
  const int64_t items = window * slots_;
  const int64_t most_chunks = std::min(geometry.max_blocks, items) + items / chunk_tokens_ + 1;
  position_ = arena.take<int32_t>(window);
  items_ = arena.take<int32_t>(items);
  used_ = arena.take<uint8_t>(items);
  cursor_ = arena.take<int32_t>(geometry.max_blocks);
  chunks_ = arena.take<Chunk>(most_chunks);
  reduce_ = arena.take<int64_t>(items / chunk_tokens_ + 1);
}

void SparseWork::build(Window* window, int64_t begin, int64_t end, int32_t proxy_head,
                       const View& indices) {
  const Geometry& g = geometry_;
  std::memset(used_, 0, static_cast<size_t>((end - begin) * slots_));

  int64_t first_document = g.document_count, last_document = -1;
  for_each_run(g, begin, end, [&](const Run& run, int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t)
      position_[t - begin] = static_cast<int32_t>(run.first_position + (t - run.q_begin));
    if (run.document < 0)
      return;
    first_document = std::min<int64_t>(first_document, run.document);
    last_document = std::max<int64_t>(last_document, run.document);
  });

  if (last_document >= 0) {
    const int64_t first = g.documents[first_document].first_block;
    const int64_t last = g.documents[last_document].first_block + g.documents[last_document].blocks;
    std::fill(cursor_ + first, cursor_ + last, 0);
  }
  auto for_each_item = [&](auto&& visit) {
    for_each_run(g, begin, end, [&](const Run& run, int64_t from, int64_t to) {
      if (run.document < 0)
        return;
      int32_t* cursor = cursor_ + g.documents[run.document].first_block;
      for (int64_t t = from; t < to; ++t) {
        const int32_t* ids = index_row(indices, t, proxy_head);
        const int32_t item = static_cast<int32_t>((t - begin) * slots_);
        for (int32_t s = 0; s < slots_; ++s)
          if (ids[s] >= 0)
            visit(cursor[ids[s]], item + s);
      }
    });
  };
  for_each_item([&](int32_t& count, int32_t item) {
    ++count;
    used_[item] = 1;
  });

  chunk_count_ = reduce_count_ = 0;
  int32_t start = 0, partials = 0;
  for (int64_t d = first_document; d <= last_document; ++d) {
    const Document& document = g.documents[d];
    for (int32_t b = 0; b < document.blocks; ++b) {
      int32_t& cursor = cursor_[document.first_block + b];
      const int32_t stop = start + cursor;
      cursor = start;
      const int64_t position = int64_t{b} * block_size_;
      const int32_t keys =
          static_cast<int32_t>(std::min<int64_t>(block_size_, document.k_len - position));
      if (stop - start > chunk_tokens_)
        reduce_[reduce_count_++] = chunk_count_;
      for (int32_t i = start; i < stop; i += chunk_tokens_)
        chunks_[chunk_count_++] = {
            document.k_begin + position, position, keys, i, std::min(stop, i + chunk_tokens_),
            i == start ? -1 : partials++};
      start = stop;
    }
  }
  for_each_item([&](int32_t& cursor, int32_t item) { items_[cursor++] = item; });

  *window = {begin, static_cast<int32_t>(end - begin), proxy_head, position_, items_, used_};
}

DenseWork::DenseWork(Arena& arena, const Geometry& geometry, const Sizes& sizes, const Tiling&,
                     int64_t window)
    : geometry_(geometry), block_size_(sizes.block_size), window_(static_cast<int32_t>(window)) {
  position_ = arena.take<int32_t>(window);
  items_ = arena.take<int32_t>(window * kGroups);
  used_ = arena.take<uint8_t>(window * kGroups);
  pieces_ = arena.take<Piece>(window);
  tasks_ = arena.take<Task>(window * kGroups);
}

void DenseWork::build(Window* window, int64_t begin, int64_t end, int32_t proxy_head, const View&) {
  std::memset(used_, 0, static_cast<size_t>((end - begin) * kGroups));
  int32_t piece_count = 0;
  for_each_run(geometry_, begin, end, [&](const Run& run, int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t)
      position_[t - begin] = static_cast<int32_t>(run.first_position + (t - run.q_begin));
    from = std::max(from, run.q_begin - run.first_position); // queries before it see no key
    if (run.document < 0 || from >= to)
      return;
    pieces_[piece_count++] = {run.document, static_cast<int32_t>(from - begin),
                              static_cast<int32_t>(to - from),
                              run.first_position + (from - run.q_begin)};
  });
  // Runs of one document share its key gradients, so they go to the same task.
  std::stable_sort(pieces_, pieces_ + piece_count,
                   [](const Piece& a, const Piece& b) { return a.document < b.document; });

  task_count_ = 0;
  for (int32_t p = 0, next; p < piece_count; p = next) {
    int64_t visible = 0; // blocks
    for (next = p; next < piece_count && pieces_[next].document == pieces_[p].document; ++next)
      visible = std::max(
          visible, (pieces_[next].first_position + pieces_[next].tokens - 1) / block_size_ + 1);
    const int64_t blocks = geometry_.documents[pieces_[p].document].blocks;
    const int64_t per_group = (blocks + kGroups - 1) / kGroups;
    for (int32_t group = 0; group * per_group < visible; ++group) {
      tasks_[task_count_++] = {pieces_[p].document,
                               group,
                               p,
                               next,
                               group * per_group,
                               std::min(visible, (group + 1) * per_group)};
      for (int32_t i = p; i < next; ++i)
        for (int32_t t = 0; t < pieces_[i].tokens; ++t) {
          const int32_t token = pieces_[i].first_token + t;
          items_[group * window_ + token] = token * kGroups + group;
          used_[token * kGroups + group] =
              pieces_[i].first_position + t >= group * per_group * block_size_;
        }
    }
  }
  *window = {begin, static_cast<int32_t>(end - begin), proxy_head, position_, items_, used_};
}

} // namespace thresher::cpu
