"""thresher.compat.flash_msa: the calls of flash-msa, answered by thresher's functions."""

import inspect
import re

import pytest
import torch

import thresher
from thresher.compat import flash_msa
from thresher.compat.flash_msa import (
    flash_msa_func,
    flash_msa_func_warmup,
    flash_msa_warmup_func,
)

from .problem import documents, heads_first, tensors

LENGTH = 300
ORDER = ("q_proxy", "k_proxy", "q", "k", "v")  # the proxy comes first


def inputs(grad=False, dtype=torch.float32):
    """Leaves [B, heads, S, dim] in the order of flash-msa."""
    x = tensors(2, LENGTH, dim=32, grad=grad, dtype=dtype)
    return [heads_first(x[name]) for name in ORDER]


def ours(x, function=thresher.msa_attention, **kwargs):
    q_proxy, k_proxy, q, k, v = x
    return function(q, k, v, q_proxy, k_proxy, layout="bhsd", **kwargs)


def test_positional_calls_of_flash_msa_work_unchanged():
    for function in (flash_msa_func, flash_msa_warmup_func):
        names = list(inspect.signature(function).parameters)
        assert names[:7] == ["Q_proxy", "K_proxy", "Q", "K", "V", "top_k", "scale"]
        out, kl = function(*inputs(), 256, 32**-0.5)
        assert out.shape == (2, LENGTH, 4 * 32) and kl.shape == ()
    assert flash_msa_func_warmup is flash_msa_warmup_func
    assert thresher.compat.flash_msa is flash_msa


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sparse_call_is_msa_attention_with_blocks_of_128(dtype):
    x = inputs(dtype=dtype)
    out, kl = flash_msa_func(*x, 256, 0.2)
    r = ours(x, top_k_blocks=2, block_size=128, softmax_scale=0.2, proxy_scale=0.2)
    assert torch.equal(out, r.out.transpose(1, 2).flatten(2)) and torch.equal(kl, r.kl_loss)
    assert out.dtype == dtype and kl.dtype == torch.float32
    assert kl > 0, "a true value, not a placeholder"


def test_warmup_call_is_msa_warmup_attention_and_top_k_does_not_matter():
    x = inputs()
    r = ours(x, thresher.msa_warmup_attention)
    for top_k in ((), (256,), (None,), (7,)):
        out, kl = flash_msa_warmup_func(*x, *top_k)
        assert torch.equal(out, r.out.transpose(1, 2).flatten(2)) and torch.equal(kl, r.kl_loss)


def test_scale_defaults_to_the_head_dimension():
    x = inputs()
    for function, arguments in ((flash_msa_func, (256,)), (flash_msa_warmup_func, ())):
        a, b = function(*x, *arguments), function(*x, *arguments, scale=32**-0.5)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_gradients_reach_all_five_tensors_and_are_those_of_msa_attention(warmup):
    x, y = inputs(grad=True), inputs(grad=True)
    function = flash_msa_warmup_func if warmup else flash_msa_func
    out, kl = function(*x, 256)
    (out.square().sum() + 2 * kl).backward()
    r = ours(y, thresher.msa_warmup_attention) if warmup else ours(y, top_k_blocks=2)
    (r.out.square().sum() + 2 * r.kl_loss).backward()
    for name, a, b in zip(ORDER, x, y):
        assert a.grad is not None and (a.grad != 0).any(), name
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_cu_seqlens_over_the_flattened_batch_separate_documents(warmup):
    x = inputs()
    function = flash_msa_warmup_func if warmup else flash_msa_func
    rows, kl = function(*x, 256, cu_seqlens=documents(LENGTH, LENGTH))
    plain, plain_kl = function(*x, 256)
    torch.testing.assert_close(rows, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kl, plain_kl, rtol=1e-5, atol=1e-6)
    cut, _ = function(*x, 256, cu_seqlens=documents(100, 200, LENGTH))
    assert torch.allclose(cut[0, :100], plain[0, :100], rtol=1e-5, atol=1e-6)
    assert torch.allclose(cut[1], plain[1], rtol=1e-5, atol=1e-6)
    alone, _ = function(*(t[:1, :, 100:] for t in x), 256)
    torch.testing.assert_close(cut[0, 100:], alone[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_kl_metric_receives_the_value(shape):
    metric = torch.full(shape, float("nan"))
    _, kl = flash_msa_func(*inputs(grad=True), 256, kl_metric=metric)
    assert metric.item() == kl.item() and not metric.requires_grad and kl.requires_grad


# --- errors -----------------------------------------------------------------------------------
@pytest.mark.parametrize("top_k", [0, -128, 100, 129, 2.0, "256", None, True], ids=repr)
def test_top_k_that_is_no_multiple_of_a_block_is_refused(top_k):
    with pytest.raises((ValueError, TypeError), match=r"top_k.*128"):
        flash_msa_func(*inputs(), top_k)


@pytest.mark.parametrize("function", [flash_msa_func, flash_msa_warmup_func])
@pytest.mark.parametrize("name", ["Q_proxy", "K_proxy", "Q", "K", "V"])
@pytest.mark.parametrize("bad", [None, "rank", "dtype"], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batched", "cu_seqlens"])
def test_wrong_tensor_is_refused_under_the_name_of_flash_msa(function, name, bad, packed):
    x = inputs()
    i = ["Q_proxy", "K_proxy", "Q", "K", "V"].index(name)
    x[i] = {"rank": x[i][0], "dtype": x[i].int(), None: None}[bad]
    extra = {"cu_seqlens": documents(LENGTH, LENGTH)} if packed else {}
    with pytest.raises((ValueError, TypeError)) as caught:
        function(*x, 256, **extra)
    assert re.match(rf"{name}: ", str(caught.value)), str(caught.value)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", True], ids=repr)
def test_wrong_scale_is_refused_under_its_name(scale):
    with pytest.raises((ValueError, TypeError), match=r"^scale: "):
        flash_msa_func(*inputs(), 256, scale)


def test_wrong_kl_metric_is_refused_before_anything_runs():
    for bad in (
        torch.zeros(3),
        torch.zeros((), dtype=torch.int64),
        torch.zeros((), requires_grad=True),
        torch.zeros((), device="meta"),
        1.0,
    ):
        with pytest.raises((ValueError, TypeError), match=r"^kl_metric: "):
            flash_msa_func(*inputs(), 256, kl_metric=bad)
