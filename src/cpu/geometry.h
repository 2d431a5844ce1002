// The batch as runs of queries and documents of keys, and the constants of a call in the form that
// the kernels take.
#pragma once

#include "core/shapes.h"
#include "cpu/arena.h"
#include "cpu/args.h"

namespace thresher::cpu {

// Runs in token order, documents in key order.
struct Geometry {
  Geometry(Arena& arena, const Problem& problem, const Shapes& shapes);
  // Reads the fragment arrays; throws if documents overlap.
  void build(const Problem& problem, const Shapes& shapes);

  Run* runs;
  Document* documents;
  int64_t run_count = 0, document_count = 0;
  int64_t real_tokens = 0; // the tokens from here on are padding
  int64_t max_blocks;      // bound on the blocks of all documents

 private:
  int32_t* order_;
};

Sizes sizes_of(const Problem& problem, const Shapes& shapes);
Tiling tiling_of(const Sizes& sizes);
View token_tensor(const Tensor& tensor); // [.., heads, dim]
View row_tensor(const Tensor& tensor);   // [.., heads]
View index_tensor(const Tensor& tensor); // [Hp, T, K] or [N, Hp, S, K]

// Tokens of a window that needs `bytes_per_token` of partial results, in `slots` of each token.
int64_t window_tokens(double bytes_per_token, int32_t slots, int64_t tokens);

inline int64_t padded(int64_t n) {
  return (n + 15) / 16 * 16;
}

} // namespace thresher::cpu
