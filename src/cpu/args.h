// What passes between the drivers (compiled once) and the kernels (compiled once per instruction
// set): plain structs only. Nothing here may be a function or a template, because a symbol that two
// instruction sets share would be merged by the linker and could fault on an older processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thresher::cpu {

// A token tensor: row (token, head) starts at
//   data + (token / per_row) * batch + (token % per_row) * token_stride + head * head_stride.
struct View {
  void* data = nullptr;
  int64_t batch = 0, token = 0, head = 0; // strides in elements
  int64_t per_row = 1;
};

// A fragment that has queries: tokens q_begin .. q_begin + q_len, query i at position
// first_position + i (negative: it sees no key).
struct Run {
  int64_t q_begin;
  int64_t first_position;
  int32_t q_len;
  int32_t document;
};

// Key rows that belong together. Several runs may share one. Blocks are numbered through all
// documents: block b of this one is first_block + b.
struct Document {
  int64_t k_begin;
  int64_t first_block;
  int32_t k_len;
  int32_t blocks;
};

struct Sizes {
  int32_t q_heads, kv_heads, proxy_heads, proxy_kv_heads;
  int32_t group; // query heads of one proxy head
  int32_t dim, proxy_dim;
  int32_t padded_dim, padded_proxy_dim; // row length of packed tiles
  int32_t block_size, top_k;
  double softmax_scale, proxy_scale;
};

// Tile extents; functions of the shapes only, so results do not depend on the threads.
struct Tiling {
  int32_t rows;         // (token, head) rows of one main tile
  int32_t tokens;       // tokens of one main tile
  int32_t chunk_tokens; // tokens whose teacher rows are held at once
  int32_t row_stride;   // block_size rounded up: row length of score tiles
};

// (token, slot) pairs that attend to one block: items[begin .. end) of the window.
struct Chunk {
  int64_t key_row;        // of the block's first key
  int64_t first_position; // of the block's first key
  int32_t keys;
  int32_t begin, end;
  int32_t partial; // where key gradients go: -1 the accumulators, otherwise this partial buffer
};

// A span of query tokens that is processed at once, for one proxy head.
struct Window {
  int64_t token0;
  int32_t tokens;
  int32_t proxy_head;
  const int32_t* position; // [tokens], of each query in its document
  const int32_t* items;    // token * slots + slot
  const uint8_t* used;     // [tokens, slots]: 1 where a partial result was written
};

struct AttendArgs {
  Sizes sizes;
  Tiling tiling;
  View q, k, v, q_proxy, k_proxy, out, lse, proxy_lse;
  bool proxy;
  bool accumulate; // several chunks write to one slot (warm-up): merge instead of store
  int32_t slots;   // partial results a token has
  // Partial results, all of the accumulation type.
  void* partial_out;       // [tokens, slots, group, padded_dim], not normalised
  void* partial_max;       // [tokens, slots, group]
  void* partial_sum;       // [tokens, slots, group]
  void* partial_proxy_max; // [tokens, slots]
  void* partial_proxy_sum; // [tokens, slots]
};

struct BackwardArgs {
  Sizes sizes;
  Tiling tiling;
  View q, k, v, q_proxy, k_proxy, out, lse, proxy_lse, dout, dkl;
  View dq, dq_proxy, kl;
  View dk, dv, dk_proxy; // accumulators, of the accumulation type
  bool need_dq, need_dk, need_dv, need_dq_proxy, need_dk_proxy, need_kl;
  bool accumulate;
  int32_t slots;
  void* delta;            // [tokens, group]
  void* partial_dq;       // [tokens, slots, group, padded_dim]
  void* partial_dq_proxy; // [tokens, slots, padded_proxy_dim]
  void* partial_kl;       // [tokens, slots]
  void* partial_keys;     // [partials, key_partial_size]: dk, dv of each kv head, dk_proxy
  int64_t key_partial_size;
};

struct SelectArgs {
  Sizes sizes;
  View q_proxy, k_proxy;
  View indices; // int32 rows of top_k
  int32_t init_blocks, local_blocks;
};

// One tile of selection rows. Row r of the run is token r / heads, head r % heads of those on
// proxy_kv_head.
struct SelectTile {
  Run run;
  Document document;
  int64_t first_row;
  int32_t rows;
  int32_t proxy_kv_head;
};

// The entry points of one instruction set for one dtype.
struct Kernels {
  const char* isa;
  size_t (*select_scratch)(const SelectArgs&);
  void (*select)(const SelectArgs&, const SelectTile&, void* scratch);
  size_t (*attend_scratch)(const Sizes&, const Tiling&, int32_t slots); // the combination's too
  void (*attend)(const AttendArgs&, const Window&, const Chunk&, void* scratch);
  void (*attend_reset)(const AttendArgs&, const Window&, int32_t token_begin, int32_t token_end);
  void (*attend_combine)(const AttendArgs&, const Window&, int32_t token_begin, int32_t token_end,
                         void* scratch);
  size_t (*backward_scratch)(const Sizes&, const Tiling&);
  void (*backward_delta)(const BackwardArgs&, const Window&, int32_t token_begin,
                         int32_t token_end);
  void (*backward)(const BackwardArgs&, const Window&, const Chunk&, void* scratch);
  void (*backward_reset)(const BackwardArgs&, const Window&, int32_t token_begin,
                         int32_t token_end);
  void (*backward_reduce)(const BackwardArgs&, const Window&, const Chunk&);
  void (*backward_combine)(const BackwardArgs&, const Window&, int32_t token_begin,
                           int32_t token_end);
  // Rows [begin, end) of accumulators to the output dtype.
  void (*store_rows)(const View& to, const View& from, int64_t begin, int64_t end, int32_t heads,
                     int32_t dim);
};

// Rows of a selection tile: a multiple of 48, the least common multiple of the row groups of the
// products for 4, 8 and 16 lanes, so that a score never depends on where in the tile its row lies.
enum { kSelectRows = 192, kSelectRowStep = 48, kSelectKeys = 256 };

} // namespace thresher::cpu
