"""How far rounding alone moves every result: a first-order error analysis of attention.py.

Every elementary operation is taken to return its exact result plus an independent error of zero
mean. Its standard deviation is `accumulate` times the result for arithmetic, and `store` times the
value where a value is kept in the inputs' dtype (P and dS as operands of a matrix product, out and
the gradients as results). Variances of independent errors add up; an error that all keys of a row
share (of lse, of delta) moves the row as a whole, with the signs of its terms. With u the largest
relative rounding error, an error that is uniform in (-u, u) has the deviation u / sqrt(3).

Why this is needed: a gradient is a sum of terms of both signs. Where they cancel (to exactly 0 in a
document of one token, or when all logits are equal) its relative error means nothing; what remains
is the rounding of the terms, and that is what is computed here.
"""

from __future__ import annotations

import torch

from .attention import Gradients, Inputs, Rows, _by_kv_head, _by_token, _chunk, _scales
from .geometry import Problem


def rounding(
    problem: Problem,
    x: Inputs,
    block_indices,
    dout,
    dkl,
    rows: Rows,
    gradients: Gradients,
    tokens=None,
    *,
    accumulate: float,
    store: float,
) -> tuple[Rows, Gradients]:
    """Standard deviations of `rows` and `gradients`, which are the exact results."""
    a2, s2 = accumulate**2, store**2
    scale, proxy_scale = _scales(problem, x)
    r = Rows(*(torch.zeros_like(t) for t in rows))
    g = Gradients(*(torch.zeros_like(t) for t in gradients))
    for f, t in problem.chunks(tokens, x.q.device, x.q.shape[1]):
        c = _chunk(problem, x, f, t, block_indices)
        kv_heads, proxy_heads, n = x.k.shape[1], x.q_proxy.shape[1], len(t)

        def by_head(stacked, n=n):  # [kv heads, heads * n, ...] -> [heads, n, ...]
            return stacked.reshape(-1, n, *stacked.shape[2:])

        # --- P: a relative error of each probability, and one of the row's lse ------------------
        S = scale * (c.q @ c.k.mT)
        var_S = a2 * (scale**2 * (c.q**2 @ c.k.mT**2) + S**2)
        lse = torch.where(c.lse.isfinite(), c.lse, 0.0).reshape(kv_heads, -1)
        var_lse = a2 * (1 + lse**2) + (c.P * var_S).sum(-1)
        own, shared = var_S + a2, var_lse[..., None]
        P2 = c.P**2
        r.lse[t] = var_lse.reshape(-1, n).T

        # --- out --------------------------------------------------------------------------------
        out = c.P @ c.v
        var_out = (P2 * (own + s2)) @ c.v**2 + (shared + s2 + a2) * out**2
        r.out[t] = _by_token(var_out, n)

        # --- dq, dk, dv -------------------------------------------------------------------------
        do = _by_kv_head(dout[t], kv_heads)
        dP = do @ c.v.mT
        delta = (do * out).sum(-1, keepdim=True)
        var_dP = a2 * (do**2 @ c.v.mT**2 + dP**2)
        var_delta = (do**2 * (var_out + a2 * out**2)).sum(-1, keepdim=True) + a2 * delta**2
        dS = c.P * (dP - delta)
        var_dS = P2 * var_dP + dS**2 * (own + a2 + s2)  # without lse and delta, which rows share
        moved = scale**2 * (var_delta * (c.P @ c.k) ** 2 + shared * (dS @ c.k) ** 2)
        g.q[t] = _by_token(scale**2 * (var_dS @ c.k**2) + moved, n)
        all_dS = var_dS + P2 * var_delta + dS**2 * shared
        g.k[c.keys] += (scale**2 * (all_dS.mT @ c.q**2)).transpose(0, 1)
        g.v[c.keys] += ((P2 * (own + shared + s2)).mT @ do**2).transpose(0, 1)

        # --- proxy: student and teacher ---------------------------------------------------------
        s = proxy_scale * (c.q_proxy @ c.k_proxy.mT)
        var_s = a2 * (proxy_scale**2 * (c.q_proxy**2 @ c.k_proxy.mT**2) + s**2)
        var_s = by_head(var_s)
        proxy_lse = torch.where(c.proxy_lse.isfinite(), c.proxy_lse, 0.0)
        var_proxy_lse = (a2 * (1 + proxy_lse**2) + (c.student * var_s).sum(-1))[..., None]
        r.proxy_lse[t] = var_proxy_lse[..., 0].T
        P = by_head(c.P).unflatten(0, (proxy_heads, -1))  # [Hp, G, n, j]
        group2 = P.shape[1] ** 2
        own, shared = (
            by_head(v.expand_as(c.P)).unflatten(0, (proxy_heads, -1)) for v in (own, shared)
        )
        var_teacher = (P**2 * own).sum(1) / group2 + a2 * c.teacher**2
        all_teacher = var_teacher + (P**2 * shared).sum(1) / group2

        # --- kl ---------------------------------------------------------------------------------
        log_teacher = torch.where(c.teacher > 0, c.teacher, 1.0).log()
        w = log_teacher - c.log_student
        terms = all_teacher * (w + 1) ** 2 * (c.teacher > 0)
        terms = terms + c.teacher**2 * (var_s + a2 * (log_teacher**2 + c.log_student**2))
        whole = c.teacher.sum(-1) ** 2 * var_proxy_lse[..., 0]
        r.kl[t] = (terms.sum(-1) + whole).T + a2 * rows.kl[t] ** 2

        # --- dq_proxy, dk_proxy -----------------------------------------------------------------
        up = dkl[t].double().T[..., None]
        dS = up * (c.student - c.teacher)
        var_dS = up**2 * (c.student**2 * (var_s + a2) + var_teacher) + (a2 + s2) * dS**2
        all_dS = var_dS + up**2 * (c.student**2 * var_proxy_lse + all_teacher - var_teacher)
        proxy_kv = x.k_proxy.shape[1]
        k_proxy = c.k_proxy.repeat_interleave(proxy_heads // proxy_kv, 0)  # [Hp, j, Dp]
        moved = var_proxy_lse * (c.student @ k_proxy) ** 2
        moved = moved + (shared[..., :1] * (P @ k_proxy[:, None]) ** 2).sum(1) / group2
        per_head = var_dS @ k_proxy**2 + up**2 * moved
        g.q_proxy[t] = (proxy_scale**2 * per_head).transpose(0, 1)
        all_dS = all_dS.reshape(proxy_kv, -1, f.k_len)
        g.k_proxy[c.keys] += (proxy_scale**2 * (all_dS.mT @ c.q_proxy**2)).transpose(0, 1)
    stored = (a2 + s2) * torch.ones((), dtype=torch.float64)
    g = Gradients(*((v + stored * exact**2).sqrt() for v, exact in zip(g, gradients)))
    return Rows(*(v.sqrt() for v in r)), g
