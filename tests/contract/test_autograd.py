"""Autograd as a training loop uses it: api.md section 2, cases.md rows 4, 18, 24."""

import pytest
import torch

from .cases import NAMES, make_case, upstream
from .checks import assert_same
from .run import call, run

MODES = pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])


def tiny(**kwargs):
    options = dict(lengths=(9, 0, 5), heads=(4, 2, 2, 1), dim=3, proxy_dim=2, block_size=4)
    return make_case("cpu", torch.float64, top_k_blocks=2, padding=1, **{**options, **kwargs})


@MODES
@pytest.mark.parametrize("heads", [(4, 2, 2, 1), (6, 3, 2, 2), (2, 1, 2, 1)], ids=str)
def test_gradcheck_of_out_in_fp64(api, heads, warmup):
    """Numerical derivatives of the main attention; the selection is replayed."""
    case = tiny(heads=heads)
    ids = None if warmup else run(api, case).block_indices
    extra = {} if warmup else {"block_indices": ids}
    inputs = [t.nan_to_num(0.0).requires_grad_(i < 3) for i, t in enumerate(case.arguments())]

    def f(*x):
        return call(api, case, x, kl=None, warmup=warmup, **extra).out

    assert torch.autograd.gradcheck(f, inputs)


@MODES
@pytest.mark.parametrize("heads", [(4, 2, 2, 1), (6, 3, 2, 2), (2, 1, 2, 1)], ids=str)
def test_gradcheck_of_kl_in_fp64(api, heads, warmup):
    """Numerical derivatives of the KL rows towards the proxy."""
    case = tiny(heads=heads)
    ids = None if warmup else run(api, case).block_indices
    extra = {} if warmup else {"block_indices": ids}
    inputs = [t.nan_to_num(0.0).requires_grad_(i > 2) for i, t in enumerate(case.arguments())]

    def f(*x):
        r = call(api, case, x, warmup=warmup, **extra)
        return r.kl, r.kl_loss

    assert torch.autograd.gradcheck(f, inputs)


@MODES
def test_two_forwards_outstanding_each_use_their_own_saved_state(api, device, dtype, warmup):
    """F1 F2 B1 B2 with other data, other lengths and other selections (case 18)."""
    cases = [
        make_case(device, dtype, lengths=(150, 20), seed=1),
        make_case(device, dtype, lengths=(33, 190), seed=2),
        make_case(device, dtype, lengths=(64,), seed=3, padding=5),
    ]
    ups = [upstream(case, seed=i) for i, case in enumerate(cases)]
    truths = [run(api, c, dout=u[0], dkl=u[1], warmup=warmup) for c, u in zip(cases, ups)]
    leaves = [[t.requires_grad_() for t in case.arguments()] for case in cases]
    results = [call(api, c, x, warmup=warmup) for c, x in zip(cases, leaves)]
    for i in (0, 2, 1):
        torch.autograd.backward([results[i].out, results[i].kl], list(ups[i]))
    for x, truth in zip(leaves, truths):
        for name, leaf in zip(NAMES, x):
            assert_same(name, leaf.grad, truth.gradients[name])


def test_backward_through_autograd_equals_the_gradients_of_one_loss(api, device, dtype):
    """Case 4: out and kl in one scalar loss, through further operations."""
    case = make_case(device, dtype, lengths=(140,))
    dout, dkl = upstream(case)
    truth = run(api, case, dout=dout, dkl=dkl)
    leaves = [t.requires_grad_() for t in case.arguments()]
    r = call(api, case, leaves)
    ((r.out * dout).sum(dtype=dkl.dtype) + (r.kl * dkl).sum()).backward()
    for name, leaf in zip(NAMES, leaves):
        assert_same(name, leaf.grad, truth.gradients[name])


@MODES
def test_retained_graph_gives_the_same_gradients_twice(api, device, dtype, warmup):
    case = make_case(device, dtype, lengths=(100, 9))
    dout, dkl = upstream(case)
    leaves = [t.requires_grad_() for t in case.arguments()]
    r = call(api, case, leaves, warmup=warmup, deterministic=True)
    grads = [
        torch.autograd.grad([r.out, r.kl], leaves, [dout, dkl], retain_graph=True) for _ in range(2)
    ]
    for name, a, b in zip(NAMES, *grads):
        assert torch.equal(a, b), name


def test_freed_graph_gives_torchs_clear_error(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(40,))
    leaves = [t.requires_grad_() for t in case.arguments()]
    r = call(api, case, leaves)
    r.out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        r.out.sum().backward()


