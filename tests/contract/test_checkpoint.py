"""Activation checkpointing: cases.md rows 18 and 19."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from .cases import NAMES, make_case, upstream
from .run import call, run

KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
MODES = pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])


def near_ties(case):
    """Proxy keys that are nearly equal: any change of arithmetic would change the selection."""
    k = case.inputs.k_proxy
    g = torch.Generator().manual_seed(9)
    noise = torch.randn(k.shape, generator=g).to(k) * torch.finfo(case.dtype).eps
    return case.with_inputs(k_proxy=(k[:1] * (1 + noise)).contiguous())


@MODES
@KINDS
def test_checkpoint_gives_the_gradients_of_the_plain_run(api, device, dtype, reentrant, warmup):
    case = near_ties(make_case(device, dtype, lengths=(200, 33)))
    dout, dkl = upstream(case)
    truth = run(api, case, dout=dout, dkl=dkl, warmup=warmup, deterministic=True)
    leaves = [t.requires_grad_() for t in case.arguments()]

    def block(*x):
        r = call(api, case, x, warmup=warmup, deterministic=True)
        return r.out, r.kl

    out, kl = checkpoint(block, *leaves, use_reentrant=reentrant)
    torch.autograd.backward([out, kl], [dout, dkl])
    assert torch.equal(out, truth.out) and torch.equal(kl, truth.kl)
    for name, leaf in zip(NAMES, leaves):
        assert torch.equal(leaf.grad, truth.gradients[name]), name


@KINDS
def test_recomputed_selection_is_the_same_to_the_bit(api, device, dtype, reentrant):
    """Near-tied scores; several checkpoints alive at once and undone in reverse order.

    Without early stop: torch ends a recompute as soon as the last saved tensor is there, which is
    inside the attention, so `block` would not come to its own lines after it.
    """
    cases = [near_ties(make_case(device, dtype, lengths=(300, 20 + i), seed=i)) for i in range(3)]
    selections = [[] for _ in cases]
    outs = []
    for case, seen in zip(cases, selections):
        leaves = [t.requires_grad_() for t in case.arguments()]

        def block(*x, case=case, seen=seen):
            r = call(api, case, x, deterministic=False)
            seen.append(r.block_indices.clone())
            return r.out

        with set_checkpoint_early_stop(False):
            outs.append(checkpoint(block, *leaves, use_reentrant=reentrant))
    for out in reversed(outs):
        out.float().sum().backward()
    for seen in selections:
        assert len(seen) == 2, "the block was not recomputed"
        assert torch.equal(seen[0], seen[1])


@KINDS
def test_decomposed_calls_survive_checkpointing(api, device, main_dtype, reentrant):
    """Selection outside, attention inside the checkpointed block: the route is replayed."""
    case = make_case(device, main_dtype, lengths=(150,))
    dout, _ = upstream(case)
    q, k, v, q_proxy, k_proxy = (t.requires_grad_() for t in case.arguments())
    ids = api.select_blocks(q_proxy, k_proxy, block_size=32, top_k_blocks=3, **case.geometry())

    def block(q, k, v):
        return api.sparse_attention(
            q, k, v, ids, block_size=32, deterministic=True, **case.geometry()
        )

    checkpoint(block, q, k, v, use_reentrant=reentrant).backward(dout)
    truth = run(api, case, dout=dout, kl=None, block_indices=ids, deterministic=True)
    for name, leaf in zip(NAMES, (q, k, v)):
        assert torch.equal(leaf.grad, truth.gradients[name]), name


@KINDS
def test_kl_buffer_is_right_after_a_recompute(api, device, main_dtype, reentrant):
    """kl="backward": the forward runs twice, and the buffer holds the truth after the backward."""
    case = make_case(device, main_dtype, lengths=(120, 9))
    dout, dkl = upstream(case)
    truth = run(api, case)
    rows = torch.full((129, 4), float("nan"), device=device)
    leaves = [t.requires_grad_() for t in case.arguments()]

    def block(*x):
        r = call(api, case, x, kl="backward", kl_buffer=rows)
        return r.out, r.kl

    out, kl = checkpoint(block, *leaves, use_reentrant=reentrant)
    torch.autograd.backward([out, kl], [dout, dkl])
    torch.testing.assert_close(rows, truth.kl, rtol=1e-4, atol=1e-5)


@KINDS
def test_nested_checkpoints(api, device, main_dtype, reentrant):
    case = make_case(device, main_dtype, lengths=(100,))
    dout, _ = upstream(case)
    truth = run(api, case, dout=dout, deterministic=True)
    leaves = [t.requires_grad_() for t in case.arguments()]

    def inner(*x):
        return call(api, case, x, deterministic=True).out

    def outer(*x):
        return checkpoint(inner, *x, use_reentrant=reentrant)

    checkpoint(outer, *leaves, use_reentrant=reentrant).backward(dout)
    for name, leaf in zip(NAMES[:3], leaves):
        assert torch.equal(leaf.grad, truth.gradients[name]), name
