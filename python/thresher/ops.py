"""The torch operators `torch.ops.thresher.*`: allocate results and workspace, call the library.

They take token tensors packed [T, H, D] or batched [B, S, H, D] (any strides), and are meant for
`interface.py`, which has checked the arguments. `attend` carries the autograd formula of main
attention and proxy KL together, so that one fused backward serves both.

Modes of `kl` in `attend`: KL_NONE no proxy work at all; KL_FORWARD exact rows now; KL_BACKWARD rows
of zeros that carry the gradient, exact rows into kl_buffer when the backward runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import library

KL_NONE, KL_FORWARD, KL_BACKWARD = 0, 1, 2

# What `needs` of attend_backward may ask for, in the order of the results.
GRADIENTS = ("dq", "dk", "dv", "dq_proxy", "dk_proxy", "kl")


def accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rows(x: Tensor, heads: int) -> Tensor:
    """An empty [T, heads] or [B, S, heads] beside the token tensor x."""
    return x.new_empty((*x.shape[:-2], heads), dtype=accumulation_dtype(x))


def _like(x: Tensor) -> Tensor:
    """An empty tensor in the memory order of x, so that layouts go through without a copy; the
    kernels write rows, so the last dimension is contiguous even if that of x is not."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(x)


def _tokens(x: Tensor) -> int:
    return x.shape[:-2].numel()


def readable(x: Tensor | None) -> Tensor | None:
    """x as the kernels can read it: contiguous in its last dimension and, on CUDA, with rows that
    start at multiples of 16 bytes. Copied only where it must be."""
    if x is None:
        return None
    x = x.detach()
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return x.contiguous()
    if x.is_cuda and x.element_size() == 2 and x.dtype != torch.int32:
        unit = 16 // x.element_size()
        if x.data_ptr() % 16 or any(
            s % unit for s, n in zip(x.stride()[:-1], x.shape[:-1]) if n > 1
        ):
            return x.contiguous().clone() if x.is_contiguous() else x.contiguous()
    return x


