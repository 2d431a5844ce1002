"""What the three modules share: fixed sizes and the checks of arguments that thresher lacks."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _check
from ...ops import accumulation_dtype

BLOCK_SIZE = 128
TOP_K_BLOCKS = 16


def only_default(name: str, value, default) -> None:
    """Refuses a setting that would change results or speed there and has no counterpart here."""
    if isinstance(value, type(default)) and value == default:
        return
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ValueError(f"{name}: {got} is not supported: only the default {default!r} is")


def flag(name: str, value) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), but a bool is needed")
    return value


def deterministic(value) -> bool:
    """True asks for it; False leaves it to torch.are_deterministic_algorithms_enabled()."""
    return flag("deterministic", value) or torch.are_deterministic_algorithms_enabled()


def temperature(name: str, value) -> float:
    value = _check.scale(name, value, 1)
    if value <= 0:
        raise ValueError(f"{name}: {value} is not supported: positive numbers are")
    return value


def documents(cu_seqlens_q, cu_seqlens_k, key_name: str, like: Tensor) -> Tensor:
    """The one cu_seqlens of both; here every query of a document is present."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), (key_name, cu_seqlens_k)):
        _check.tensor(name, x)
        if x.dtype != torch.int32 or x.device != like.device:
            raise TypeError(
                f"{name}: {x.dtype} on {x.device} is not supported: torch.int32 on {like.device} is"
            )
        if x.dim() != 1 or x.shape[0] < 2:
            raise ValueError(
                f"{name}: shape {tuple(x.shape)} is not supported: [num_docs + 1] with at least "
                "one document is"
            )
    # The same tensor twice, the usual call, costs no synchronisation with the device.
    if cu_seqlens_q is not cu_seqlens_k and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise ValueError(
            f"{key_name}: differs from cu_seqlens_q; queries that are the end of a longer key "
            "sequence (context parallelism) are not supported: equal bounds are"
        )
    return cu_seqlens_q.contiguous()


def packed(tensors: dict[str, Tensor]) -> None:
    """Token tensors [T, heads, dim] of one dtype, device and length."""
    for name, x in tensors.items():
        if _check.tensor(name, x).dim() != 3:
            raise ValueError(
                f"{name}: rank {x.dim()} (shape {tuple(x.shape)}) is not supported: packed "
                "[tokens, heads, dim] is"
            )
    _check.token_tensors(tensors, None)


def rows(name: str, x, shape: tuple[int, int], form: str, like: Tensor) -> None:
    """One number a token and head, such as an LSE."""
    _check.tensor(name, x)
    dtype = accumulation_dtype(like)
    if x.dtype != dtype or x.device != like.device:
        raise TypeError(
            f"{name}: {x.dtype} on {x.device} is not supported: {dtype} on {like.device} is"
        )
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, but {form} = {shape} is needed")
