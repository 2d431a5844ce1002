"""Forward, KL rows and the five gradients, by their formulas.

S = softmax_scale <q, k_j>     P = softmax_j(S)        out = sum_j P v_j     lse = ln sum_j e^S
teacher = mean_G P             student = e^(s_proxy - proxy_lse)
kl = sum_j teacher (ln teacher - ln student)
dS = P (<dout, v_j> - <dout, out>)        dS_proxy = dkl (student - teacher)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .geometry import Problem, attended_keys

INFINITY = float("inf")


class Inputs(NamedTuple):
    q: torch.Tensor  # [T, Hq, D]
    k: torch.Tensor  # [Tk, Hkv, D]
    v: torch.Tensor  # [Tk, Hkv, D]
    q_proxy: torch.Tensor  # [T, Hp, Dp]
    k_proxy: torch.Tensor  # [Tk, Hpk, Dp]


class Rows(NamedTuple):
    """Results of every token; rows that were not visited are 0 (lse -inf), as padding is."""

    out: torch.Tensor  # [T, Hq, D]
    lse: torch.Tensor  # [T, Hq]
    proxy_lse: torch.Tensor  # [T, Hp]
    kl: torch.Tensor  # [T, Hp]


class Gradients(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_proxy: torch.Tensor
    k_proxy: torch.Tensor


def _by_kv_head(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[n, heads, dim] -> [kv heads, heads per kv head * n, dim]: all that reads one kv head."""
    return rows.double().transpose(0, 1).reshape(kv_heads, -1, rows.shape[2])


def _by_token(stacked: torch.Tensor, tokens: int) -> torch.Tensor:
    """The way back: [kv heads, heads per kv head * n, dim] -> [n, heads, dim]."""
    return stacked.reshape(-1, tokens, stacked.shape[2]).transpose(0, 1)


def _scales(problem: Problem, x: Inputs) -> tuple[float, float]:
    main, proxy = problem.softmax_scale, problem.proxy_scale
    return (
        x.q.shape[2] ** -0.5 if main is None else main,
        x.q_proxy.shape[2] ** -0.5 if proxy is None else proxy,
    )


class _Chunk(NamedTuple):
    """Some rows of one fragment. Stacked: [kv heads, heads per kv head * n, ...]; else by head."""

    keys: slice
    q: torch.Tensor  # stacked
    k: torch.Tensor  # [Hkv, j, D]
    v: torch.Tensor
    q_proxy: torch.Tensor  # stacked
    k_proxy: torch.Tensor  # [Hpk, j, Dp]
    lse: torch.Tensor  # [Hq, n]
    P: torch.Tensor  # stacked, [.., j]
    proxy_lse: torch.Tensor  # [Hp, n]
    log_student: torch.Tensor  # [Hp, n, j]; 0 where not attended
    student: torch.Tensor  # [Hp, n, j]
    teacher: torch.Tensor  # [Hp, n, j]


def _softmax(scores: torch.Tensor, attended: torch.Tensor):
    """(lse, probabilities); a row without a key has lse -inf and probabilities 0."""
    scores = scores.masked_fill(~attended, -INFINITY)
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -INFINITY), scores
    lse = scores.logsumexp(-1)
    shift = lse.masked_fill(lse == -INFINITY, 0.0)
    return lse, (scores - shift[..., None]).exp()


def _chunk(problem: Problem, x: Inputs, fragment, tokens, block_indices) -> _Chunk:
    q_heads, proxy_heads, n = x.q.shape[1], x.q_proxy.shape[1], len(tokens)
    scale, proxy_scale = _scales(problem, x)
    keys = slice(fragment.k_begin, fragment.k_begin + fragment.k_len)
    k, v, k_proxy = (t[keys].double().transpose(0, 1) for t in (x.k, x.v, x.k_proxy))
    q = _by_kv_head(x.q[tokens], x.k.shape[1])
    q_proxy = _by_kv_head(x.q_proxy[tokens], x.k_proxy.shape[1])

    # Heads lie in order, so main head h is row h of [Hq, n, j] and its proxy head is h // G.
    S = (scale * (q @ k.mT)).reshape(q_heads, n, fragment.k_len)
    s_proxy = (proxy_scale * (q_proxy @ k_proxy.mT)).reshape(proxy_heads, n, fragment.k_len)
    attended = attended_keys(problem, fragment, tokens, block_indices, proxy_heads)
    lse, P = _softmax(S, attended.repeat_interleave(q_heads // proxy_heads, dim=0))
    proxy_lse, student = _softmax(s_proxy, attended)
    log_student = torch.where(attended, s_proxy - proxy_lse[..., None], 0.0)
    teacher = P.unflatten(0, (proxy_heads, -1)).mean(1)
    P = P.reshape(x.k.shape[1], -1, fragment.k_len)
    return _Chunk(keys, q, k, v, q_proxy, k_proxy, lse, P, proxy_lse, log_student, student, teacher)


def forward(problem: Problem, x: Inputs, block_indices=None, tokens=None) -> Rows:
    """block_indices None: every visible key (warm-up). tokens: only these rows."""
    total, q_heads, dim = x.q.shape
    proxy_heads = x.q_proxy.shape[1]
    like = x.q.new_zeros((), dtype=torch.float64)
    r = Rows(
        like.new_zeros(total, q_heads, dim),
        like.new_full((total, q_heads), -INFINITY),
        like.new_full((total, proxy_heads), -INFINITY),
        like.new_zeros(total, proxy_heads),
    )
    for f, rows in problem.chunks(tokens, x.q.device, q_heads):
        c = _chunk(problem, x, f, rows, block_indices)
        r.out[rows] = _by_token(c.P @ c.v, len(rows))
        r.lse[rows] = c.lse.T
        r.proxy_lse[rows] = c.proxy_lse.T
        r.kl[rows] = (torch.xlogy(c.teacher, c.teacher) - c.teacher * c.log_student).sum(-1).T
    return r


def backward(problem: Problem, x: Inputs, block_indices, dout, dkl, tokens=None) -> Gradients:
    """Gradients of <dout, out> + <dkl, kl>. tokens: only these rows carry an upstream gradient."""
    g = Gradients(*(torch.zeros_like(t, dtype=torch.float64) for t in x))
    scale, proxy_scale = _scales(problem, x)
    for f, rows in problem.chunks(tokens, x.q.device, x.q.shape[1]):
        c = _chunk(problem, x, f, rows, block_indices)
        do = _by_kv_head(dout[rows], x.k.shape[1])
        delta = (do * (c.P @ c.v)).sum(-1, keepdim=True)
        dS = c.P * (do @ c.v.mT - delta)
        g.q[rows] = scale * _by_token(dS @ c.k, len(rows))
        g.k[c.keys] += scale * (dS.mT @ c.q).transpose(0, 1)
        g.v[c.keys] += (c.P.mT @ do).transpose(0, 1)

        dS_proxy = dkl[rows].double().T[..., None] * (c.student - c.teacher)
        dS_proxy = dS_proxy.reshape(x.k_proxy.shape[1], -1, f.k_len)
        g.q_proxy[rows] = proxy_scale * _by_token(dS_proxy @ c.k_proxy, len(rows))
        g.k_proxy[c.keys] += proxy_scale * (dS_proxy.mT @ c.q_proxy).transpose(0, 1)
    return g
