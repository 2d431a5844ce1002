"""MiniMax Sparse Attention in plain PyTorch: the definition, a page a function.

What a reader holds against the paper (arXiv 2606.13392) and what `python -m thresher selftest`
compares with. Any device, any float dtype; it computes in fp32 (fp64 for fp64 inputs), stores T x T
scores, and is as slow as that sounds. Autograd differentiates it. The functions take and return
what those of the same name in `thresher` do.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from . import _check
from .interface import MsaResult


def select_blocks(
    q_proxy: Tensor,
    k_proxy: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    top_k_blocks: int = 16,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    proxy_scale: float | None = None,
    layout: str | None = None,
) -> Tensor:
    """The blocks with the largest maximum of proxy scores, forced blocks first."""
    x, layout = _check.token_tensors({"q_proxy": q_proxy, "k_proxy": k_proxy}, layout)
    q_proxy, k_proxy = (_wide(t.detach()) for t in x.values())
    _check.proxy_heads(q_proxy, k_proxy)
    _check.selection_options(top_k_blocks, block_size, init_blocks, local_blocks)
    _check.cu_seqlens(cu_seqlens, q_proxy)
    scale = _check.scale("proxy_scale", proxy_scale, q_proxy.shape[-1])

    def one(q, k, cu):
        tokens, heads, _ = q.shape
        ids = torch.full((heads, tokens, top_k_blocks), -1, dtype=torch.int32, device=q.device)
        for begin, end in _documents(cu, tokens):
            n = end - begin
            blocks = -(-n // block_size)
            s = scale * _products(q[begin:end], k[begin:end])  # [Hp, n, n]
            s = s.masked_fill(s.isnan(), -torch.inf)  # NaN ranks below every number
            position = torch.arange(n, device=q.device)
            s = s.masked_fill(position > position[:, None], -torch.inf)
            s = torch.nn.functional.pad(s, (0, blocks * block_size - n), value=-torch.inf)
            score = s.unflatten(2, (blocks, block_size)).amax(3)  # [Hp, n, blocks]

            # Rank: forced blocks, then by score, ties to the lower id (the sort is stable).
            block, own = torch.arange(blocks, device=q.device), position[:, None] // block_size
            visible = block <= own
            forced = visible & ((block < init_blocks) | (block > own - local_blocks))
            order = score.sort(dim=2, descending=True, stable=True).indices
            rank = torch.empty_like(order).scatter_(2, order, block.expand_as(order))
            rank = torch.where(forced, -1, torch.where(visible, rank, blocks))
            kept = rank.sort(dim=2, stable=True).indices[..., :top_k_blocks]
            kept = torch.where(kept <= own, kept, blocks)  # invisible: to the right, then -1
            kept = kept.sort(dim=2).values
            kept = torch.where(kept == blocks, -1, kept).to(torch.int32)
            ids[:, begin:end, : kept.shape[2]] = kept
        return ids

    return _each_row(one, q_proxy, k_proxy, cu_seqlens=cu_seqlens)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    block_size: int = 128,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    check_indices: bool | None = None,
    layout: str | None = None,
):
    """Softmax attention over the visible keys of the given blocks."""
    x, layout = _check.token_tensors({"q": q, "k": k, "v": v}, layout)
    q, k, v = x.values()
    _check.main_heads(q, k, v)
    _check.block_indices(block_indices, q)
    scale = _check.scale("softmax_scale", softmax_scale, q.shape[-1])

    def one(q, k, v, ids, cu):
        parts = [
            _main(q[b:e], k[b:e], v[b:e], _chosen(ids[:, b:e], e - b, block_size), scale)
            for b, e in _documents(cu, q.shape[0])
        ]
        return _whole(parts, q, 2)

    out, lse = _each_row(one, _wide(q), _wide(k), _wide(v), block_indices, cu_seqlens=cu_seqlens)
    out = _back(out.to(q.dtype), layout)
    return (out, lse.detach()) if return_lse else out


def msa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor,
    k_proxy: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    top_k_blocks: int = 16,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    softmax_scale: float | None = None,
    proxy_scale: float | None = None,
    block_indices: Tensor | None = None,
    kl: str | None = "forward",
    kl_buffer: Tensor | None = None,
    deterministic: bool | None = None,
    check_indices: bool | None = None,
    layout: str | None = None,
) -> MsaResult:
    """Selection, sparse attention and the KL rows between its mean and the proxy."""
    if block_indices is None:
        block_indices = select_blocks(
            q_proxy,
            k_proxy,
            cu_seqlens=cu_seqlens,
            top_k_blocks=top_k_blocks,
            block_size=block_size,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            proxy_scale=proxy_scale,
            layout=layout,
        )
    return _attend(
        (q, k, v, q_proxy, k_proxy),
        block_indices,
        block_size,
        cu_seqlens,
        softmax_scale,
        proxy_scale,
        kl,
        kl_buffer,
        layout,
    )


def msa_warmup_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor,
    k_proxy: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    proxy_scale: float | None = None,
    kl: str | None = "forward",
    kl_buffer: Tensor | None = None,
    deterministic: bool | None = None,
    layout: str | None = None,
) -> MsaResult:
    """The same with every visible key in the place of the selected ones."""
    return _attend(
        (q, k, v, q_proxy, k_proxy),
        None,
        1,
        cu_seqlens,
        softmax_scale,
        proxy_scale,
        kl,
        kl_buffer,
        layout,
    )


# --- the mathematics ----------------------------------------------------------------------------
def _main(q, k, v, chosen, scale):
    """out [n, Hq, D], lse [n, Hq] and P [Hq, n, n] of one document; chosen: bool [Hp, n, n]."""
    mask = chosen.repeat_interleave(q.shape[1] // chosen.shape[0], 0)
    S = (scale * _products(q, k)).masked_fill(~mask, -torch.inf)
    empty = ~mask.any(2, keepdim=True)  # rows without a key
    P = S.masked_fill(empty, 0).softmax(2).masked_fill(~mask, 0)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    # A key that is not attended to must not matter even if it is NaN.
    v = v.masked_fill(~mask.any(1).mT[..., None], 0)
    out = torch.einsum("hij,jhd->ihd", P, v)
    return out, S.logsumexp(2).mT, P


def _kl(P, q_proxy, k_proxy, chosen, scale):
    """KL rows [n, Hp]: sum_j teacher_j (ln teacher_j - ln student_j), in the log domain."""
    heads = chosen.shape[0]
    teacher = P.detach().unflatten(0, (heads, -1)).mean(1)
    S = (scale * _products(q_proxy, k_proxy)).masked_fill(~chosen, -torch.inf)
    log_student = S - S.logsumexp(2, keepdim=True)
    terms = teacher * (teacher.log() - log_student)
    return torch.where(chosen & (teacher > 0), terms, 0).sum(2).mT


def _products(q, k):
    """<q_i, k_j>: [Hq, n, n] for q [n, Hq, D], k [n, Hk, D]."""
    return torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))


def _chosen(ids, n, block_size):
    """bool [Hp, n, n]: key j is visible to query i and lies in one of its blocks."""
    blocks = -(-n // block_size)
    place = torch.where((ids < 0) | (ids >= blocks), blocks, ids).long()
    kept = torch.zeros(*ids.shape[:2], blocks + 1, dtype=torch.bool, device=ids.device)
    kept = kept.scatter(2, place, True)[..., :blocks]
    return kept.repeat_interleave(block_size, 2)[..., :n] & _visible(n, ids.device)


def _visible(n, device):
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


# --- documents, layouts -------------------------------------------------------------------------
def _attend(x, ids, block_size, cu_seqlens, softmax_scale, proxy_scale, kl, kl_buffer, layout):
    names = ("q", "k", "v", "q_proxy", "k_proxy")
    tensors, layout = _check.token_tensors(dict(zip(names, x)), layout)
    x = tuple(tensors.values())
    _check.main_heads(*x[:3])
    _check.divides("q_proxy", x[3].shape[-2], "proxy heads", x[0].shape[-2], "query heads of q")
    _check.proxy_heads(*x[3:])
    softmax_scale = _check.scale("softmax_scale", softmax_scale, x[0].shape[-1])
    proxy_scale = _check.scale("proxy_scale", proxy_scale, x[3].shape[-1])
    _check.cu_seqlens(cu_seqlens, x[0])
    if ids is not None:
        _check.block_indices(ids, x[0], heads=x[3].shape[-2])

    def one(q, k, v, q_proxy, k_proxy, *rest):
        *ids, cu = rest
        parts = []
        for b, e in _documents(cu, q.shape[0]):
            n = e - b
            if ids:
                chosen = _chosen(ids[0][:, b:e], n, block_size)
            else:
                chosen = _visible(n, q.device).expand(q_proxy.shape[1], n, n)
            out, lse, P = _main(q[b:e], k[b:e], v[b:e], chosen, softmax_scale)
            rows = _kl(P, q_proxy[b:e], k_proxy[b:e], chosen, proxy_scale)
            parts.append((out, lse, rows))
        return _whole(parts, q, 3, q_proxy)

    more = () if ids is None else (ids,)
    out, lse, rows = _each_row(one, *(_wide(t) for t in x), *more, cu_seqlens=cu_seqlens)
    out = _back(out.to(x[0].dtype), layout)
    if kl is None:
        return MsaResult(out, None, None, lse.detach(), ids)
    if kl == "backward":
        if kl_buffer is not None:
            kl_buffer.copy_(rows.detach())
        rows = rows - rows.detach()
    real = max(x[0].shape[:-2].numel(), 1) if cu_seqlens is None else cu_seqlens[-1].clamp(min=1)
    return MsaResult(out, rows, rows.sum() / (real * x[3].shape[-2]), lse.detach(), ids)


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _documents(cu_seqlens, tokens):
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    return [(b, e) for b, e in pairwise(bounds) if e > b]


def _whole(parts, q, count, q_proxy=None):
    """Documents put together; rows of padding: out 0, lse -inf, kl 0."""
    columns = list(zip(*((p[:count]) for p in parts))) if parts else [()] * count
    shapes = [q.shape[1:], q.shape[1:2], q_proxy.shape[1:2] if q_proxy is not None else None]
    results = []
    for column, shape, fill in zip(columns, shapes, (0.0, -torch.inf, 0.0)):
        rest = q.shape[0] - sum(c.shape[0] for c in column)
        results.append(torch.cat([*column, q.new_full((rest, *shape), fill)]))
    return tuple(results)


def _each_row(function, *tensors, cu_seqlens):
    """function on packed tensors; batched ones row by row."""
    if tensors[0].dim() == 3:
        return function(*tensors, cu_seqlens)
    rows = [function(*(t[i] for t in tensors), None) for i in range(tensors[0].shape[0])]
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    return tuple(torch.stack(column) for column in zip(*rows))


def _back(out, layout):
    return out.transpose(1, 2) if layout == "bhsd" else out
