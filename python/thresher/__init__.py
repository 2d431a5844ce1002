"""Thresher: MiniMax Sparse Attention, trainable and fast."""

from __future__ import annotations

import json as _json

from . import compat, nn, reference
from .interface import (
    MsaResult,
    msa_attention,
    msa_warmup_attention,
    select_blocks,
    sparse_attention,
)

__version__ = "0.1.0"

__all__ = [
    "MsaResult",
    "compat",
    "info",
    "msa_attention",
    "msa_warmup_attention",
    "nn",
    "reference",
    "select_blocks",
    "sparse_attention",
]


def info() -> dict:
    """Version, build, backends and devices found, and what each supports."""
    import torch

    from ._library import library

    result = _json.loads(str(library().info()))
    result["torch"] = torch.__version__
    result["cuda"]["available"] = bool(result["cuda"]["devices"]) and torch.cuda.is_available()
    return result
