// Units of work of the scoring kernels: a tile of queries, the heads of it, a piece of its keys.
#pragma once

#include "cuda/portable/select/select.h"

namespace thresher::cuda::portable {

// What a CTA works on next.
struct ScoreUnit {
  QueryTile tile;
  int32_t first_head = 0, heads = 0, key_head = 0;
  int32_t split = 0;
  int32_t first_block = 0, end_block = 0; // to be scored, by any row of the tile
};

// The blocks that the scores of a query at `position` decide on: [init_blocks, this).
__device__ __forceinline__ int32_t scored_end(const SelectArgs& args, int32_t position) {
  const int32_t visible = position < 0 ? 0 : position / args.block_size + 1;
  return visible <= args.top_k ? 0 : visible - args.local_blocks;
}

__device__ __forceinline__ ScoreUnit unpack_unit(const SelectArgs& args, int32_t unit) {
  ScoreUnit result;
  const int32_t groups = args.proxy_kv_heads * args.head_groups;
  const int32_t piece = unit / groups, group = unit - piece * groups;
  const int32_t tile = piece / args.splits;
  result.split = piece - tile * args.splits;
  result.tile = query_tile(args.geometry, args.tiles[tile], args.tile_tokens);
  const int32_t heads_per_key = args.proxy_heads / args.proxy_kv_heads;
  result.key_head = group / args.head_groups;
  const int32_t within = (group - result.key_head * args.head_groups) * args.tile_heads;
  result.first_head = result.key_head * heads_per_key + within;
  result.heads = min(args.tile_heads, heads_per_key - within);
  const int32_t end = scored_end(args, result.tile.first_position + result.tile.tokens - 1);
  const int32_t blocks = end - args.init_blocks;
  const int32_t share = (blocks + args.splits - 1) / args.splits;
  result.first_block = args.init_blocks + min(blocks, result.split * share);
  result.end_block = args.init_blocks + min(blocks, (result.split + 1) * share);
  return result;
}

} // namespace thresher::cuda::portable
