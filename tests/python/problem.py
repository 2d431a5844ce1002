"""Small legal problems for the tests of the front end, and the calls they are for."""

from __future__ import annotations

import torch

HEADS = {"q": 4, "k": 2, "v": 2, "q_proxy": 2, "k_proxy": 1}
SELECTION = {"block_size": 8, "top_k_blocks": 3}


def tensors(*lead, dtype=torch.float32, dim=16, seed=0, grad=False):
    """The five inputs by name, [*lead, heads, dim]."""
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*lead, heads, dim, generator=g).to(dtype).requires_grad_(grad)
        for name, heads in HEADS.items()
    }


def documents(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def heads_first(x):
    """[B, S, heads, dim] -> the same data as a fresh [B, heads, S, dim] leaf."""
    return x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad)
