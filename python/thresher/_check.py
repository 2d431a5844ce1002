"""Checks of arguments: ValueError or TypeError that names the argument, what it got and what is
supported, before anything runs. They look at shapes and types only, so they work under
torch.compile and never synchronise; values of cu_seqlens and block_indices are the library's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
LAYOUTS = ("bshd", "bhsd")
INT_MAX = 2**31 - 1


def _names(dtypes) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def tensor(name: str, x) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, but a torch.Tensor is needed")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: layout {x.layout} is not supported: torch.strided is")
    return x


def token_tensors(tensors: dict[str, Tensor], layout: str | None) -> tuple[dict, str | None]:
    """Checks what all token tensors have in common; returns them with heads before dim."""
    first_name, first = None, None
    for name, x in tensors.items():
        tensor(name, x)
        if x.dim() not in (3, 4):
            raise ValueError(
                f"{name}: rank {x.dim()} (shape {tuple(x.shape)}) is not supported: packed "
                "[T, heads, dim] or batched [B, S, heads, dim] / [B, heads, S, dim] is"
            )
        supported = DTYPES.get(x.device.type)
        if supported is None:
            raise TypeError(f"{name}: device {x.device} is not supported: cpu and cuda are")
        if x.dtype not in supported:
            more = ""
            if x.device.type == "cuda" and x.dtype in DTYPES["cpu"]:
                more = "; CPU tensors may have it"
            raise TypeError(
                f"{name}: dtype {str(x.dtype).removeprefix('torch.')} is not supported on "
                f"{x.device.type}: {_names(supported)} are{more}"
            )
        if first is None:
            first_name, first = name, x
            continue
        if x.dim() != first.dim():
            raise ValueError(
                f"{name}: rank {x.dim()}, but {first_name} has rank {first.dim()}; all inputs are "
                "packed or all are batched"
            )
        if x.dtype != first.dtype:
            raise TypeError(
                f"{name}: dtype {str(x.dtype).removeprefix('torch.')}, but {first_name} has "
                f"{str(first.dtype).removeprefix('torch.')}; all inputs have one dtype"
            )
        if x.device != first.device:
            raise TypeError(
                f"{name}: device {x.device}, but {first_name} is on {first.device}; one call takes "
                "tensors of one device"
            )
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is not supported: {', '.join(LAYOUTS)} are")
    if first.dim() == 3:
        if layout is not None:
            raise ValueError(
                f"layout: {layout!r} is for batched tensors of rank 4, but {first_name} is packed"
            )
    elif layout == "bhsd":
        tensors = {name: x.transpose(1, 2) for name, x in tensors.items()}
    lead = first.dim() - 2
    reference = next(iter(tensors.values()))
    tokens = math.prod(reference.shape[:lead])  # Size.numel() would make a symbolic size a number
    if tokens > INT_MAX:  # before results of that size are allocated
        raise ValueError(f"{first_name}: {tokens} tokens are not supported: up to {INT_MAX} are")
    for name, x in tensors.items():
        heads, dim = x.shape[-2:]
        if heads < 1 or dim < 1:
            raise ValueError(
                f"{name}: {heads} heads of dimension {dim}, but at least one of each is needed"
            )
        for axis in range(lead):
            if x.shape[axis] != reference.shape[axis]:
                what = "tokens" if axis == lead - 1 else "batch rows"
                raise ValueError(
                    f"{name}: {x.shape[axis]} {what}, but {first_name} has "
                    f"{reference.shape[axis]} {what}"
                )
    return tensors, layout


def same_shape(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.shape[-2:] != other.shape[-2:]:
        raise ValueError(
            f"{name}: {x.shape[-2]} heads of dimension {x.shape[-1]}, but {other_name} has "
            f"{other.shape[-2]} of {other.shape[-1]}"
        )


def same_dim(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.shape[-1] != other.shape[-1]:
        raise ValueError(
            f"{name}: head dimension {x.shape[-1]}, but {other_name} has {other.shape[-1]}"
        )


def divides(name: str, few: int, few_name: str, many: int, many_name: str) -> None:
    if many % few != 0:
        raise ValueError(
            f"{name}: {few} {few_name} do not divide {many} {many_name}; each serves as many"
        )


def main_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    same_dim("k", k, "q", q)
    same_shape("v", v, "k", k)
    divides("k", k.shape[-2], "key/value heads", q.shape[-2], "query heads of q")


def proxy_heads(q_proxy: Tensor, k_proxy: Tensor) -> None:
    same_dim("k_proxy", k_proxy, "q_proxy", q_proxy)
    divides("k_proxy", k_proxy.shape[-2], "proxy key heads", q_proxy.shape[-2], "heads of q_proxy")


def number(name: str, value, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), but an int is needed")
    if not least <= value <= INT_MAX:
        raise ValueError(f"{name}: {value} is not supported: {least} to {INT_MAX} are")
    return value


def scale(name: str, value, dim: int) -> float:
    if value is None:
        return float(dim) ** -0.5
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), but a float is needed")
    if not math.isfinite(value):
        raise ValueError(f"{name}: {value} is not supported: finite numbers are")
    return float(value)


def selection_options(top_k_blocks, block_size, init_blocks, local_blocks) -> None:
    number("top_k_blocks", top_k_blocks, 1)
    number("block_size", block_size, 1)
    number("init_blocks", init_blocks, 0)
    number("local_blocks", local_blocks, 0)
    if init_blocks + local_blocks > top_k_blocks:
        raise ValueError(
            f"top_k_blocks: {top_k_blocks} is less than init_blocks + local_blocks = "
            f"{init_blocks} + {local_blocks}; forced blocks count towards it"
        )


def cu_seqlens(value, like: Tensor) -> Tensor | None:
    if value is None:
        return None
    tensor("cu_seqlens", value)
    if like.dim() == 4:
        raise ValueError(
            "cu_seqlens: given for batched tensors of rank 4; it belongs to packed [T, heads, dim]"
        )
    if value.dtype != torch.int32:
        raise TypeError(
            f"cu_seqlens: dtype {str(value.dtype).removeprefix('torch.')} is not supported: "
            "int32 is"
        )
    if value.dim() != 1 or value.shape[0] < 1:
        raise ValueError(
            f"cu_seqlens: shape {tuple(value.shape)} is not supported: [num_docs + 1] is"
        )
    if value.device != like.device:
        raise TypeError(f"cu_seqlens: device {value.device}, but the inputs are on {like.device}")
    return value.contiguous()


def block_indices(value, q: Tensor, top_k_blocks: int | None = None, heads: int | None = None):
    """[Hp, T, K] or [B, Hp, S, K] int32 for q in [T, H, D] or [B, S, H, D]."""
    tensor("block_indices", value)
    if value.dtype != torch.int32:
        raise TypeError(
            f"block_indices: dtype {str(value.dtype).removeprefix('torch.')} is not supported: "
            "int32 is"
        )
    if value.device != q.device:
        raise TypeError(f"block_indices: device {value.device}, but q is on {q.device}")
    packed = q.dim() == 3
    form = "[Hp, T, K]" if packed else "[B, Hp, S, K]"
    if value.dim() != q.dim():
        raise ValueError(
            f"block_indices: rank {value.dim()} (shape {tuple(value.shape)}), but {form} is needed"
        )
    want = (heads if heads is not None else value.shape[-3], q.shape[-3])
    lead_wrong = not packed and value.shape[0] != q.shape[0]
    if lead_wrong or value.shape[-3] != want[0] or value.shape[-2] != want[1]:
        raise ValueError(
            f"block_indices: shape {tuple(value.shape)}, but {form} with {want[0]} proxy heads and "
            f"{want[1]} tokens is needed"
        )
    if value.shape[-1] < 1:
        raise ValueError(f"block_indices: shape {tuple(value.shape)} has no places for block ids")
    if value.shape[-3] < 1:
        raise ValueError(f"block_indices: shape {tuple(value.shape)} has no proxy heads")
    if top_k_blocks is not None and value.shape[-1] != top_k_blocks:
        raise ValueError(
            f"block_indices: {value.shape[-1]} places a token, but top_k_blocks is {top_k_blocks}"
        )
    divides("block_indices", value.shape[-3], "proxy heads", q.shape[-2], "query heads of q")
    return value


def flag(name: str, value):
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), but a bool is needed")
    return value
