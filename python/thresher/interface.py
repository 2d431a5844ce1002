"""The public functions. Mathematics: docs/design.md and thresher.reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _check, ops

_KL_MODES = {"forward": ops.KL_FORWARD, "backward": ops.KL_BACKWARD, None: ops.KL_NONE}


@dataclass
class MsaResult:
    """Result of one attention layer.

    out            like q, in q's layout
    kl             [T, Hp] ([B, S, Hp] batched), fp32 (fp64 for fp64 inputs): KL divergence of every
                   token and proxy head; carries the proxy's gradient. None with kl=None
    kl_loss        0-d: sum of kl / (Hp * real tokens). None with kl=None
    lse            [T, Hq] ([B, S, Hq] batched), fp32 (fp64): natural log of the softmax
                   denominator, -inf for padding and rows without a key; not differentiable
    block_indices  int32 [Hp, T, K] ([B, Hp, S, K] batched): the blocks attended to, ascending, -1
                   to the right; ids count from the start of the document. None in the warm-up
    """

    out: Tensor
    kl: Tensor | None
    kl_loss: Tensor | None
    lse: Tensor
    block_indices: Tensor | None


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
    """One layer of MiniMax Sparse Attention: selection, sparse attention, proxy KL.

    Differentiable in all five tensors (once). Main head h attends to the keys of the blocks that
    proxy head h // (Hq / Hp) selects; the KL of the rows trains the proxy and only the proxy.

    Args:
        q: [T, Hq, D], or batched [B, S, Hq, D] / [B, Hq, S, D] (see layout); any strides.
            CPU: fp32, fp64, bf16, fp16; CUDA: bf16, fp16. All inputs share dtype and device.
        k, v: [T, Hkv, D]; Hkv divides Hq.
        q_proxy: [T, Hp, Dp]; Hp divides Hq.
        k_proxy: [T, Hpk, Dp]; Hpk divides Hp.
        cu_seqlens: int32 [num_docs + 1], starts of the packed documents and their end; attention
            is causal within a document. Tokens past the end are padding: never read, results 0.
            Default: one document, or one a batch row.
        top_k_blocks: K, blocks a token keeps, forced ones included.
        block_size: B, keys a block.
        init_blocks, local_blocks: first and last visible blocks that are always kept.
        softmax_scale, proxy_scale: default head_dim ** -0.5.
        block_indices: int32 [Hp, T, K] ([B, Hp, S, K]): replays this selection instead of scoring;
            any order, -1 for unused places.
        kl: "forward": true values in the result. "backward": the result's kl and kl_loss are 0 in
            value and only carry the gradient; the true values are written to kl_buffer by the
            backward pass, at next to no cost. None: no proxy loss and no work for it.
        kl_buffer: fp32 (fp64) [T, Hp] ([B, S, Hp]), only with kl="backward".
        deterministic: bitwise equal results from run to run. Default:
            torch.are_deterministic_algorithms_enabled(). The CPU always is.
        check_indices: validate a given block_indices. CPU: always; CUDA: only if True (it
            synchronises), otherwise a bad entry counts as -1.
        layout: of rank-4 inputs: "bshd" (default) or "bhsd".

    Returns: MsaResult.
    Raises: ValueError, TypeError naming the argument, before anything is computed.
    """
    x, layout = _check.token_tensors(
        {"q": q, "k": k, "v": v, "q_proxy": q_proxy, "k_proxy": k_proxy}, layout
    )
    q, k, v, q_proxy, k_proxy = x.values()
    _check_heads(q, k, v, q_proxy, k_proxy)
    _check.selection_options(top_k_blocks, block_size, init_blocks, local_blocks)
    softmax_scale = _check.scale("softmax_scale", softmax_scale, q.shape[-1])
    proxy_scale = _check.scale("proxy_scale", proxy_scale, q_proxy.shape[-1])
    cu_seqlens = _check.cu_seqlens(cu_seqlens, q)
    mode = _check_kl(kl, kl_buffer, q, q_proxy)
    _check.flag("check_indices", check_indices)
    deterministic = _deterministic(deterministic)

    if block_indices is None:
        block_indices = ops.select_blocks(
            q_proxy.detach(),
            k_proxy.detach(),
            cu_seqlens,
            top_k_blocks,
            block_size,
            init_blocks,
            local_blocks,
            proxy_scale,
        )
    else:
        _check.block_indices(block_indices, q, heads=q_proxy.shape[-2])
        if check_indices:
            ops.check_block_indices(q.detach(), k.detach(), block_indices, cu_seqlens, block_size)
    return _attend(
        (q, k, v, q_proxy, k_proxy),
        block_indices,
        cu_seqlens,
        kl_buffer,
        (block_size, softmax_scale, proxy_scale, mode, deterministic),
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
    """The dense warm-up: causal attention within the documents, KL over all visible keys.

    Trains the proxy before its selection can be trusted. Arguments and result as in msa_attention;
    block_indices of the result is None.
    """
    x, layout = _check.token_tensors(
        {"q": q, "k": k, "v": v, "q_proxy": q_proxy, "k_proxy": k_proxy}, layout
    )
    q, k, v, q_proxy, k_proxy = x.values()
    _check_heads(q, k, v, q_proxy, k_proxy)
    softmax_scale = _check.scale("softmax_scale", softmax_scale, q.shape[-1])
    proxy_scale = _check.scale("proxy_scale", proxy_scale, q_proxy.shape[-1])
    cu_seqlens = _check.cu_seqlens(cu_seqlens, q)
    mode = _check_kl(kl, kl_buffer, q, q_proxy)
    return _attend(
        (q, k, v, q_proxy, k_proxy),
        None,
        cu_seqlens,
        kl_buffer,
        (128, softmax_scale, proxy_scale, mode, _deterministic(deterministic)),
        layout,
    )


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
    """The blocks that every token and proxy head keeps; see msa_attention for the arguments.

    score[t, p, b] = max over the visible keys j of block b of proxy_scale <q_proxy, k_proxy_j>.
    Forced blocks first, then the best scores; ties go to the lower id, NaN ranks below all numbers.

    Returns: int32 [Hp, T, K] ([B, Hp, S, K] batched), ascending, -1 to the right. No gradient.
    """
    x, layout = _check.token_tensors({"q_proxy": q_proxy, "k_proxy": k_proxy}, layout)
    q_proxy, k_proxy = x.values()
    _check.proxy_heads(q_proxy, k_proxy)
    _check.selection_options(top_k_blocks, block_size, init_blocks, local_blocks)
    proxy_scale = _check.scale("proxy_scale", proxy_scale, q_proxy.shape[-1])
    return ops.select_blocks(
        q_proxy.detach(),
        k_proxy.detach(),
        _check.cu_seqlens(cu_seqlens, q_proxy),
        top_k_blocks,
        block_size,
        init_blocks,
        local_blocks,
        proxy_scale,
    )


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the keys of the given blocks, without a proxy; differentiable in q, k, v.

    Arguments as in msa_attention. Returns out like q, and lse [T, Hq] ([B, S, Hq]) if asked for.
    """
    x, layout = _check.token_tensors({"q": q, "k": k, "v": v}, layout)
    q, k, v = x.values()
    _check.main_heads(q, k, v)
    _check.number("block_size", block_size, 1)
    softmax_scale = _check.scale("softmax_scale", softmax_scale, q.shape[-1])
    cu_seqlens = _check.cu_seqlens(cu_seqlens, q)
    _check.block_indices(block_indices, q)
    _check.flag("return_lse", return_lse)
    if _check.flag("check_indices", check_indices):
        ops.check_block_indices(q.detach(), k.detach(), block_indices, cu_seqlens, block_size)
    r = _attend(
        (q, k, v, None, None),
        block_indices,
        cu_seqlens,
        None,
        (block_size, softmax_scale, 1.0, ops.KL_NONE, _deterministic(deterministic)),
        layout,
    )
    return (r.out, r.lse) if return_lse else r.out


