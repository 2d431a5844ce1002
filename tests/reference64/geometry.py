"""Which keys a query sees: fragments, positions, blocks.

A fragment is a run of consecutive queries of one document. Its i-th query stands at position
k_len - q_len + i of the document, whose keys start at row k_begin, and sees keys 0..position.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fragment:
    q_begin: int
    q_end: int
    k_begin: int
    k_len: int

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Document positions of token rows of this fragment; negative: no key is visible."""
        return self.k_len - (self.q_end - self.q_begin) + (tokens - self.q_begin)


@dataclass(frozen=True)
class Problem:
    fragments: tuple[Fragment, ...]
    block_size: int = 128
    top_k_blocks: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    softmax_scale: float | None = None  # None: D ** -0.5
    proxy_scale: float | None = None  # None: Dp ** -0.5

    def chunks(
        self, tokens: torch.Tensor | None, device: torch.device, heads: int
    ) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """(fragment, token rows) such that [heads, rows, k_len] stays small.

        tokens: sorted rows to visit, or None for every real token.
        """
        for f in self.fragments:
            if tokens is None:
                rows = torch.arange(f.q_begin, f.q_end, device=device)
            else:
                rows = tokens[(tokens >= f.q_begin) & (tokens < f.q_end)].to(device)
            if rows.numel():
                step = max(1, 8_000_000 // (heads * max(1, f.k_len)))
                for chunk in rows.split(step):
                    yield f, chunk


def packed(cu_seqlens: Sequence[int] | torch.Tensor, **options) -> Problem:
    """One fragment a document."""
    ends = [int(x) for x in cu_seqlens]
    return Problem(tuple(Fragment(a, b, a, b - a) for a, b in itertools.pairwise(ends)), **options)


def batched(batch: int, length: int, **options) -> Problem:
    """Every batch row is a document; rows are stored one after the other."""
    return packed([i * length for i in range(batch + 1)], **options)


def attended_keys(
    problem: Problem,
    fragment: Fragment,
    tokens: torch.Tensor,
    block_indices: torch.Tensor | None,
    proxy_heads: int,
) -> torch.Tensor:
    """bool [Hp, len(tokens), k_len]: visible and, if a selection is given, in a selected block.

    An id that is out of range or of a later block attends to nothing; a repeated id counts once.
    """
    keys = torch.arange(fragment.k_len, device=tokens.device)
    visible = keys[None, :] <= fragment.positions(tokens)[:, None]
    if block_indices is None:
        return visible.expand(proxy_heads, -1, -1)
    blocks = -(-fragment.k_len // problem.block_size)
    ids = block_indices[:, tokens].long()
    ids = torch.where((ids >= 0) & (ids < blocks), ids, blocks)  # column `blocks`: nowhere
    chosen = torch.zeros(proxy_heads, len(tokens), blocks + 1, dtype=torch.bool, device=ids.device)
    chosen.scatter_(2, ids, True)
    return chosen[:, :, keys // problem.block_size] & visible


def read_keys(
    problem: Problem, keys_total: int, block_indices: torch.Tensor, proxy_heads: int
) -> torch.Tensor:
    """bool [Hp, Tk]: some query attends to the key through this proxy head."""
    device = block_indices.device
    read = torch.zeros(proxy_heads, keys_total, dtype=torch.bool, device=device)
    for f, rows in problem.chunks(None, device, proxy_heads):
        keys = slice(f.k_begin, f.k_begin + f.k_len)
        read[:, keys] |= attended_keys(problem, f, rows, block_indices, proxy_heads).any(1)
    return read
