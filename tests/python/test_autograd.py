"""What autograd asks of the front end, beside what tests/contract/test_autograd.py judges."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import thresher
from thresher import ops

from .problem import SELECTION, heads_first, tensors

NAMES = ("q", "k", "v", "q_proxy", "k_proxy")
LAYOUTS = pytest.mark.parametrize("layout", ["bshd", "bhsd"])


def tiny(layout):
    x = tensors(2, 5, dtype=torch.float64, dim=2)
    return x if layout == "bshd" else {n: heads_first(t) for n, t in x.items()}


# --- numerical derivatives --------------------------------------------------------------------
@LAYOUTS
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_gradcheck_fp64_of_batched_layouts(layout, warmup):
    """out towards q, k, v; kl_loss towards the proxy (the teacher carries no gradient)."""
    x = tiny(layout)
    ids = thresher.select_blocks(
        x["q_proxy"], x["k_proxy"], block_size=2, top_k_blocks=2, layout=layout
    )

    def attend(inputs):
        if warmup:
            return thresher.msa_warmup_attention(*inputs, layout=layout)
        return thresher.msa_attention(*inputs, block_indices=ids, block_size=2, layout=layout)

    main = [t.requires_grad_(i < 3) for i, t in enumerate(x.values())]
    assert torch.autograd.gradcheck(lambda *a: attend(a).out, main)
    proxy = [t.detach().requires_grad_(i > 2) for i, t in enumerate(x.values())]
    assert torch.autograd.gradcheck(lambda *a: attend(a).kl_loss, proxy)


@LAYOUTS
def test_gradcheck_fp64_of_sparse_attention(layout):
    x = tiny(layout)
    ids = thresher.select_blocks(
        x["q_proxy"], x["k_proxy"], block_size=2, top_k_blocks=2, layout=layout
    )

    def attend(q, k, v):
        return thresher.sparse_attention(q, k, v, ids, block_size=2, layout=layout)

    assert torch.autograd.gradcheck(attend, [x[n].requires_grad_() for n in "qkv"])


# --- what the backward is asked for -----------------------------------------------------------
class Backwards(TorchDispatchMode):
    """`needs` of every call of the backward operator."""

    def __init__(self):
        super().__init__()
        self.needs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.thresher.attend_backward.default:
            self.needs.append(next(a for a in args if isinstance(a, list)))
        return func(*args, **(kwargs or {}))


def asked(wanted, loss, **kwargs):
    """Names that the one backward call computes, for these leaves and this loss of the result."""
    x = tensors(20)
    for name in wanted:
        x[name].requires_grad_()
    with Backwards() as seen:
        loss(thresher.msa_attention(**x, **SELECTION, **kwargs)).backward()
    assert len(seen.needs) <= 1, "main attention and proxy are one pass"
    needs = seen.needs[0] if seen.needs else [False] * 6
    return {name for name, need in zip(ops.GRADIENTS, needs) if need}


def both(r):
    return r.out.sum() + r.kl_loss


@pytest.mark.parametrize("name", NAMES)
def test_backward_works_for_the_one_leaf_that_wants_a_gradient(name):
    assert asked([name], both) == {f"d{name}"}


def test_one_pass_computes_all_gradients():
    assert asked(NAMES, both) == {"dq", "dk", "dv", "dq_proxy", "dk_proxy"}


def test_unused_kl_asks_for_nothing_of_the_proxy():
    assert asked(NAMES, lambda r: r.out.sum()) == {"dq", "dk", "dv"}
    assert asked(NAMES, lambda r: r.out.sum(), kl=None) == {"dq", "dk", "dv"}
    rows = torch.zeros(20, 2)
    computed = asked(NAMES, both, kl="backward", kl_buffer=rows)
    assert computed == {"dq", "dk", "dv", "dq_proxy", "dk_proxy", "kl"}


def test_unused_out_asks_for_nothing_of_the_main_attention():
    assert asked(NAMES, lambda r: r.kl_loss) == {"dq_proxy", "dk_proxy"}


def test_weighted_rows_and_their_mean_may_be_used_together():
    x = tensors(20, grad=True)
    r = thresher.msa_attention(**x, **SELECTION)
    weights = torch.linspace(-1, 1, 40).reshape(20, 2)
    proxy = [x["q_proxy"], x["k_proxy"]]
    kwargs = {"retain_graph": True}
    rows = torch.autograd.grad((r.kl * weights).sum(), proxy, **kwargs)
    mean = torch.autograd.grad(r.kl_loss, proxy, **kwargs)
    together = torch.autograd.grad((r.kl * weights).sum() + r.kl_loss, proxy)
    for a, b, c in zip(rows, mean, together):
        torch.testing.assert_close(c, a + b, rtol=1e-4, atol=1e-6)


# --- what cannot be differentiated says so ----------------------------------------------------
@pytest.mark.parametrize("function", ["msa_attention", "msa_warmup_attention", "sparse_attention"])
def test_double_backward_gives_a_clear_error(function):
    x = tensors(20, grad=True)
    if function == "sparse_attention":
        ids = thresher.select_blocks(x["q_proxy"], x["k_proxy"], **SELECTION)
        out = thresher.sparse_attention(x["q"], x["k"], x["v"], ids, block_size=8)
    else:
        out = getattr(thresher, function)(**x).out
    (gradient,) = torch.autograd.grad(out.square().sum(), [x["q"]], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"thresher.*double backward"):
        gradient.sum().backward()


def test_lse_and_block_indices_are_constants_of_autograd():
    x = tensors(20, grad=True)
    r = thresher.msa_attention(**x, **SELECTION)
    ids = thresher.select_blocks(x["q_proxy"], x["k_proxy"], **SELECTION)
    assert not (r.lse.requires_grad or r.block_indices.requires_grad or ids.requires_grad)


# --- leaves that are views or shared ----------------------------------------------------------


@pytest.mark.parametrize("function", ["msa_attention", "msa_warmup_attention", "sparse_attention"])
def test_a_loss_on_lse_is_an_error_not_a_gradient_that_is_missing(function):
    x = [t.requires_grad_() for t in tensors(40).values()]
    if function == "sparse_attention":
        ids = thresher.select_blocks(x[3].detach(), x[4].detach(), **SELECTION)
        lse = thresher.sparse_attention(
            *x[:3], ids, block_size=SELECTION["block_size"], return_lse=True
        )[1]
    elif function == "msa_attention":
        lse = thresher.msa_attention(*x, **SELECTION).lse
    else:
        lse = thresher.msa_warmup_attention(*x).lse
    assert not lse.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        lse.sum().backward()


def test_one_projection_sliced_into_heads_gets_one_gradient():
    """q, k, v as slices of one tensor, as a fused projection gives them."""
    x = tensors(20)
    fused = torch.cat([x[n] for n in "qkv"], 1).requires_grad_()
    q, k, v = fused.split([4, 2, 2], 1)
    r = thresher.msa_attention(q, k, v, x["q_proxy"], x["k_proxy"], **SELECTION)
    r.out.square().sum().backward()
    leaves = [x[n].clone().requires_grad_() for n in "qkv"]
    r = thresher.msa_attention(*leaves, x["q_proxy"], x["k_proxy"], **SELECTION)
    r.out.square().sum().backward()
    assert torch.equal(fused.grad, torch.cat([t.grad for t in leaves], 1))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_finds_nothing():
    x = tensors(20, grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        both(thresher.msa_attention(**x, **SELECTION)).backward()
