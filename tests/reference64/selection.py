"""Block scores, the exact selection, and what is wrong with a given selection.

score[t, p, b] = max over visible j in b of proxy_scale * <q_proxy[t, p], k_proxy[j, p//ratio]>
"""

from __future__ import annotations

import torch

from .geometry import Fragment, Problem


def _proxy_scores(problem, fragment, tokens, q_proxy, k_proxy, absolute=False):
    """float64 [Hp, n, k_len]; absolute: the same dot products of absolute values."""
    ratio = q_proxy.shape[1] // k_proxy.shape[1]
    scale = problem.proxy_scale if problem.proxy_scale is not None else q_proxy.shape[2] ** -0.5
    rows = slice(fragment.k_begin, fragment.k_begin + fragment.k_len)
    q = q_proxy[tokens].double()
    k = k_proxy[rows].double().repeat_interleave(ratio, dim=1)
    if absolute:
        q, k, scale = q.abs(), k.abs(), abs(scale)
    return scale * torch.einsum("nhd,jhd->hnj", q, k)


def _block_max(problem: Problem, fragment: Fragment, tokens, per_key):
    """Maximum over the visible keys of each block, [Hp, n, blocks]; -inf where none is visible."""
    keys = torch.arange(fragment.k_len, device=per_key.device)
    hidden = keys[None, :] > fragment.positions(tokens)[:, None]
    per_key = per_key.masked_fill(hidden, float("-inf"))
    tail = -fragment.k_len % problem.block_size
    per_key = torch.nn.functional.pad(per_key, (0, tail), value=float("-inf"))
    return per_key.unflatten(2, (-1, problem.block_size)).amax(3)


def block_scores(problem: Problem, fragment: Fragment, tokens, q_proxy, k_proxy) -> torch.Tensor:
    """float64 [Hp, n, blocks of the fragment]."""
    per_key = _proxy_scores(problem, fragment, tokens, q_proxy, k_proxy)
    return _block_max(problem, fragment, tokens, per_key)


def _visible_blocks(problem: Problem, fragment: Fragment, tokens) -> torch.Tensor:
    return ((fragment.positions(tokens) + problem.block_size) // problem.block_size).clamp_min(0)


def _forced(problem: Problem, visible: torch.Tensor, blocks: int) -> torch.Tensor:
    """bool [n, blocks]: init and local blocks of tokens with `visible` visible blocks."""
    ids = torch.arange(blocks, device=visible.device)[None, :]
    seen = visible[:, None]
    first = ids < problem.init_blocks
    last = ids >= seen - problem.local_blocks
    return (first | last) & (ids < seen)


def best_blocks(
    problem: Problem, q_proxy: torch.Tensor, k_proxy: torch.Tensor, tokens=None
) -> torch.Tensor:
    """The selection in exact arithmetic, int32 [Hp, T, K]; rows that are not visited stay -1.

    Order of preference: forced blocks, then the score, then the lower id. NaN is below all.
    """
    tokens_total, heads = q_proxy.shape[:2]
    device = q_proxy.device
    result = torch.full((heads, tokens_total, problem.top_k_blocks), -1, dtype=torch.int32)
    result = result.to(device)
    for f, rows in problem.chunks(tokens, device, heads):
        scores = block_scores(problem, f, rows, q_proxy, k_proxy)
        visible = _visible_blocks(problem, f, rows)
        forced = _forced(problem, visible, scores.shape[2])
        for i, row in enumerate(rows.tolist()):
            n = int(visible[i])
            for p in range(heads):
                values = scores[p, i, :n].tolist()

                keep = forced[i].tolist()
                order = [
                    (not keep[b], s != s, -s if s == s else 0.0, b) for b, s in enumerate(values)
                ]
                kept = sorted(b for *_, b in sorted(order)[: problem.top_k_blocks])
                result[p, row, : len(kept)] = torch.tensor(kept, dtype=torch.int32, device=device)
    return result


def selection_faults(
    problem: Problem,
    block_indices: torch.Tensor,
    q_proxy: torch.Tensor,
    k_proxy: torch.Tensor,
    *,
    epsilon: float,
    tokens=None,
) -> list[str]:
    """What is wrong with a selection, as sentences (empty: it is right).

    epsilon: machine epsilon of the accumulation. A dot product of Dp terms may be off by
    (Dp + 2) * epsilon * sum |q_i k_i|; a left-out block may beat a kept one by the two bounds.
    The scores must be finite.
    """
    faults: list[str] = []
    heads, total, width = block_indices.shape
    gamma = (q_proxy.shape[2] + 2) * epsilon
    if block_indices.dtype != torch.int32:
        faults.append(f"dtype is {block_indices.dtype}")
    if (heads, total, width) != (q_proxy.shape[1], q_proxy.shape[0], problem.top_k_blocks):
        return [*faults, f"shape is {tuple(block_indices.shape)}"]

    def report(what, bad, rows):
        if bad.any():
            p, i = bad.nonzero()[0].tolist()
            t = int(rows[i])
            faults.append(f"{what}: head {p}, token {t}: {block_indices[p, t].tolist()}")

    covered = torch.zeros(total, dtype=torch.bool, device=q_proxy.device)
    for f in problem.fragments:
        covered[f.q_begin : f.q_end] = True
    padding = (~covered).nonzero()[:, 0]
    report("a padding token selects", (block_indices[:, padding] != -1).any(2), padding)

    for f, rows in problem.chunks(tokens, q_proxy.device, heads):
        ids = block_indices[:, rows].long()
        visible = _visible_blocks(problem, f, rows)
        blocks = -(-f.k_len // problem.block_size)
        slot = torch.arange(width, device=ids.device)
        expected = visible.clamp_max(width)[None, :, None]
        used = slot[None, None, :] < expected
        report("wrong number of blocks", ((ids >= 0) != used).any(2), rows)
        report("not -1 after the last block", ((ids != -1) & ~used).any(2), rows)
        report("a block that is not visible", (used & (ids >= visible[None, :, None])).any(2), rows)
        rising = (ids[:, :, 1:] > ids[:, :, :-1]) | ~used[:, :, 1:]
        report("not ascending or not unique", ~rising.all(2), rows)
        if faults or blocks == 0:
            continue
        kept = torch.zeros(heads, len(rows), blocks + 1, dtype=torch.bool, device=ids.device)
        kept.scatter_(2, torch.where(used, ids, blocks), True)
        kept = kept[:, :, :blocks]
        forced = _forced(problem, visible, blocks)[None]
        report("a forced block is missing", (forced & ~kept).any(2), rows)

        score = block_scores(problem, f, rows, q_proxy, k_proxy)
        size = _proxy_scores(problem, f, rows, q_proxy, k_proxy, absolute=True)
        bound = gamma * _block_max(problem, f, rows, size)
        seen = torch.arange(blocks, device=ids.device)[None, None, :] < visible[None, :, None]
        infinity = float("inf")
        left_out = torch.where(seen & ~kept, score - bound, -infinity).amax(2)
        worst_kept = torch.where(kept & ~forced, score + bound, infinity).amin(2)
        report("a left-out block beats a kept one", left_out > worst_kept, rows)
    return faults
