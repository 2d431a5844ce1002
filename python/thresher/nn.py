"""`MsaAttention`: the attention layer of MiniMax M3 as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import _check
from .interface import msa_attention, msa_warmup_attention

MODES = ("warmup", "sparse", "dense")


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the head dimension, in fp32."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def document_positions(tokens: int, cu_seqlens: Tensor | None, device) -> Tensor:
    """int64 [T]: position of every token in its document (padding: counts on from the last)."""
    index = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        return index
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), index.to(torch.int32), right=True)
    document = document.clamp(max=cu_seqlens.shape[0] - 1)
    return index - cu_seqlens.long()[document]


def rotary(x: Tensor, positions: Tensor, base: float, fraction: float) -> Tensor:
    """Rotary embedding of the first `fraction` of the head dimension, halves rotated.

    x: [..., S, heads, dim]; positions: [S].
    """
    dim = int(x.shape[-1] * fraction) // 2 * 2
    if dim == 0:
        return x
    half = dim // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None].float() * frequency
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second, rest = x.split((half, half, x.shape[-1] - dim), -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


class MsaAttention(nn.Module):
    """Attention layer with MiniMax Sparse Attention.

    Projections q, k, v, o; proxy projections; optional QK-norm and (partial) RoPE, applied to the
    proxy as to the main attention. `mode` switches:

        "warmup"  dense main attention; the proxy learns from the KL over all visible keys
        "sparse"  the proxy selects blocks; KL over the selected keys
        "dense"   dense main attention alone, the proxy rests (a baseline)

    After a forward, `kl_loss` holds the layer's mean KL (0-d, on the device, part of the graph;
    None in dense mode). Add `collect_kl(model)` to the loss; nothing synchronises with the host.
    The proxy reads the layer's input detached, so that its loss trains only its own projections.

    State dict: q_proj.weight, k_proj.weight, v_proj.weight, o_proj.weight, proxy_q_proj.weight,
    proxy_k_proj.weight, and with qk_norm q_norm.weight, k_norm.weight, proxy_q_norm.weight,
    proxy_k_norm.weight. `mode` is not part of it.

    Args:
        hidden_size: width of input and output.
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D of the main attention.
        num_proxy_heads, num_proxy_kv_heads, proxy_head_dim: Hp, Hpk, Dp of the proxy
            (default proxy_head_dim: head_dim).
        top_k_blocks, block_size, init_blocks, local_blocks: see msa_attention.
        qk_norm: RMSNorm on queries and keys.
        rope_base: None for no rotary embedding; rope_fraction: share of the head dimension it
            turns. Positions count from the start of each document.
        kl: "forward" or "backward", see msa_attention. With "backward", kl_rows holds the rows
            after the backward pass.
        mode: the initial mode.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_proxy_heads: int,
        num_proxy_kv_heads: int = 1,
        proxy_head_dim: int | None = None,
        *,
        top_k_blocks: int = 16,
        block_size: int = 128,
        init_blocks: int = 0,
        local_blocks: int = 1,
        qk_norm: bool = False,
        rope_base: float | None = 10_000.0,
        rope_fraction: float = 1.0,
        kl: str = "forward",
        mode: str = "warmup",
    ):
        super().__init__()
        for name, few, many in (
            ("num_kv_heads", num_kv_heads, num_heads),
            ("num_proxy_heads", num_proxy_heads, num_heads),
            ("num_proxy_kv_heads", num_proxy_kv_heads, num_proxy_heads),
        ):
            if few < 1 or many % few:
                raise ValueError(f"{name}: {few} does not divide {many}")
        if kl not in ("forward", "backward"):
            raise ValueError(f'kl: {kl!r} is not supported: "forward" and "backward" are')
        proxy_head_dim = proxy_head_dim or head_dim
        self.head_dim, self.proxy_head_dim = head_dim, proxy_head_dim
        self.options = {
            "top_k_blocks": top_k_blocks,
            "block_size": block_size,
            "init_blocks": init_blocks,
            "local_blocks": local_blocks,
        }
        self.rope_base, self.rope_fraction = rope_base, rope_fraction
        self.kl = kl
        self.mode = mode

        def linear(width_in, width_out):
            return nn.Linear(width_in, width_out, bias=False)

        self.q_proj = linear(hidden_size, num_heads * head_dim)
        self.k_proj = linear(hidden_size, num_kv_heads * head_dim)
        self.v_proj = linear(hidden_size, num_kv_heads * head_dim)
        self.o_proj = linear(num_heads * head_dim, hidden_size)
        self.proxy_q_proj = linear(hidden_size, num_proxy_heads * proxy_head_dim)
        self.proxy_k_proj = linear(hidden_size, num_proxy_kv_heads * proxy_head_dim)

        def norm(dim):
            return RMSNorm(dim) if qk_norm else nn.Identity()

        self.q_norm, self.k_norm = norm(head_dim), norm(head_dim)
        self.proxy_q_norm, self.proxy_k_norm = norm(proxy_head_dim), norm(proxy_head_dim)
        self._forget()

    def _forget(self) -> None:
        self.kl_loss: Tensor | None = None
        self.kl_rows: Tensor | None = None
        self.block_indices: Tensor | None = None

    def __getstate__(self):
        # Results of the last forward belong to its graph; copies and pickles leave them out.
        state = self.__dict__.copy()
        state.update(kl_loss=None, kl_rows=None, block_indices=None)
        return state

    def __deepcopy__(self, memo):
        import copy

        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        for name, value in self.__getstate__().items():
            clone.__dict__[name] = copy.deepcopy(value, memo)
        return clone

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, value: str) -> None:
        if value not in MODES:
            raise ValueError(f"mode: {value!r} is not supported: {', '.join(MODES)} are")
        self._mode = value

    def project(self, x: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, ...]:
        """q, k, v, q_proxy, k_proxy of x [T, hidden] or [B, S, hidden], ready for attention."""
        if not isinstance(x, Tensor) or x.dim() not in (2, 3):
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x: {got} is not supported: [T, hidden] and [B, S, hidden] are")
        if x.shape[-1] != self.q_proj.in_features:
            raise ValueError(
                f"x: width {x.shape[-1]}, but the layer's hidden_size is {self.q_proj.in_features}"
            )
        cu_seqlens = _check.cu_seqlens(cu_seqlens, x[..., None])
        positions = document_positions(x.shape[-2], cu_seqlens, x.device)

        def heads(y, dim, norm=None, turn=True):
            y = y.unflatten(-1, (-1, dim))
            if norm is not None:
                y = norm(y)
            if turn and self.rope_base is not None:
                y = rotary(y, positions, self.rope_base, self.rope_fraction)
            return y

        seen = x.detach()
        return (
            heads(self.q_proj(x), self.head_dim, self.q_norm),
            heads(self.k_proj(x), self.head_dim, self.k_norm),
            heads(self.v_proj(x), self.head_dim, turn=False),
            heads(self.proxy_q_proj(seen), self.proxy_head_dim, self.proxy_q_norm),
            heads(self.proxy_k_proj(seen), self.proxy_head_dim, self.proxy_k_norm),
        )

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        block_indices: Tensor | None = None,
    ) -> Tensor:
        """x: [T, hidden] with cu_seqlens (int32 [num_docs + 1]), or [B, S, hidden].

        block_indices: replays a selection (sparse mode). Returns a tensor like x.
        """
        self._forget()
        q, k, v, q_proxy, k_proxy = self.project(x, cu_seqlens)
        if self.mode == "dense":
            r = msa_warmup_attention(q, k, v, q_proxy, k_proxy, cu_seqlens=cu_seqlens, kl=None)
            return self.o_proj(r.out.flatten(-2))
        kl = {"kl": self.kl}
        if self.kl == "backward":
            shape, dtype = q_proxy.shape[:-1], q.dtype
            dtype = dtype if dtype == torch.float64 else torch.float32
            self.kl_rows = kl["kl_buffer"] = torch.zeros(shape, dtype=dtype, device=q.device)
        if self.mode == "warmup":
            r = msa_warmup_attention(q, k, v, q_proxy, k_proxy, cu_seqlens=cu_seqlens, **kl)
        else:
            r = msa_attention(
                q,
                k,
                v,
                q_proxy,
                k_proxy,
                cu_seqlens=cu_seqlens,
                block_indices=block_indices,
                **self.options,
                **kl,
            )
        self.kl_loss, self.block_indices = r.kl_loss, r.block_indices
        if self.kl == "forward":
            self.kl_rows = r.kl.detach()
        return self.o_proj(r.out.flatten(-2))

    def extra_repr(self) -> str:
        return f"mode={self.mode}, " + ", ".join(f"{k}={v}" for k, v in self.options.items())


def msa_layers(model: nn.Module) -> list[MsaAttention]:
    """The MsaAttention layers of a model, in the order of its modules."""
    return [m for m in model.modules() if isinstance(m, MsaAttention)]


def set_mode(model: nn.Module, mode: str) -> None:
    """Switches every MsaAttention layer of a model."""
    for layer in msa_layers(model):
        layer.mode = mode


def collect_kl(model: nn.Module) -> Tensor | None:
    """Sum of the layers' kl_loss of the last forward, on the device; None if no layer has one."""
    losses = [layer.kl_loss for layer in msa_layers(model) if layer.kl_loss is not None]
    return torch.stack(losses).sum() if losses else None
