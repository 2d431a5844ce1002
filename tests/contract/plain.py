"""Plain PyTorch in the dtype itself: matrix products in bf16 or fp16, softmax in fp32, autograd.

What anybody would write without this library. Its error against float64 is the yardstick for the
half precisions; it is never taken for the truth.
"""

from __future__ import annotations

import torch

import reference64


def _log_softmax(scores: torch.Tensor, attended: torch.Tensor):
    """(lse, log probabilities with 0 where not attended), in fp32; no key: lse -inf."""
    dead = ~attended.any(-1, keepdim=True)
    scores = scores.float().masked_fill(~(attended | dead), float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    logs = torch.where(attended, scores - lse, 0.0)
    return lse.masked_fill(dead, float("-inf"))[..., 0], logs


def plain(
    problem: reference64.Problem, x: reference64.Inputs, block_indices, dout, dkl, tokens=None
):
    """(out, lse, kl, gradients by name), in packed form. tokens: only these rows."""
    leaves = reference64.Inputs(*(t.detach().clone().requires_grad_() for t in x))
    q_heads, dim = x.q.shape[1:]
    proxy_heads, proxy_dim = x.q_proxy.shape[1:]
    scale = dim**-0.5 if problem.softmax_scale is None else problem.softmax_scale
    proxy_scale = proxy_dim**-0.5 if problem.proxy_scale is None else problem.proxy_scale

    out = torch.zeros_like(x.q)
    lse = x.q.new_full(x.q.shape[:2], float("-inf"), dtype=torch.float32)
    kl = x.q.new_zeros(x.q_proxy.shape[:2], dtype=torch.float32)
    losses = []
    for f, rows in problem.chunks(tokens, x.q.device, q_heads):
        keys = slice(f.k_begin, f.k_begin + f.k_len)

        def heads_first(tensor, heads, keys=keys):
            kv = tensor[keys]
            return kv.repeat_interleave(heads // kv.shape[1], dim=1).transpose(0, 1)

        attended = reference64.attended_keys(problem, f, rows, block_indices, proxy_heads)
        q = leaves.q[rows].transpose(0, 1)
        k, v = heads_first(leaves.k, q_heads), heads_first(leaves.v, q_heads)
        group = q_heads // proxy_heads
        for_main = attended.repeat_interleave(group, 0)
        row_lse, log_P = _log_softmax((q @ k.mT) * scale, for_main)
        P = log_P.exp() * for_main
        row_out = (P.to(x.q.dtype) @ v).transpose(0, 1)

        q_proxy = leaves.q_proxy[rows].transpose(0, 1)
        k_proxy = heads_first(leaves.k_proxy, proxy_heads)
        _, log_student = _log_softmax((q_proxy @ k_proxy.mT) * proxy_scale, attended)
        teacher = P.detach().unflatten(0, (proxy_heads, group)).mean(1)
        row_kl = (torch.xlogy(teacher, teacher) - teacher * log_student).sum(-1).T

        losses.append((row_out.float() * dout[rows].float()).sum() + (row_kl * dkl[rows]).sum())
        out[rows] = row_out.detach()
        lse[rows] = row_lse.detach().T
        kl[rows] = row_kl.detach()
    if losses:
        torch.stack(losses).sum().backward()
    gradients = {
        name: torch.zeros_like(t) if t.grad is None else t.grad
        for name, t in zip(leaves._fields, leaves)
    }
    return out, lse, kl, gradients
