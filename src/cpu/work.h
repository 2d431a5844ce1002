// The work of a window of query tokens: which tokens meet which block of keys, as chunks, and which
// chunks one thread must do in order because they share key gradients. Two kinds: the selected
// blocks (a reverse index of block_indices) and, for the warm-up, all visible ones.
#pragma once

#include <algorithm>

#include "cpu/geometry.h"

namespace thresher::cpu {

// Block -> (token, slot) by a stable counting sort, so a list is in token order. Lists are cut into
// chunks; the first chunk of a block adds to the accumulators of the key gradients, each further
// one has a partial buffer, which reduce() adds in order. So one block that every token chose still
// occupies all threads.
class SparseWork {
 public:
  static constexpr bool kAccumulate = false; // a slot belongs to one chunk

  SparseWork(Arena& arena, const Geometry& geometry, const Sizes& sizes, const Tiling& tiling,
             int64_t window);
  // Partial key gradient buffers of one token, at most (times window size, rounded up).
  static double partials_per_token(const Sizes& sizes, const Tiling& tiling) {
    return static_cast<double>(sizes.top_k) / tiling.chunk_tokens;
  }
  static int32_t slots(const Sizes& sizes) { return sizes.top_k; }

  void build(Window* window, int64_t begin, int64_t end, int32_t proxy_head, const View& indices);

  int64_t task_count() const { return chunk_count_; }
  template <class Visit>
  void for_each_chunk(int64_t task, Visit&& visit) const {
    visit(chunks_[task]);
  }
  // Blocks with more than one chunk: visit(chunk) for the further ones, in order.
  int64_t reduce_count() const { return reduce_count_; }
  template <class Visit>
  void for_each_partial(int64_t i, Visit&& visit) const {
    for (int64_t c = reduce_[i] + 1; c < chunk_count_ && chunks_[c].partial >= 0; ++c)
      visit(chunks_[c]);
  }

 private:
  const Geometry& geometry_;
  int32_t block_size_, slots_, chunk_tokens_;
  int32_t* position_;
  int32_t* items_;
  uint8_t* used_;
  int32_t* cursor_; // [blocks]: count, then the next place in items_
  Chunk* chunks_;
  int64_t* reduce_;
  int64_t chunk_count_ = 0, reduce_count_ = 0;
};

// All visible blocks. A document's blocks are split into kGroups ranges; a task is a (document,
// range), and a token's slot is the range.
class DenseWork {
 public:
  static constexpr bool kAccumulate = true; // the blocks of a range share the slot
  static constexpr int32_t kGroups = 16;

  DenseWork(Arena& arena, const Geometry& geometry, const Sizes& sizes, const Tiling& tiling,
            int64_t window);
  static double partials_per_token(const Sizes&, const Tiling&) { return 0; }
  static int32_t slots(const Sizes&) { return kGroups; }

  void build(Window* window, int64_t begin, int64_t end, int32_t proxy_head, const View& indices);

  int64_t task_count() const { return task_count_; }
  template <class Visit>
  void for_each_chunk(int64_t task, Visit&& visit) const {
    const Task& t = tasks_[task];
    const Document& document = geometry_.documents[t.document];
    for (int64_t block = t.block_begin; block < t.block_end; ++block)
      for (int32_t p = t.piece_begin; p < t.piece_end; ++p) {
        const Piece& piece = pieces_[p];
        const int64_t first_position = block * block_size_;
        // Positions rise by one, so the tokens that see the block are the last ones of the piece.
        const int64_t skip = std::max<int64_t>(0, first_position - piece.first_position);
        if (skip >= piece.tokens)
          continue;
        const int64_t keys = std::min<int64_t>(block_size_, document.k_len - first_position);
        const int32_t base = t.group * window_ + piece.first_token;
        visit(Chunk{document.k_begin + first_position, first_position, static_cast<int32_t>(keys),
                    base + static_cast<int32_t>(skip), base + piece.tokens, -1});
      }
  }
  int64_t reduce_count() const { return 0; }
  template <class Visit>
  void for_each_partial(int64_t, Visit&&) const {}

 private:
  struct Piece { // tokens of one run that lie in the window and see a key
    int32_t document, first_token, tokens;
    int64_t first_position;
  };
  struct Task {
    int32_t document, group, piece_begin, piece_end;
    int64_t block_begin, block_end;
  };

  const Geometry& geometry_;
  int32_t block_size_, window_;
  int32_t* position_;
  int32_t* items_; // [kGroups, window]
  uint8_t* used_;
  Piece* pieces_;
  Task* tasks_;
  int64_t task_count_ = 0;
};

} // namespace thresher::cpu
