"""msa_v1.attention: prepare, forward, backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import _check, ops
from ...interface import sparse_attention
from . import _common

__all__ = ["AttentionMetadata", "backward", "forward", "prepare"]


@dataclass(frozen=True)
class AttentionMetadata:
    """The selection of one layer. There it also holds reverse indices and schedules; here every
    call builds its own."""

    topk_indices: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    fragment_indices: None
    total_k: int
    total_rows: int
    max_seqlen_q: int
    max_seqlen_k: int


def prepare(
    topk_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    total_k: int,
    total_rows: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    fragment_indices: None = None,
    prepare_kl_schedule: bool = True,
) -> AttentionMetadata:
    """Checks and keeps the selection; there is nothing to compute.

    Args:
        topk_indices: int32 [Hp, T, K], K up to the caller; ids of blocks of 128 keys, local to the
            document, in any order, -1 for unused places.
        cu_seqlens_q, cu_seqlens_k: int32 [num_docs + 1], equal. The same tensor for both saves a
            synchronisation.
        total_k: number of key tokens, here that of the query tokens.
        total_rows, max_seqlen_q, max_seqlen_k: ints; nothing depends on them.
        fragment_indices: only the default.
        prepare_kl_schedule: kl.backward works with either.
    """
    _common.only_default("fragment_indices", fragment_indices, None)
    _check.tensor("topk_indices", topk_indices)
    if topk_indices.dtype != torch.int32:
        raise TypeError(
            f"topk_indices: dtype {topk_indices.dtype} is not supported: torch.int32 is"
        )
    if topk_indices.dim() != 3 or topk_indices.shape[0] < 1 or topk_indices.shape[2] < 1:
        raise ValueError(
            f"topk_indices: shape {tuple(topk_indices.shape)} is not supported: [proxy heads, "
            "tokens, top_k] is"
        )
    for name, value in (
        ("total_k", total_k),
        ("total_rows", total_rows),
        ("max_seqlen_q", max_seqlen_q),
        ("max_seqlen_k", max_seqlen_k),
    ):
        _check.number(name, value, 0)
    if total_k != topk_indices.shape[1]:
        raise ValueError(
            f"total_k: {total_k}, but topk_indices has {topk_indices.shape[1]} tokens; as many "
            "keys as queries are needed"
        )
    _common.flag("prepare_kl_schedule", prepare_kl_schedule)
    _common.documents(cu_seqlens_q, cu_seqlens_k, "cu_seqlens_k", topk_indices)
    return AttentionMetadata(
        topk_indices,
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        total_k,
        total_rows,
        max_seqlen_q,
        max_seqlen_k,
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: AttentionMetadata,
    *,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_softmax_lse: bool = False,
    return_temperature_lse: bool = False,
    partial_dtype: torch.dtype = torch.bfloat16,
    sparse_attn_p_mode: str = "",
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Attention over the selected blocks, differentiable in q, k, v; sparse_attention.

    Args:
        q: [T, Hq, D]; k, v: [T, Hkv, D]; dtypes and devices of sparse_attention.
        softmax_scale: default D ** -0.5.
        lse_temperature_scale: divides softmax_scale in the temperature LSE.
        return_temperature_lse: only with return_softmax_lse. A temperature other than 1 costs a
            second forward pass.
        partial_dtype, sparse_attn_p_mode: only the default; sums are fp32.
        deterministic: of the backward pass; torch.use_deterministic_algorithms also turns it on.

    Returns: out like q; then lse [T, Hq], fp32 (fp64), natural logarithm, -inf for padding, and
        the temperature LSE likewise, if asked for. Neither is differentiable.
    """
    _common.only_default("partial_dtype", partial_dtype, torch.bfloat16)
    _common.only_default("sparse_attn_p_mode", sparse_attn_p_mode, "")
    _common.flag("return_softmax_lse", return_softmax_lse)
    if _common.flag("return_temperature_lse", return_temperature_lse) and not return_softmax_lse:
        raise ValueError("return_temperature_lse: True needs return_softmax_lse=True")
    scale = _check_inputs({"q": q, "k": k, "v": v}, metadata, softmax_scale)
    temperature = _common.temperature("lse_temperature_scale", lse_temperature_scale)
    options = {
        "cu_seqlens": metadata.cu_seqlens_q,
        "block_size": _common.BLOCK_SIZE,
        "return_lse": True,
        "deterministic": _common.deterministic(deterministic),
    }
    out, lse = sparse_attention(q, k, v, metadata.topk_indices, softmax_scale=scale, **options)
    if not return_softmax_lse:
        return out
    lse = lse.detach()
    if not return_temperature_lse:
        return out, lse
    if temperature == 1.0:
        return out, lse, lse
    with torch.no_grad():
        _, temperature_lse = sparse_attention(
            q, k, v, metadata.topk_indices, softmax_scale=scale / temperature, **options
        )
    return out, lse, temperature_lse


@torch.no_grad()  # the gradients are plain tensors, as there
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    metadata: AttentionMetadata,
    *,
    softmax_scale: float | None = None,
    sparse_attn_p_mode: str = "",
    q_fp8: None = None,
    k_fp8: None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) like q, k, v, from the forward's out and lse.

    sparse_attn_p_mode, q_fp8, k_fp8: only the default. The rest as in forward.
    """
    _common.only_default("sparse_attn_p_mode", sparse_attn_p_mode, "")
    _common.only_default("q_fp8", q_fp8, None)
    _common.only_default("k_fp8", k_fp8, None)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    scale = _check_inputs(inputs, metadata, softmax_scale)
    _check.same_shape("dout", dout, "q", q)
    _check.same_shape("out", out, "q", q)
    _common.rows("lse", lse, tuple(q.shape[:2]), "[tokens, query heads]", q)
    dq, dk, dv = ops.attend_backward(
        q,
        k,
        v,
        None,
        None,
        metadata.topk_indices,
        metadata.cu_seqlens_q.contiguous(),
        out,
        lse.contiguous(),
        None,
        dout,
        None,
        [True, True, True, False, False, False],
        _common.BLOCK_SIZE,
        scale,
        1.0,
        _common.deterministic(deterministic),
    )
    return dq, dk, dv


def _check_inputs(tensors: dict[str, Tensor], metadata, softmax_scale) -> float:
    if not isinstance(metadata, AttentionMetadata):
        raise TypeError(
            f"metadata: got {type(metadata).__name__}, but the AttentionMetadata of prepare is "
            "needed"
        )
    _common.packed(tensors)
    q, k, v = (tensors[name] for name in "qkv")
    _check.main_heads(q, k, v)
    check_selection(q, metadata)
    return _check.scale("softmax_scale", softmax_scale, q.shape[-1])


def check_selection(q: Tensor, metadata: AttentionMetadata) -> None:
    ids = metadata.topk_indices
    if ids.device != q.device:
        raise TypeError(f"metadata: device {ids.device}, but q is on {q.device}")
    if ids.shape[1] != q.shape[0]:
        raise ValueError(f"metadata: prepared for {ids.shape[1]} tokens, but q has {q.shape[0]}")
    _check.divides("metadata", ids.shape[0], "heads of topk_indices", q.shape[-2], "heads of q")
