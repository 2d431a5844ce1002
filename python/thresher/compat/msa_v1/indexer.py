"""msa_v1.indexer: the selection of the proxy (there: indexer) and the LSE of its scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _check
from ...interface import select_blocks, sparse_attention
from . import _common

__all__ = ["forward"]


def forward(
    q: Tensor,
    k: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    fragment_indices: None = None,
    schedule: None = None,
    workspace: None = None,
    lse_temperature: float = 1.0,
    deterministic: bool = False,
    use_fp16_score: bool = False,
) -> tuple[Tensor, Tensor]:
    """The 16 best blocks of 128 keys, that of the token included; no gradient.

    Args:
        q, k: proxy queries [T, Hp, Dp] and keys [T, Hpk, Dp]; dtypes and devices of select_blocks.
        cu_seqlens_q, cu_seqlens_kv: int32 [num_docs + 1], equal. The same tensor for both saves a
            synchronisation.
        max_seqlen_q, max_seqlen_kv: ints; nothing depends on them.
        lse_temperature: divides the scores in the returned LSE; the selection does not depend on
            it.
        deterministic: the selection always is.
        fragment_indices, schedule, workspace, use_fp16_score: only the default.

    Returns:
        topk_indices: int32 [Hp, T, 16], ids local to the document, ascending (so the token's own
            block is the last valid one), -1 to the right.
        selected_lse: fp32 (fp64) [Hp, T], ln sum exp(Dp ** -0.5 / lse_temperature <q, k_j>) over
            the visible keys of the selected blocks; -inf for padding.
    """
    _common.only_default("fragment_indices", fragment_indices, None)
    _common.only_default("schedule", schedule, None)
    _common.only_default("workspace", workspace, None)
    _common.only_default("use_fp16_score", use_fp16_score, False)
    _common.packed({"q": q, "k": k})
    _check.same_dim("k", k, "q", q)
    _check.divides("k", k.shape[-2], "proxy key heads", q.shape[-2], "heads of q")
    _check.number("max_seqlen_q", max_seqlen_q, 0)
    _check.number("max_seqlen_kv", max_seqlen_kv, 0)
    lse_temperature = _common.temperature("lse_temperature", lse_temperature)
    _common.flag("deterministic", deterministic)
    cu_seqlens = _common.documents(cu_seqlens_q, cu_seqlens_kv, "cu_seqlens_kv", q)

    topk_indices = select_blocks(
        q,
        k,
        cu_seqlens=cu_seqlens,
        top_k_blocks=_common.TOP_K_BLOCKS,
        block_size=_common.BLOCK_SIZE,
    )
    # The proxy's LSE is that of an attention in which every proxy head reads its own selection.
    with torch.no_grad():
        _, lse = sparse_attention(
            q,
            k,
            k,
            topk_indices,
            cu_seqlens=cu_seqlens,
            block_size=_common.BLOCK_SIZE,
            softmax_scale=q.shape[-1] ** -0.5 / lse_temperature,
            return_lse=True,
        )
    return topk_indices, lse.t().contiguous()