def test_an_input_changed_in_place_before_the_backward_is_noticed(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(40,))
    leaves = [t.requires_grad_() for t in case.arguments()]
    hidden = [t * 1 for t in leaves]
    r = call(api, case, hidden)
    with torch.no_grad():
        hidden[1].zero_()
    with pytest.raises(RuntimeError, match=r"inplace|in-place"):
        r.out.sum().backward()


@MODES
@pytest.mark.parametrize(
    "needs",
    [
        ("q",),
        ("k",),
        ("v",),
        ("q_proxy",),
        ("k_proxy",),
        ("q", "v"),
        ("k", "q_proxy"),
        NAMES[:3],
        NAMES[3:],
    ],
    ids="-".join,
)
def test_partial_gradients(api, device, main_dtype, needs, warmup):
    case = make_case(device, main_dtype, lengths=(120, 33), padding=2)
    dout, dkl = upstream(case)
    full = run(api, case, dout=dout, dkl=dkl, warmup=warmup)
    given_out = dout if set(needs) & set(NAMES[:3]) else None
    given_kl = dkl if set(needs) & set(NAMES[3:]) else None
    part = run(api, case, dout=given_out, dkl=given_kl, needs=needs, warmup=warmup)
    for name in NAMES:
        if name in needs:
            assert_same(name, part.gradients[name], full.gradients[name])
        else:
            assert part.gradients[name] is None, name


def test_results_need_a_gradient_only_where_an_input_does(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(40,))
    arguments = case.arguments()
    r = call(api, case, arguments)
    assert not r.out.requires_grad and not r.kl.requires_grad and not r.kl_loss.requires_grad
    arguments[0].requires_grad_()
    r = call(api, case, arguments)
    assert r.out.requires_grad
    arguments = case.arguments()
    arguments[3].requires_grad_()
    assert call(api, case, arguments).kl.requires_grad
    assert not r.block_indices.requires_grad and not r.lse.requires_grad


@MODES
def test_no_grad_and_inference_mode(api, device, dtype, warmup):
    case = make_case(device, dtype, lengths=(100, 20))
    truth = run(api, case, warmup=warmup)
    leaves = [t.requires_grad_() for t in case.arguments()]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            r = call(api, case, leaves, warmup=warmup)
        assert not r.out.requires_grad
        assert torch.equal(r.out, truth.out) and torch.equal(r.kl, truth.kl)


def test_inference_tensors_as_inputs(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(60,))
    with torch.inference_mode():
        arguments = case.arguments()
        r = call(api, case, arguments)
    assert torch.equal(r.out, run(api, case).out)


@MODES
def test_double_backward_gives_a_clear_error(api, device, main_dtype, warmup, thresher_only):
    case = make_case(device, main_dtype, lengths=(40,))
    leaves = [t.requires_grad_() for t in case.arguments()]
    r = call(api, case, leaves, warmup=warmup)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)twice|double|second|once"):
        (gradient,) = torch.autograd.grad((r.out.float() ** 2).sum(), leaves[:1], create_graph=True)
        gradient.float().sum().backward()


# --- unused KL --------------------------------------------------------------------------------
@MODES
def test_dropped_kl_leaves_the_proxy_without_a_gradient(api, device, dtype, warmup):
    """Case 24: None or zeros, no autograd error; the main gradients are what they were."""
    case = make_case(device, dtype, lengths=(150,))
    dout, dkl = upstream(case)
    dropped = run(api, case, dout=dout, warmup=warmup)
    full = run(api, case, dout=dout, dkl=dkl, warmup=warmup)
    for name in NAMES[3:]:
        gradient = dropped.gradients[name]
        assert gradient is None or (gradient == 0).all()
    for name in NAMES[:3]:
        assert_same(name, dropped.gradients[name], full.gradients[name])


def count_proxy_reads(monkeypatch, api, case, **upstreams):
    """The arguments of every backward operator, seen by a dispatch mode: was dkl among them?"""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = str(func)
            result = func(*args, **(kwargs or {}))
            if name.startswith("thresher.") and "backward" in name:
                calls.append((name, func, args, kwargs or {}))
            return result

    with Watch():
        run(api, case, **upstreams)
    return calls


@MODES
def test_unused_kl_skips_the_work_of_the_proxy(
    api, device, main_dtype, warmup, thresher_only, monkeypatch
):
    """Proof by NaN: the backward gets proxy tensors whose use would show, and by its arguments.

    With kl dropped, the backward operator runs and is told that there is no dkl.
    """
    case = make_case(device, main_dtype, lengths=(100,))
    dout, dkl = upstream(case)
    unused = count_proxy_reads(monkeypatch, api, case, dout=dout, warmup=warmup)
    used = count_proxy_reads(monkeypatch, api, case, dout=dout, dkl=dkl, warmup=warmup)
    assert unused and used, "no backward operator was seen"

    def given(calls, name):
        values = []
        for _, func, args, kwargs in calls:
            names = [a.name for a in func._schema.arguments]
            bound = {**dict(zip(names, args)), **kwargs}
            values.append(bound.get(name))
        return values

    assert all(v is None for v in given(unused, "dkl")), "dkl was given though kl is unused"
    assert any(v is not None for v in given(used, "dkl"))


