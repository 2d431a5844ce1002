"""The training API of MiniMax's msa_v1 under its names: change the import, keep the calls.

    from thresher.compat.msa_v1 import attention, indexer, kl
    topk, indexer_lse = indexer.forward(qi, ki, cu_seqlens_q=cu, cu_seqlens_kv=cu, ...)
    metadata = attention.prepare(topk, cu, cu, ...)
    out, lse = attention.forward(q, k, v, metadata, return_softmax_lse=True)
    dqi, dki = kl.backward(q, k, lse, qi, ki, indexer_lse, metadata)

Blocks have 128 keys and a token keeps 16, as there; head counts, head dimensions, dtypes and
devices are those of thresher. What else differs: docs/compat.md.
"""

from . import attention, indexer, kl

__all__ = ["attention", "indexer", "kl"]
