"""msa_v1.kl: the gradient of the KL loss that trains the proxy (there: indexer)."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _check, ops
from . import _common
from .attention import AttentionMetadata, check_selection

__all__ = ["backward"]


@torch.no_grad()  # the gradients are plain tensors, as there
def backward(
    q: Tensor,
    k: Tensor,
    teacher_lse: Tensor,
    qi: Tensor,
    ki: Tensor,
    indexer_lse: Tensor,
    metadata: AttentionMetadata,
    *,
    softmax_scale: float | None = None,
    indexer_softmax_scale: float | None = None,
    loss_coeff: float = 1.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """(dqi, dki) of loss_coeff / (Hp * T) times the sum of all KL rows, T = q.shape[0].

    A token's row: KL(teacher || student) over the visible keys of its selected blocks, teacher the
    mean of exp(softmax_scale <q, k> - teacher_lse) over the heads of a group, student
    exp(indexer_softmax_scale <qi, ki> - indexer_lse). Tokens past the last document have no row
    but count in T. For a temperature, pass its LSE and the scale divided by it.

    Args:
        q, k: [T, Hq, D], [T, Hkv, D].
        teacher_lse: fp32 (fp64) [T, Hq], of attention.forward.
        qi, ki: [T, Hp, Dp], [T, Hpk, Dp].
        indexer_lse: fp32 (fp64) [Hp, T], of indexer.forward.
        softmax_scale, indexer_softmax_scale: default head_dim ** -0.5 of each.
    """
    if not isinstance(metadata, AttentionMetadata):
        raise TypeError(
            f"metadata: got {type(metadata).__name__}, but the AttentionMetadata of "
            "attention.prepare is needed"
        )
    _common.packed({"q": q, "k": k, "qi": qi, "ki": ki})
    _check.main_heads(q, k, k)
    _check.same_dim("ki", ki, "qi", qi)
    _check.divides("ki", ki.shape[-2], "proxy key heads", qi.shape[-2], "heads of qi")
    check_selection(q, metadata)
    tokens, heads = qi.shape[:2]
    if metadata.topk_indices.shape[0] != heads:
        raise ValueError(
            f"qi: {heads} heads, but metadata was prepared for {metadata.topk_indices.shape[0]}"
        )
    _common.rows("teacher_lse", teacher_lse, tuple(q.shape[:2]), "[tokens, query heads]", q)
    _common.rows("indexer_lse", indexer_lse, (heads, tokens), "[proxy heads, tokens]", q)
    softmax_scale = _check.scale("softmax_scale", softmax_scale, q.shape[-1])
    proxy_scale = _check.scale("indexer_softmax_scale", indexer_softmax_scale, qi.shape[-1])
    loss_coeff = _check.scale("loss_coeff", loss_coeff, 1)
    weight = loss_coeff / (heads * max(tokens, 1))
    dqi, dki = ops.attend_backward(
        q,
        k,
        k,  # values and out belong to the main gradients, which nobody asks for here
        qi,
        ki,
        metadata.topk_indices,
        metadata.cu_seqlens_q.contiguous(),
        q,
        teacher_lse.contiguous(),
        indexer_lse.t().contiguous(),
        None,
        teacher_lse.new_full((tokens, heads), weight),
        [False, False, False, True, True, False],
        _common.BLOCK_SIZE,
        softmax_scale,
        proxy_scale,
        _common.deterministic(deterministic),
    )
    return dqi, dki
