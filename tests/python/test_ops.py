"""torch.ops.thresher.*: what torch is told about them (schemas, fake kernels, opcheck).

tests/contract/test_compile.py runs opcheck over every operator on packed fp32 tensors; here are the
other forms that an operator may be given.
"""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import thresher
from thresher import ops

from .problem import documents, heads_first, tensors

OPERATORS = ("select_blocks", "check_block_indices", "attend", "attend_backward")


def selected(x, cu_seqlens=None):
    return ops.select_blocks(x["q_proxy"], x["k_proxy"], cu_seqlens, 3, 8, 0, 1, 0.25)


def calls(x, cu_seqlens=None):
    """(name, operator, arguments) of every operator and mode for inputs x."""
    x = {name: t.detach() for name, t in x.items()}
    q, k, v, q_proxy, k_proxy = x.values()
    select = (q_proxy, k_proxy, cu_seqlens, 3, 8, 0, 1, 0.25)
    yield "select_blocks", ops.select_blocks, select
    ids = selected(x, cu_seqlens)
    yield "check_block_indices", ops.check_block_indices, (q, k, ids, cu_seqlens, 8)
    for blocks, mode in itertools.product((ids, None), (ops.KL_NONE, ops.KL_FORWARD)):
        proxy = (None, None) if mode == ops.KL_NONE else (q_proxy, k_proxy)
        inputs = (q, k, v, *proxy, blocks, cu_seqlens)
        yield "attend", ops.attend, (*inputs, None, 8, 0.25, 0.25, mode, True)
        out, lse, proxy_lse, kl = ops.attend(*inputs, None, 8, 0.25, 0.25, mode, True)
        if mode == ops.KL_NONE:
            results = (out, lse, None, torch.ones_like(out), None)
            needs = [True, True, True, False, False, False]
        else:
            results = (out, lse, proxy_lse, torch.ones_like(out), torch.ones_like(kl))
            needs = [True] * 6
        yield "attend_backward", ops.attend_backward, (
            *inputs, *results, needs, 8, 0.25, 0.25, True,
        )  # fmt: skip


FORMS = {
    "packed": lambda: (tensors(30), documents(11, 0, 19)),
    "packed, padding": lambda: (tensors(30), documents(11, 12)),
    "packed, no documents given": lambda: (tensors(30), None),
    "no tokens": lambda: (tensors(0), documents(0)),
    "bshd": lambda: (tensors(2, 20), None),
    "bhsd strides": lambda: (
        {n: heads_first(t).transpose(1, 2) for n, t in tensors(2, 20).items()},
        None,
    ),
    "last dimension outermost": lambda: (
        {n: t.permute(2, 0, 1).contiguous().permute(1, 2, 0) for n, t in tensors(30).items()},
        documents(11, 0, 19),
    ),
    "bf16": lambda: (tensors(30, dtype=torch.bfloat16), documents(11, 0, 19)),
    "fp64": lambda: (tensors(30, dtype=torch.float64), documents(11, 0, 19)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_operator_passes_opcheck_in_every_form(form):
    x, cu_seqlens = FORMS[form]()
    seen = set()
    for name, operator, arguments in calls(x, cu_seqlens):
        torch.library.opcheck(operator, arguments)
        seen.add(name)
    assert seen == set(OPERATORS)


def test_these_are_all_operators():
    registered = torch._C._dispatch_get_all_op_names()
    assert {n.split(".")[0] for n in registered if n.startswith("thresher::")} == {
        f"thresher::{name}" for name in OPERATORS
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_no_operator_says_that_it_writes_to_an_input(name):
    schema = getattr(torch.ops.thresher, name).default._schema
    assert not schema.is_mutable, schema


@pytest.mark.parametrize("form", FORMS)
def test_fake_kernel_gives_shape_stride_and_dtype_of_the_real_one(form):
    x, cu_seqlens = FORMS[form]()
    for name, operator, arguments in calls(x, cu_seqlens):
        real = operator(*arguments)
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(a) if torch.is_tensor(a) else a for a in arguments))
        if real is None:
            assert fake is None
            continue
        real, fake = ((r,) if torch.is_tensor(r) else r for r in (real, fake))
        assert len(fake) == len(real), name
        for a, b in zip(fake, real):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), name


@pytest.mark.parametrize("lead", [(30,), (3, 15)], ids=["packed", "batched"])
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_the_number_of_tokens_stays_symbolic(lead, warmup):
    """One trace serves every length: no size becomes a constant on the way."""
    x, environment = tensors(*lead), ShapeEnv()
    with FakeTensorMode(shape_env=environment) as mode:
        fake = {}
        for name, t in x.items():
            for axis in range(len(lead)):
                torch._dynamo.mark_dynamic(t, axis)
            fake[name] = mode.from_tensor(t)
        if warmup:
            r = thresher.msa_warmup_attention(**fake)
        else:
            r = thresher.msa_attention(**fake, block_size=8, top_k_blocks=3)
            assert r.block_indices.shape[-3] == 2 and r.block_indices.shape[-1] == 3
        tokens = len(lead) - 1
        assert isinstance(r.out.shape[tokens], torch.SymInt)
        assert isinstance(r.kl.shape[tokens], torch.SymInt)
    constants = {int(v) for v in environment.replacements.values() if v.is_number}
    assert not constants & set(lead), environment.replacements  # head dimensions may be constants


def test_backward_computes_the_gradients_it_is_asked_for_and_no_other():
    x, cu_seqlens = FORMS["packed"]()
    *_, (_, operator, arguments) = calls(x, cu_seqlens)
    arguments = list(arguments)
    place = next(i for i, a in enumerate(arguments) if isinstance(a, list))
    everything = operator(*arguments)
    for i in range(6):
        arguments[place] = [j == i for j in range(6)]
        (one,) = operator(*arguments)
        assert torch.equal(one, everything[i]), ops.GRADIENTS[i]


def test_tensors_that_kernels_can_read_are_not_copied():
    t = torch.randn(6, 4, 8)
    for view in (t, t.transpose(0, 1), t[::2], t[:, 1:3], t[..., 2:6], t[:1].expand(6, 4, 8)):
        assert ops.readable(view).data_ptr() == view.data_ptr()
        assert ops.readable(view).stride() == view.stride()
    assert ops.readable(t.transpose(1, 2)).is_contiguous()
    assert ops.readable(None) is None
