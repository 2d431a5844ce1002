// Block selection on tensor cores that every GPU since Ampere has (mma.sync).
//
//   order_tiles   lists the query tiles that need scores, longest first, and how many they are
//   score_tiles   q_proxy k_proxy^T, block maximum and top-k in one pass; persistent
//   finish_rows   merges key splits, adds the forced blocks, sorts, writes every row
//
// A token that sees at most K blocks keeps them all and needs no score, and the blocks that are
// forced need none either.
#pragma once

#include "cuda/common/topk.cuh"
#include "cuda/index/geometry.h"

#include <cuda_runtime_api.h>

namespace thresher::cuda::portable {

struct SelectArgs {
  Geometry geometry;
  BlockIdsView<int32_t> block_ids;
  int32_t proxy_heads = 0, proxy_kv_heads = 0; // Hp, Hpk
  int32_t dim = 0;                             // Dp, as given
  int32_t block_size = 0, top_k = 0, init_blocks = 0, local_blocks = 0;
  float scale = 0;     // absolute value
  bool negate = false; // the scale is negative: q_proxy changes sign instead

  // A tile holds tile_tokens tokens with tile_heads heads each, all on one proxy key head.
  int32_t tile_tokens = 0, tile_heads = 0, head_groups = 0; // head_groups: a key head's tiles
  int32_t tile_slots = 0;
  int32_t splits = 1; // pieces that a tile's keys are cut into

  int32_t* tiles = nullptr;         // [tile_slots] slots that need scores, longest first
  int32_t* counters = nullptr;      // [2] number of those tiles; next unit of work
  Candidate* candidates = nullptr;  // [Hp, T, splits, scored()] if splits > 1
  Candidate* list_memory = nullptr; // top-k lists where shared memory is too small

  // Places that scores decide.
  THRESHER_HOST_DEVICE int32_t scored() const { return top_k - init_blocks - local_blocks; }
};

// What a call asks for, and how its rows fall into tiles of at most `rows`.
SelectArgs select_args(const SelectParams& params, const Shapes& shapes);
void choose_tiles(SelectArgs& args, int32_t rows);
// Units of work at one split.
int64_t tile_units(const SelectArgs& args);

void order_tiles(const SelectArgs& args, cudaStream_t stream);
void finish_rows(const SelectArgs& args, cudaStream_t stream);

// Persistent grid of score_tiles, and where its top-k lists lie.
struct ScorePlan {
  int32_t rows = 0;   // rows of a tile
  int32_t blocks = 0; // CTAs that run at a time
  size_t shared_bytes = 0;
  bool lists_in_shared = true;
  int32_t list_entries = 0; // a CTA's candidates in global memory otherwise
};

// kDim: Dp padded. Explicitly instantiated in score_*.cu.
template <class T, int kDim>
struct ScoreTiles {
  // Lists go to global memory if a CTA would need more than `shared_limit` bytes of shared memory.
  static ScorePlan plan(int32_t scored, size_t shared_limit);
  static void run(const SelectArgs& args, const ScorePlan& plan, const TensorView<const T>& q_proxy,
                  const TensorView<const T>& k_proxy, cudaStream_t stream);
};

inline constexpr int kMaxSplits = 8; // finish_rows holds kMaxSplits * 128 candidates in registers

// What tests and measurements may override; 0: chosen from shapes and device.
struct SelectOptions {
  size_t shared_limit = 0; // bytes of shared memory of a CTA
  int32_t splits = 0;
};
size_t select_workspace_size(const SelectParams& params, const Shapes& shapes,
                             const SelectOptions& options);
void run_select(const SelectParams& params, const Shapes& shapes, const Workspace& workspace,
                const SelectOptions& options, cudaStream_t stream);

} // namespace thresher::cuda::portable
