"""Packed, batched and strided tensors are the same data: api.md section 2, spec.md section 1."""

import pytest
import torch

from .cases import NAMES, make_case, upstream
from .checks import assert_outcome, assert_same, verify
from .run import call, run

LAYOUTS = ["bshd", "bhsd"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched_step_is_right(api, device, dtype, layout):
    verify(api, make_case(device, dtype, batch=3, lengths=140, layout=layout))


def test_bshd_is_the_default_for_four_dimensions(api, device, main_dtype):
    case = make_case(device, main_dtype, batch=2, lengths=50)
    named = make_case(device, main_dtype, batch=2, lengths=50, layout="bshd")
    assert torch.equal(run(api, case).out, run(api, named).out)
    verify(api, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch, length", [(1, 64), (4, 1), (2, 33)])
def test_results_have_the_documented_shapes(api, device, main_dtype, layout, batch, length):
    case = make_case(device, main_dtype, batch=batch, lengths=length, layout=layout)
    q_heads, _, proxy_heads, _ = case.heads
    r = call(api, case, case.arguments())
    assert r.out.shape == case.arguments()[0].shape, "like q"
    assert r.lse.shape == (batch, length, q_heads)
    assert r.kl.shape == (batch, length, proxy_heads)
    assert r.kl_loss.shape == ()
    assert r.block_indices.shape == (batch, proxy_heads, length, 3)
    assert r.block_indices.dtype == torch.int32
    assert r.lse.dtype == r.kl.dtype == torch.float32


def test_packed_results_have_the_documented_shapes(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(30, 0, 40), padding=5)
    q_heads, _, proxy_heads, _ = case.heads
    r = call(api, case, case.arguments())
    assert r.out.shape == (75, q_heads, 64)
    assert r.lse.shape == (75, q_heads)
    assert r.kl.shape == (75, proxy_heads)
    assert r.block_indices.shape == (proxy_heads, 75, 3)


def test_packed_without_cu_seqlens_is_one_document(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(90,))
    r = api.msa_attention(*case.arguments(), **case.options)
    assert torch.equal(r.out, run(api, case).out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched_equals_packed(api, device, dtype, layout):
    batched = make_case(device, dtype, batch=3, lengths=70, layout=layout)
    packed = make_case(device, dtype, lengths=(70, 70, 70))
    dout, dkl = upstream(packed)
    a = run(api, batched, dout=dout, dkl=dkl, deterministic=True)
    b = run(api, packed, dout=dout, dkl=dkl, deterministic=True)
    assert torch.equal(a.block_indices, b.block_indices)
    assert_same("out", a.out, b.out)
    assert_same("kl", a.kl, b.kl)
    for name in NAMES:
        assert_same(name, a.gradients[name], b.gradients[name])


# --- strides ----------------------------------------------------------------------------------
def fused(t):
    """A slice of a wider row, as from one projection for q, k and v."""
    wide = t.new_full((*t.shape[:-2], t.shape[-2] + 3, t.shape[-1]), float("nan"))
    wide[..., 1:-2, :] = t
    return wide[..., 1:-2, :]


def heads_first(t):
    return t.transpose(-3, -2).contiguous().transpose(-3, -2)


def every_other_token(t):
    wide = t.new_full((2 * t.shape[0], *t.shape[1:]), float("nan"))
    wide[::2] = t
    return wide[::2]


def two_bytes_off(t):
    """Data that starts 2 bytes past a 16-byte boundary (4 or 8 for wider elements)."""
    store = t.new_empty(t.numel() + 8)
    start = next(i for i in range(1, 8) if store[i:].data_ptr() % 16)
    view = store[start : start + t.numel()].view(t.shape)
    return view.copy_(t)


def last_dimension_strided(t):
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))
    wide[..., ::2] = t
    return wide[..., ::2]


def row_not_sixteen_bytes(t):
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 1), float("nan"))
    wide[..., :-1] = t
    return wide[..., :-1]


def dim_outermost(t):
    """Dense, but the last dimension has the largest stride: no result can lie in memory like it."""
    return t.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def expanded(t):
    """One token's row for all: stride 0."""
    return t[:1].expand_as(t)