def _run(function, device: torch.device, *args) -> None:
    """Asks for the size of the workspace, allocates it, runs."""
    size = function(*args, None)
    try:
        workspace = torch.empty(max(size, 1) + 255, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if device.type != "cpu":
            raise  # torch.OutOfMemoryError, which training loops know
        raise MemoryError(f"workspace: {size} bytes could not be allocated") from error
    function(*args, workspace)


# --- selection ----------------------------------------------------------------------------------
def _empty_indices(q_proxy: Tensor, top_k_blocks: int) -> Tensor:
    *lead, tokens, heads, _ = q_proxy.shape
    return q_proxy.new_empty((*lead, heads, tokens, top_k_blocks), dtype=torch.int32)


@torch.library.custom_op("thresher::select_blocks", mutates_args=())
def select_blocks(
    q_proxy: Tensor,
    k_proxy: Tensor,
    cu_seqlens: Tensor | None,
    top_k_blocks: int,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    proxy_scale: float,
) -> Tensor:
    block_indices = _empty_indices(q_proxy, top_k_blocks)
    if _tokens(q_proxy) == 0:
        return block_indices
    _run(
        library().select_blocks,
        q_proxy.device,
        readable(q_proxy),
        readable(k_proxy),
        cu_seqlens,
        block_indices,
        block_size,
        init_blocks,
        local_blocks,
        proxy_scale,
    )
    return block_indices


@select_blocks.register_fake
def _(q_proxy, k_proxy, cu_seqlens, top_k_blocks, block_size, init_blocks, local_blocks, scale):
    return _empty_indices(q_proxy, top_k_blocks)


@torch.library.custom_op("thresher::check_block_indices", mutates_args=())
def check_block_indices(
    q: Tensor, k: Tensor, block_indices: Tensor, cu_seqlens: Tensor | None, block_size: int
) -> None:
    """Raises ValueError naming the first bad (head, token, slot). Synchronises on CUDA."""
    if _tokens(q) > 0:
        _run(
            library().check_block_indices,
            q.device,
            readable(q),
            readable(k),
            readable(block_indices),
            cu_seqlens,
            block_size,
        )


@check_block_indices.register_fake
def _(q, k, block_indices, cu_seqlens, block_size):
    return None


# --- attention ----------------------------------------------------------------------------------
@torch.library.custom_op("thresher::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    block_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    kl_buffer: Tensor | None,
    block_size: int,
    softmax_scale: float,
    proxy_scale: float,
    kl: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, proxy_lse, kl). Without block_indices: over all visible keys (warm-up).

    proxy_lse and kl have no rows when kl is KL_NONE.
    """
    out, lse, proxy_lse, kl_rows = _attend_results(q, q_proxy, kl)
    if kl == KL_BACKWARD:
        kl_rows.zero_()
    if _tokens(q) == 0:
        return out, lse, proxy_lse, kl_rows
    proxy = kl != KL_NONE
    q_proxy, k_proxy = (q_proxy, k_proxy) if proxy else (None, None)
    q, k, v, q_proxy, k_proxy = (readable(x) for x in (q, k, v, q_proxy, k_proxy))
    ids = readable(block_indices)
    _run(
        library().forward,
        q.device,
        q,
        k,
        v,
        q_proxy,
        k_proxy,
        ids,
        cu_seqlens,
        out,
        lse,
        proxy_lse if proxy else None,
        block_size,
        softmax_scale,
        proxy_scale,
        deterministic,
    )
    if kl == KL_FORWARD:
        _run(
            library().proxy_kl,
            q.device,
            q,
            k,
            q_proxy,
            k_proxy,
            ids,
            cu_seqlens,
            lse,
            proxy_lse,
            kl_rows,
            block_size,
            softmax_scale,
            proxy_scale,
        )
    return out, lse, proxy_lse, kl_rows


def _attend_results(q, q_proxy, kl):
    lse = _rows(q, q.shape[-2])
    if kl == KL_NONE:
        none = q.new_empty(0, dtype=accumulation_dtype(q))
        return _like(q), lse, none, none.clone()
    proxy_heads = q_proxy.shape[-2]
    return _like(q), lse, _rows(q, proxy_heads), _rows(q, proxy_heads)


@attend.register_fake
def _(q, k, v, q_proxy, k_proxy, block_indices, cu_seqlens, kl_buffer, block_size, s, p, kl, d):
    return _attend_results(q, q_proxy, kl)


@torch.library.custom_op("thresher::attend_backward", mutates_args=())
def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    block_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    lse: Tensor,
    proxy_lse: Tensor | None,
    dout: Tensor | None,
    dkl: Tensor | None,
    needs: list[bool],
    block_size: int,
    softmax_scale: float,
    proxy_scale: float,
    deterministic: bool,
) -> list[Tensor]:
    """Gradients (and KL rows) that `needs` asks for, in the order of GRADIENTS."""
    results = _backward_results(q, k, v, q_proxy, k_proxy, needs)
    if _tokens(q) == 0:
        return [r.zero_() for r in results]
    given = iter(results)
    places = [next(given) if need else None for need in needs]
    q, k, v, q_proxy, k_proxy = (readable(x) for x in (q, k, v, q_proxy, k_proxy))
    _run(
        library().backward,
        q.device,
        q,
        k,
        v,
        q_proxy,
        k_proxy,
        readable(block_indices),
        cu_seqlens,
        readable(out),
        lse,
        proxy_lse,
        readable(dout),
        dkl.detach() if dkl is not None else None,
        *places,
        block_size,
        softmax_scale,
        proxy_scale,
        deterministic,
    )
    return results


def _backward_results(q, k, v, q_proxy, k_proxy, needs):
    inputs = (q, k, v, q_proxy, k_proxy)
    results = [_like(x) for x, need in zip(inputs, needs) if need]
    if needs[5]:
        results.append(_rows(q, q_proxy.shape[-2]))
    return results


@attend_backward.register_fake
def _(q, k, v, qp, kp, ids, cu, out, lse, plse, dout, dkl, needs, block_size, s, p, d):
    return _backward_results(q, k, v, qp, kp, needs)


def _no_double_backward(ctx, *gradients):
    raise NotImplementedError(
        "thresher: attention can be differentiated once; double backward is not supported"
    )


attend_backward.register_autograd(_no_double_backward, setup_context=lambda *args, **kwargs: None)


# --- autograd -----------------------------------------------------------------------------------
def _setup_context(ctx, inputs, output):
    q, k, v, q_proxy, k_proxy, block_indices, cu_seqlens, kl_buffer, *options = inputs
    out, lse, proxy_lse, kl_rows = output
    ctx.block_size, ctx.softmax_scale, ctx.proxy_scale, ctx.kl, ctx.deterministic = options
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, proxy_lse)
    if ctx.kl == KL_NONE:
        q_proxy = k_proxy = proxy_lse = None
        ctx.mark_non_differentiable(kl_rows)
    # Written by the backward, so it must not be a saved tensor, whose changes autograd forbids.
    ctx.kl_buffer = kl_buffer
    ctx.save_for_backward(q, k, v, q_proxy, k_proxy, block_indices, cu_seqlens, out, lse, proxy_lse)


def _backward(ctx, dout, _dlse, _dproxy_lse, dkl):
    q, k, v, q_proxy, k_proxy, block_indices, cu_seqlens, out, lse, proxy_lse = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    if ctx.kl == KL_NONE:
        dkl = None
    needs = [dout is not None and wanted[i] for i in range(3)]
    needs += [dkl is not None and wanted[i] for i in (3, 4)]
    needs.append(ctx.kl == KL_BACKWARD and ctx.kl_buffer is not None)
    if not any(needs):
        return (None,) * 13
    results = attend_backward(
        q,
        k,
        v,
        q_proxy,
        k_proxy,
        block_indices,
        cu_seqlens,
        out,
        lse,
        proxy_lse,
        dout if any(needs[:3]) else None,
        dkl if any(needs[3:5]) else None,
        needs,
        ctx.block_size,
        ctx.softmax_scale,
        ctx.proxy_scale,
        ctx.deterministic,
    )
    given = iter(results)
    gradients = [next(given) if need else None for need in needs]
    if needs[5]:
        with torch.no_grad():
            ctx.kl_buffer.copy_(gradients[5])
    return (*gradients[:5], *(None,) * 8)


attend.register_autograd(_backward, setup_context=_setup_context)