# --- autocast, scaling ------------------------------------------------------------------------
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_leaves_the_dtype_of_the_inputs(api, device, dtype, autocast_dtype):
    case = make_case(device, dtype, lengths=(70, 20))
    dout, dkl = upstream(case)
    truth = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    with torch.autocast(device, dtype=autocast_dtype):
        cast = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    assert cast.out.dtype == dtype
    assert torch.equal(cast.out, truth.out)
    for name in NAMES:
        assert torch.equal(cast.gradients[name], truth.gradients[name]), name


def test_grad_scaler_scales_and_unscales(api, device):
    """fp16 with a loss scale of 1,024: unscaled gradients equal the plain ones; Inf is found."""
    case = make_case(device, torch.float16, lengths=(90,))
    dout, dkl = upstream(case)
    truth = run(api, case, dout=dout, dkl=dkl)
    masters = [t.float().requires_grad_() for t in case.arguments()]
    optimizer = torch.optim.SGD(masters, lr=0.0)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    r = call(api, case, [m.half() for m in masters])
    loss = (r.out.float() * dout.float()).sum() + (r.kl * dkl).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for name, master in zip(NAMES, masters):
        reference = truth.gradients[name].float()
        assert (master.grad - reference).norm() <= 2e-3 * reference.norm(), name
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    r = call(api, case, [m.half() for m in masters])
    scaler.scale(r.out.float().sum() * 1e30).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < before, "the overflow was not seen"


def test_scaled_upstream_scales_the_gradients(api, device, dtype):
    """Powers of two only: linear to the last bit (for bf16 and fp32, which have the range)."""
    if dtype == torch.float16:
        pytest.skip("fp16 has not the range for an exact factor")
    case = make_case(device, dtype, lengths=(90,))
    dout, dkl = upstream(case)
    one = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    big = run(api, case, dout=dout * 1024, dkl=dkl * 1024, deterministic=True)
    for name in NAMES:
        assert torch.equal(big.gradients[name], one.gradients[name] * 1024), name


# --- hooks, views, accumulation ---------------------------------------------------------------
def test_gradients_accumulate_into_leaves(api, device, dtype):
    case = make_case(device, dtype, lengths=(60,))
    dout, dkl = upstream(case)
    leaves = [t.requires_grad_() for t in case.arguments()]
    for _ in range(2):
        r = call(api, case, leaves, deterministic=True)
        torch.autograd.backward([r.out, r.kl], [dout, dkl])
    truth = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    for name, leaf in zip(NAMES, leaves):
        assert torch.equal(leaf.grad, truth.gradients[name] * 2), name


def test_saved_tensor_hooks_see_what_is_kept_and_no_more(api, device, main_dtype):
    """Spec section 8: inputs, out, lse, proxy_lse, block_indices; nothing of size T x T."""
    case = make_case(device, main_dtype, lengths=(512,), top_k_blocks=2)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    leaves = [t.requires_grad_() for t in case.arguments()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        r = call(api, case, leaves)
    r.out.sum().backward()
    linear = 512 * max(8 * 64, 4 * 2)
    assert kept
    for tensor in kept:
        assert tensor.numel() <= linear, f"kept for the backward: {tuple(tensor.shape)}"


def test_offloaded_saved_tensors_give_the_same_gradients(api, device, dtype):
    case = make_case(device, dtype, lengths=(90, 10))
    dout, dkl = upstream(case)
    truth = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.cpu().clone(), lambda t: t.to(device)
    ):
        given = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    for name in NAMES:
        assert torch.equal(given.gradients[name], truth.gradients[name]), name


def test_out_may_be_changed_in_place_by_the_user_or_is_protected(api, device, main_dtype):
    """out is saved for the backward: changing it is an error of autograd, never a wrong sum."""
    case = make_case(device, main_dtype, lengths=(50,))
    dout, _dkl = upstream(case)
    truth = run(api, case, dout=dout)
    leaves = [t.requires_grad_() for t in case.arguments()]
    r = call(api, case, leaves)
    try:
        r.out.mul_(1.0).add_(1.0)
        r.out.backward(dout)
    except RuntimeError as error:
        assert "inplace" in str(error) or "in-place" in str(error)
    else:
        assert_same("q", leaves[0].grad, truth.gradients["q"])