VIEWS = [
    fused,
    heads_first,
    every_other_token,
    two_bytes_off,
    last_dimension_strided,
    row_not_sixteen_bytes,
    dim_outermost,
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
def test_inputs_of_any_stride_give_the_same_result(api, device, dtype, view):
    case = make_case(device, dtype, lengths=(100, 31))
    dout, dkl = upstream(case)
    truth = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    leaves = [view(t).detach().requires_grad_() for t in case.arguments()]
    assert any(not t.is_contiguous() or t.data_ptr() % 16 for t in leaves)
    r = call(api, case, leaves, deterministic=True)
    assert torch.equal(r.block_indices, truth.block_indices)
    assert torch.equal(r.out, truth.out)
    torch.autograd.backward([r.out, r.kl], [dout, dkl])
    for name, leaf in zip(NAMES, leaves):
        assert torch.equal(leaf.grad, truth.gradients[name]), name


@pytest.mark.parametrize("view", [*VIEWS, expanded], ids=lambda f: f.__name__)
def test_dout_of_any_stride_gives_the_same_gradients(api, device, dtype, view):
    """Spec section 9, cases 13 and 14: non-contiguous, expanded (stride 0), misaligned."""
    case = make_case(device, dtype, lengths=(100, 31))
    dout, dkl = upstream(case)
    strided = view(dout)
    truth = run(api, case, dout=strided.contiguous(), dkl=dkl, deterministic=True)
    given = run(api, case, dout=strided, dkl=dkl, deterministic=True)
    for name in NAMES:
        assert torch.equal(given.gradients[name], truth.gradients[name]), name


def test_expanded_dkl_gives_the_same_gradients(api, device, dtype):
    case = make_case(device, dtype, lengths=(100,))
    _, dkl = upstream(case)
    expanded = dkl[:1].expand_as(dkl)
    truth = run(api, case, dkl=expanded.contiguous(), deterministic=True)
    given = run(api, case, dkl=expanded, deterministic=True)
    assert torch.equal(given.gradients["k_proxy"], truth.gradients["k_proxy"])


def test_sum_backward_gives_an_expanded_dout(api, device, dtype):
    """out.sum().backward(): autograd hands over a stride-0 tensor."""
    case = make_case(device, dtype, lengths=(70, 10))
    leaves = [t.requires_grad_() for t in case.arguments()]
    r = call(api, case, leaves)
    r.out.sum().backward()
    outcome = run(api, case, dout=torch.ones_like(case.inputs.q))
    assert_same("q", leaves[0].grad, outcome.gradients["q"])
    assert_same("v", leaves[2].grad, outcome.gradients["v"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dout_strides_differ_from_those_of_out(api, device, dtype, layout):
    """Case 13: out comes in one memory order, dout in the other."""
    case = make_case(device, dtype, batch=2, lengths=60, layout=layout)
    dout, dkl = upstream(case)
    leaves = [t.requires_grad_() for t in case.arguments()]
    r = call(api, case, leaves)
    other = case.to_caller(dout).transpose(1, 2).contiguous().transpose(1, 2)
    torch.autograd.backward([r.out, r.kl], [other, dkl.unflatten(0, (2, 60))])
    truth = run(api, case, dout=dout, dkl=dkl)
    for name, leaf in zip(NAMES, leaves):
        assert_same(name, leaf.grad, case.to_caller(truth.gradients[name]))


def test_inputs_are_not_written_to(api, device, dtype):
    case = make_case(device, dtype, lengths=(90, 3), padding=1)
    dout, dkl = upstream(case)
    leaves = [t.requires_grad_() for t in case.arguments()]
    r = call(api, case, leaves)
    torch.autograd.backward([r.out, r.kl], [dout, dkl])
    for name, leaf, original in zip(NAMES, leaves, case.inputs):
        assert torch.equal(leaf.detach().nan_to_num(7.0), original.nan_to_num(7.0)), name


def test_key_rows_and_query_rows_may_be_the_same_memory(api, device, dtype):
    """k and v, or q_proxy and k_proxy, as one tensor: gradients add up in autograd."""
    case = make_case(device, dtype, lengths=(80,), heads=(4, 2, 2, 2))
    x = case.inputs
    case = case.with_inputs(v=x.k, k_proxy=x.q_proxy)
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl)
    assert_outcome(case, outcome, dout, dkl)
    q, k, q_proxy = (t.clone().requires_grad_() for t in (x.q, x.k, x.q_proxy))
    r = call(api, case, [q, k, k, q_proxy, q_proxy])
    torch.autograd.backward([r.out, r.kl], [dout, dkl])
    g = outcome.gradients
    assert_same("k", k.grad, (g["k"].double() + g["v"].double()).to(dtype))
    assert_same("q_proxy", q_proxy.grad, (g["q_proxy"].double() + g["k_proxy"].double()).to(dtype))
