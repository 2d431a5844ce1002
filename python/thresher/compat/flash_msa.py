"""The functions of flash-msa under their names: change the import, keep the call.

    from thresher.compat.flash_msa import flash_msa_func, flash_msa_warmup_func
    attn_out, kl_loss = flash_msa_func(Q_proxy, K_proxy, Q, K, V, top_k, head_dim**-0.5)

kl_loss is the true mean KL over tokens and proxy heads (the original returned a zero that only
carried the gradient). What else differs: docs/compat.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check
from ..interface import MsaResult, msa_attention, msa_warmup_attention

BLOCK_SIZE = 128


def flash_msa_func(
    Q_proxy: Tensor,
    K_proxy: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    top_k: int,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    kl_metric: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse attention; see msa_attention for dtypes, devices and errors.

    Args:
        Q_proxy, K_proxy: [B, Hp, S, Dp], [B, Hpk, S, Dp].
        Q, K, V: [B, Hq, S, D], [B, Hkv, S, D].
        top_k: keys a token keeps, a multiple of 128 (2048: 16 blocks).
        scale: softmax scale of main attention and proxy; default head_dim ** -0.5 of each.
        cu_seqlens: int32 document bounds over the flattened B * S tokens; every row boundary must
            be among them.
        kl_metric: 0-d fp32, receives the KL value (without a host synchronisation).

    Returns: attn_out [B, S, Hq * D], kl_loss 0-d.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1 or top_k % BLOCK_SIZE:
        raise ValueError(f"top_k: {top_k!r} is not supported: multiples of {BLOCK_SIZE} keys are")
    options = {"top_k_blocks": top_k // BLOCK_SIZE, "block_size": BLOCK_SIZE}
    return _call(
        msa_attention, (Q, K, V, Q_proxy, K_proxy), scale, cu_seqlens, kl_metric, **options
    )


def flash_msa_warmup_func(
    Q_proxy: Tensor,
    K_proxy: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    top_k: int | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    kl_metric: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense warm-up; top_k is accepted and not used. Arguments and result as flash_msa_func."""
    return _call(msa_warmup_attention, (Q, K, V, Q_proxy, K_proxy), scale, cu_seqlens, kl_metric)


flash_msa_func_warmup = flash_msa_warmup_func


def _call(function, inputs, scale, cu_seqlens, kl_metric, **options):
    _check_arguments(dict(zip(("Q", "K", "V", "Q_proxy", "K_proxy"), inputs)), scale, kl_metric)
    options.update(softmax_scale=scale, proxy_scale=scale)
    if cu_seqlens is None:
        r: MsaResult = function(*inputs, layout="bhsd", **options)
        out = r.out.transpose(1, 2).flatten(2)
    else:
        batch, _, tokens, _ = inputs[0].shape
        packed = (x.transpose(1, 2).flatten(0, 1) for x in inputs)
        r = function(*packed, cu_seqlens=cu_seqlens, **options)
        out = r.out.flatten(1).unflatten(0, (batch, tokens))
    if kl_metric is not None:
        with torch.no_grad():
            kl_metric.copy_(r.kl_loss.detach())
    return out, r.kl_loss


def _check_arguments(inputs, scale, kl_metric) -> None:
    """What msa_attention would refuse under other names than the caller used."""
    for name, x in inputs.items():
        if _check.tensor(name, x).dim() != 4:
            raise ValueError(
                f"{name}: rank {x.dim()} (shape {tuple(x.shape)}) is not supported: "
                "[B, heads, S, dim] is"
            )
    _check.token_tensors(inputs, "bhsd")
    _check.scale("scale", scale, 1)
    if kl_metric is not None:
        _check.tensor("kl_metric", kl_metric)
        if kl_metric.numel() != 1 or not kl_metric.is_floating_point() or kl_metric.requires_grad:
            raise ValueError(
                f"kl_metric: {kl_metric.dtype} of shape {tuple(kl_metric.shape)}, requires_grad "
                f"{kl_metric.requires_grad}, but one floating-point number without a gradient is "
                "needed"
            )
        if kl_metric.device != inputs["Q"].device:
            raise TypeError(
                f"kl_metric: device {kl_metric.device}, but Q is on {inputs['Q'].device}"
            )