def _check_heads(q, k, v, q_proxy, k_proxy) -> None:
    _check.main_heads(q, k, v)
    _check.divides("q_proxy", q_proxy.shape[-2], "proxy heads", q.shape[-2], "query heads of q")
    _check.proxy_heads(q_proxy, k_proxy)


def _check_kl(kl, kl_buffer, q: Tensor, q_proxy: Tensor) -> int:
    if not (kl is None or isinstance(kl, str)) or kl not in _KL_MODES:
        raise ValueError(f'kl: {kl!r} is not supported: "forward", "backward" and None are')
    if kl_buffer is None:
        return _KL_MODES[kl]
    if kl != "backward":
        raise ValueError(f'kl_buffer: given with kl={kl!r}; it belongs to kl="backward"')
    _check.tensor("kl_buffer", kl_buffer)
    shape, dtype = (*q_proxy.shape[:-2], q_proxy.shape[-2]), ops.accumulation_dtype(q)
    if kl_buffer.dtype != dtype:
        raise TypeError(f"kl_buffer: dtype {kl_buffer.dtype}, but {dtype} is needed")
    if kl_buffer.shape != shape:
        raise ValueError(
            f"kl_buffer: shape {tuple(kl_buffer.shape)}, but {tuple(shape)} (tokens, proxy heads) "
            "is needed"
        )
    if kl_buffer.device != q.device:
        raise TypeError(f"kl_buffer: device {kl_buffer.device}, but q is on {q.device}")
    if kl_buffer.requires_grad:
        raise ValueError("kl_buffer: requires a gradient, but the backward pass overwrites it")
    return _KL_MODES[kl]


def _deterministic(value: bool | None) -> bool:
    _check.flag("deterministic", value)
    return torch.are_deterministic_algorithms_enabled() if value is None else value


def _attend(inputs, block_indices, cu_seqlens, kl_buffer, options, layout) -> MsaResult:
    q, q_proxy = inputs[0], inputs[3]
    out, lse, _, kl = ops.attend(*inputs, block_indices, cu_seqlens, kl_buffer, *options)
    # The operator has no gradient for it; still attached, a loss on lse would silently give none.
    lse = lse.detach()
    if layout == "bhsd":
        out = out.transpose(1, 2)
    if options[3] == ops.KL_NONE:
        return MsaResult(out, None, None, lse, block_indices)
    if cu_seqlens is None:
        rows = max(math.prod(q.shape[:-2]), 1) * q_proxy.shape[-2]
    else:
        rows = cu_seqlens[-1].clamp(min=1) * q_proxy.shape[-2]
    return MsaResult(out, kl, kl.sum() / rows, lse, block_indices)
