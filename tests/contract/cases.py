"""Problems: tensors as a caller holds them, and the same problem for the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

import reference64

# Hq, Hkv, Hp, Hpk
HEADS = {
    "16/2/4/1": (16, 2, 4, 1),
    "64/4/4/1": (64, 4, 4, 1),
    "12/2/2/1": (12, 2, 2, 1),
    "gqa 6:1": (6, 1, 2, 2),
    "Hp < Hkv": (8, 4, 2, 1),
    "Hp > Hkv": (8, 2, 4, 2),
    "Hp = Hkv": (4, 2, 2, 2),
    "MHA": (4, 4, 4, 4),
    "MQA": (4, 1, 1, 1),
    "not nested": (12, 6, 4, 1),  # a proxy head's three main heads lie on two kv heads
}
NAMES = ("q", "k", "v", "q_proxy", "k_proxy")
UNEVEN = (0, 1, 2, 31, 32, 33, 0, 0, 127, 130, 200, 0)


@dataclass(frozen=True)
class Case:
    """Inputs are kept packed, [T, heads, dim]; `arguments()` shows them in the caller's layout."""

    inputs: reference64.Inputs
    problem: reference64.Problem
    cu_seqlens: torch.Tensor | None = None
    batch: int | None = None  # rows of a batched problem
    layout: str | None = None
    options: dict = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.q.dtype

    @property
    def device(self) -> torch.device:
        return self.inputs.q.device

    @property
    def tokens(self) -> int:
        return self.inputs.q.shape[0]

    @property
    def real_tokens(self) -> int:
        return max((f.q_end for f in self.problem.fragments), default=0)

    @property
    def heads(self) -> tuple[int, int, int, int]:
        x = self.inputs
        return x.q.shape[1], x.k.shape[1], x.q_proxy.shape[1], x.k_proxy.shape[1]

    def with_inputs(self, **tensors: torch.Tensor) -> Case:
        return replace(self, inputs=self.inputs._replace(**tensors))

    def with_options(self, **options) -> Case:
        return replace(
            self, options={**self.options, **options}, problem=replace(self.problem, **options)
        )

    # --- the caller's layout ---------------------------------------------------------------
    def to_caller(self, packed: torch.Tensor) -> torch.Tensor:
        """[T, heads(, dim)] in the caller's layout."""
        if self.batch is None:
            return packed
        batched = packed.unflatten(0, (self.batch, self.tokens // self.batch))
        if self.layout == "bhsd" and packed.dim() == 3:
            return batched.transpose(1, 2).contiguous()
        return batched

    def to_packed(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.batch is None:
            return tensor
        if self.layout == "bhsd" and tensor.dim() == 4:
            tensor = tensor.transpose(1, 2)
        return tensor.flatten(0, 1)

    def indices_to_packed(self, block_indices: torch.Tensor) -> torch.Tensor:
        if self.batch is None:
            return block_indices
        return block_indices.transpose(0, 1).flatten(1, 2)  # [N, Hp, S, K] -> [Hp, T, K]

    def indices_to_caller(self, block_indices: torch.Tensor) -> torch.Tensor:
        if self.batch is None:
            return block_indices
        rows = block_indices.unflatten(1, (self.batch, self.tokens // self.batch))
        return rows.transpose(0, 1).contiguous()

    def arguments(self) -> list[torch.Tensor]:
        """Fresh leaves, so that two runs never share a gradient."""
        return [self.to_caller(t).detach().clone() for t in self.inputs]

    def geometry(self) -> dict:
        """Keyword arguments that say how tensors are laid out."""
        kwargs = {}
        if self.cu_seqlens is not None:
            kwargs["cu_seqlens"] = self.cu_seqlens
        if self.layout is not None:
            kwargs["layout"] = self.layout
        return kwargs


def random_inputs(tokens, heads, dim, proxy_dim, dtype, device, seed) -> reference64.Inputs:
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads, proxy_heads, proxy_kv_heads = heads

    def normal(heads, dim):
        x = torch.randn(tokens, heads, dim, generator=generator, dtype=torch.float32)
        return x.to(device=device, dtype=dtype)

    return reference64.Inputs(
        normal(q_heads, dim),
        normal(kv_heads, dim),
        normal(kv_heads, dim),
        normal(proxy_heads, proxy_dim),
        normal(proxy_kv_heads, proxy_dim),
    )


def make_case(
    device,
    dtype,
    *,
    lengths=UNEVEN,
    heads=HEADS["Hp > Hkv"],
    dim=64,
    proxy_dim=64,
    block_size=32,
    top_k_blocks=3,
    padding=0,
    batch=None,
    layout=None,
    seed=0,
    **options,
) -> Case:
    """lengths: documents of a packed batch, or with `batch` the one length of every row.

    padding: rows past the last document, filled with NaN.
    """
    options = dict(block_size=block_size, top_k_blocks=top_k_blocks, **options)
    if batch is not None:
        inputs = random_inputs(batch * lengths, heads, dim, proxy_dim, dtype, device, seed)
        problem = reference64.batched(batch, lengths, **options)
        return Case(inputs, problem, batch=batch, layout=layout, options=options)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
    total = int(cu_seqlens[-1])
    inputs = random_inputs(total + padding, heads, dim, proxy_dim, dtype, device, seed)
    for tensor in inputs:
        tensor[total:] = float("nan")
    problem = reference64.packed(cu_seqlens, **options)
    return Case(inputs, problem, cu_seqlens=cu_seqlens.to(device), options=options)


def upstream(case: Case, seed: int = 1, tokens: torch.Tensor | None = None):
    """Random gradients of out and kl, packed; with `tokens` they are 0 in all other rows.

    Padding rows are NaN: nothing may read them.
    """
    generator = torch.Generator().manual_seed(seed)
    q_heads, _, proxy_heads, _ = case.heads
    dim = case.inputs.q.shape[2]
    accumulation = torch.float64 if case.dtype == torch.float64 else torch.float32
    dout = torch.randn(case.tokens, q_heads, dim, generator=generator, dtype=torch.float32)
    dkl = torch.randn(case.tokens, proxy_heads, generator=generator, dtype=torch.float32)
    if tokens is not None:
        others = torch.ones(case.tokens, dtype=torch.bool)
        others[tokens.cpu()] = False
        dout[others] = 0
        dkl[others] = 0
    dout = dout.to(case.device, case.dtype)
    dkl = dkl.to(case.device, accumulation)
    dout[case.real_tokens :] = float("nan")
    dkl[case.real_tokens :] = float("nan")
    return dout, dkl
