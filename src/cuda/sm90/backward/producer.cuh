// The producer: takes work items, loads a block's K and V once per item, then streams the rows of
// the tokens that chose it. One warp, or four that share the rows' copies, of which the first does
// everything else.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm90/backward/config.h"
#include "cuda/sm90/common/async.cuh"
#include "cuda/sm90/common/entries.cuh"

namespace thresher::cuda::sm90::backward {

struct Maps {
  const CUtensorMap *q, *dout, *k, *v;
};
// What the consumers need to know of the tile's rows. `token`, `piece_slot`, `last_key`: of the
// tile's token number lane (lanes from kTokens on: anything).
template <int kHeads, bool kDeterministic>
__device__ __forceinline__ void describe_tile(Shared& s, const Params& p, int stage, int token,
                                              int piece_slot, int last_key, int first_head) {
  constexpr int kTokens = Config::kRows / kHeads;
  const int lane = threadIdx.x & 31;
  RowConstants& c = s.constants[stage];

  // Two neighbouring rows a lane; kHeads >= 4, so they are of one token.
  const int pair_key = __shfl_sync(~0u, last_key, 2 * lane / kHeads);
  *reinterpret_cast<uint32_t*>(c.last_key + 2 * lane) =
      static_cast<uint32_t>(static_cast<uint16_t>(pair_key)) * 0x10001u;
  const bool masked = __any_sync(~0u, pair_key < Config::kKeys - 1);
  if (lane < kTokens) {
    const int local = max(token, p.first_token) - p.first_token;
    if constexpr (kDeterministic) {
      constexpr int kPiece = kPieceRows<kHeads>;
      const int piece =
          (local * (p.q_heads / kPiece) + first_head / kPiece) * p.index.top_k + piece_slot;
      s.pieces[stage][lane] = token < 0 ? -1 : piece;
    } else {
      c.token[lane] = static_cast<uint16_t>(local);
    }
  }
  if (lane == 0)
    s.masked[stage] = masked;

  // Row constants: four rows a lane, lanes 0-15 lse, 16-31 delta.
  const int row = 4 * (lane & 15);
  const int row_token = __shfl_sync(~0u, token, row / kHeads);
  const int64_t from =
      static_cast<int64_t>(max(row_token, p.first_token) - p.first_token) * p.q_heads + first_head +
      row % kHeads;
  const float* source = (lane < 16 ? p.minus_lse : p.minus_delta) + from;
  float* target = (lane < 16 ? c.minus_lse : c.minus_delta) + row;
  ptx::copy_async_16(shared_u32(target), source, row_token >= 0);
  if (lane < 16)
    ptx::copy_async_4(shared_u32(c.exponent + row), p.exponent + from, row_token >= 0);
}

// This warp's share of the tile's copies; `list`: entries from `begin` on are the tile's.
template <int kHeads>
__device__ __forceinline__ void send_rows(Shared& s, const Params& p, const Maps& maps, int stage,
                                          const EntryList& list, int begin, int first_head) {
  constexpr int kShare = Config::kRows / kHeads / kProducerWarps<kHeads>; // tokens
  const int lane = threadIdx.x & 31;
  const int mine = (kProducerWarps<kHeads> == 1 ? 0 : (threadIdx.x >> 5 & 3) * kShare) + lane;
  const int token = list.token(__shfl_sync(~0u, list.entry, (begin + mine) & 31));
  uint64_t& full = s.rows_full[stage];
  if (lane < kShare) {
    // A row past the tensor's end reads as zeros.
    const int2 at = token < 0 ? make_int2(p.token_rows, 0) : split_row(token, p.token_rows);
    const uint32_t q = shared_u32(s.rows[stage][0]) + mine * kHeads * 128;
    const uint32_t dout = shared_u32(s.rows[stage][1]) + mine * kHeads * 128;
    constexpr int kHalfBytes = Config::kRows * 128;
    copy_box(q, maps.q, 0, first_head, at.x, at.y, full);
    copy_box(q + kHalfBytes, maps.q, Config::kHalf, first_head, at.x, at.y, full);
    copy_box(dout, maps.dout, 0, first_head, at.x, at.y, full);
    copy_box(dout + kHalfBytes, maps.dout, Config::kHalf, first_head, at.x, at.y, full);
  }
}

__device__ __forceinline__ void send_block(Shared& s, const Params& p, const Maps& maps, int slot,
                                           int key_begin, int kv_head) {
  uint64_t& full = s.block_full[slot];
  barrier_expect(full, 2 * Config::kBlockTileBytes);
  const int2 at = split_row(key_begin, p.key_rows);
  constexpr int kHalfBytes = Config::kKeys * 128;
  const uint32_t k = shared_u32(s.blocks[slot][0]), v = shared_u32(s.blocks[slot][1]);
  copy_box(k, maps.k, 0, kv_head, at.x, at.y, full);
  copy_box(k + kHalfBytes, maps.k, Config::kHalf, kv_head, at.x, at.y, full);
  copy_box(v, maps.v, 0, kv_head, at.x, at.y, full);
  copy_box(v + kHalfBytes, maps.v, Config::kHalf, kv_head, at.x, at.y, full);
}

template <int kHeads, bool kDeterministic>
__device__ __forceinline__ void produce(Shared& s, const Params& p, const Maps& maps) {
  constexpr int kWarps = kProducerWarps<kHeads>;
  const bool leads = kWarps == 1 || (threadIdx.x >> 5 & 3) == 0;
  constexpr int kTokens = Config::kRows / kHeads; // of a tile
  const int lane = threadIdx.x & 31;
  const int first = __ldg(p.index.segment_items + p.first_segment);
  const int work = (__ldg(p.index.segment_items + p.last_segment) - first) * p.parts;

  // Lane 0 holds the next ticket, which it asked for an item before.
  auto take = [&] { return leads && lane == 0 ? atomicAdd(p.next_item, 1) : 0; };
  int ticket = take();
  uint32_t tile = 0; // since the start: stage and parity follow from it
  for (uint32_t number = 0;; ++number) {
    const int slot = number % Config::kBlocks;
    int next = __shfl_sync(~0u, ticket, 0);
    if constexpr (kWarps > 1) { // the first warp tells the others
      if (leads && lane == 0)
        s.ticket[slot] = next;
      ptx::barrier_sync(kTicket, 32 * kWarps);
      next = s.ticket[slot];
    }
    barrier_wait(s.block_empty[slot], number / Config::kBlocks & 1 ^ 1);
    if (next >= work) {
      if (leads && lane == 0) {
        s.items[slot].pairs = 0;
        barrier_arrive(s.block_full[slot]);
      }
      return;
    }
    const int item_number = first + next / p.parts;
    const WorkItem item = p.index.items[item_number];
    const int part = next % p.parts;
    const int first_head = (item.proxy_head * p.parts + part) * kHeads;
    if (leads && lane == 0) {
      const int64_t segment =
          static_cast<int64_t>(item.window) * p.proxy_heads + item.proxy_head - p.first_segment;
      const int kv_head = first_head / (p.q_heads / p.kv_heads);
      s.items[slot] = {item.entry_count,
                       item.block_begin,
                       item.key_begin,
                       item.key_count,
                       kv_head,
                       first_head,
                       part,
                       static_cast<uint32_t>(segment * p.index.window_tokens * p.index.top_k +
                                             item.entry_begin)};
      if constexpr (kDeterministic)
        s.turns[slot] = make_turn(p.turns, p.index.rows, kv_head, item.row,
                                  __ldg(&p.index.order[item_number].x));
      send_block(s, p, maps, slot, item.key_begin, kv_head);
    }
    ticket = take();
    EntryList list(p.index, item, 0); // in step: neighbours' dQ rows meet in L2
    for (int chunk = 0; chunk < list.chunks; ++chunk) {
      const int count = min(32, item.entry_count - list.advance());
      for (int begin = 0; begin < count; begin += kTokens, ++tile) {
        const int stage = tile % Config::kStages;
        barrier_wait(s.rows_empty[stage], tile / Config::kStages & 1 ^ 1);
        if (leads) {
          const int from = (begin + lane) & 31;
          const Entry entry = __shfl_sync(~0u, list.entry, from);
          describe_tile<kHeads, kDeterministic>(
              s, p, stage, list.token(entry), BlockIndex::entry_slot(entry),
              __shfl_sync(~0u, list.last_key(), from), first_head);
          __syncwarp();
          if (lane == 0)
            barrier_expect(s.rows_full[stage], 2 * Config::kRowTileBytes);
          barrier_arrive_after_copies(s.rows_full[stage]);
        }
        send_rows<kHeads>(s, p, maps, stage, list, begin, first_head);
      }
    }
  }
}

} // namespace thresher::cuda::sm90::backward
