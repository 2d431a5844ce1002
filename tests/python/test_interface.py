"""The public functions as they are announced: names, defaults, layouts, results, modes of kl."""

import inspect
import json
import subprocess
import sys

import pytest
import torch

import thresher

from .problem import SELECTION, documents, heads_first, tensors

REQUIRED = inspect.Parameter.empty
SELECT = {"top_k_blocks": 16, "block_size": 128, "init_blocks": 0, "local_blocks": 1}
SIGNATURES = {
    "msa_attention": (
        ["q", "k", "v", "q_proxy", "k_proxy"],
        {
            "cu_seqlens": None,
            **SELECT,
            "softmax_scale": None,
            "proxy_scale": None,
            "block_indices": None,
            "kl": "forward",
            "kl_buffer": None,
            "deterministic": None,
            "check_indices": None,
            "layout": None,
        },
    ),
    "msa_warmup_attention": (
        ["q", "k", "v", "q_proxy", "k_proxy"],
        {
            "cu_seqlens": None,
            "softmax_scale": None,
            "proxy_scale": None,
            "kl": "forward",
            "kl_buffer": None,
            "deterministic": None,
            "layout": None,
        },
    ),
    "select_blocks": (
        ["q_proxy", "k_proxy"],
        {"cu_seqlens": None, **SELECT, "proxy_scale": None, "layout": None},
    ),
    "sparse_attention": (
        ["q", "k", "v", "block_indices"],
        {
            "cu_seqlens": None,
            "block_size": 128,
            "softmax_scale": None,
            "return_lse": False,
            "deterministic": None,
            "check_indices": None,
            "layout": None,
        },
    ),
}


@pytest.mark.parametrize("module", [thresher, thresher.reference], ids=["thresher", "reference"])
@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_and_defaults_are_those_of_the_documentation(module, name):
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    given = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert len(given) + len(keywords) == len(parameters)
    assert [p.name for p in given] == SIGNATURES[name][0]
    assert all(p.default is REQUIRED for p in given)
    assert {p.name: p.default for p in keywords} == SIGNATURES[name][1]


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_argument_is_described(name):
    """In the function's own docstring, or in the one it refers to."""
    text = thresher.msa_attention.__doc__ + getattr(thresher, name).__doc__
    for argument in (*SIGNATURES[name][0], *SIGNATURES[name][1]):
        if argument != "return_lse":
            assert argument in text, argument


def test_public_names_are_all_there():
    assert set(thresher.__all__) >= {
        *SIGNATURES, "MsaResult", "compat", "info", "nn", "reference",
    }  # fmt: skip
    for name in thresher.__all__:
        assert hasattr(thresher, name)


# --- defaults ---------------------------------------------------------------------------------
def test_defaults_are_those_of_the_published_model():
    """128 keys a block, 16 blocks, the own block forced, scales of head_dim ** -0.5."""
    x = tensors(600, dim=32)
    r = thresher.msa_attention(**x)
    given = thresher.msa_attention(
        **x, top_k_blocks=16, block_size=128, init_blocks=0, local_blocks=1,
        softmax_scale=32**-0.5, proxy_scale=32**-0.5, kl="forward", deterministic=False,
        cu_seqlens=documents(600),
    )  # fmt: skip
    for field in ("out", "kl", "kl_loss", "lse", "block_indices"):
        assert torch.equal(getattr(r, field), getattr(given, field)), field


def test_scales_default_to_each_head_dimension_of_its_own():
    x = tensors(40, dim=16)
    x.update({n: t[..., :9] for n, t in x.items() if "proxy" in n})
    r = thresher.msa_attention(**x, **SELECTION)
    given = thresher.msa_attention(**x, **SELECTION, softmax_scale=0.25, proxy_scale=1 / 3)
    assert torch.equal(r.out, given.out) and torch.equal(r.kl, given.kl)


# --- layouts ----------------------------------------------------------------------------------
def batched(layout, grad=False):
    x = tensors(2, 21, grad=grad)
    return x if layout == "bshd" else {n: heads_first(t) for n, t in x.items()}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_batched_result_has_the_documented_shapes_in_the_layout_of_q(layout, warmup):
    x = batched(layout)
    if warmup:
        r = thresher.msa_warmup_attention(**x, layout=layout)
        assert r.block_indices is None
    else:
        r = thresher.msa_attention(**x, **SELECTION, layout=layout)
        assert r.block_indices.shape == (2, 2, 21, 3) and r.block_indices.dtype == torch.int32
    assert r.out.shape == x["q"].shape
    assert r.kl.shape == (2, 21, 2) and r.lse.shape == (2, 21, 4) and r.kl_loss.shape == ()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_decomposed_functions_equal_the_whole_in_batched_layouts(layout):
    """select_blocks, then sparse_attention: the same ids, out and lse, and the same gradients."""
    x = batched(layout, grad=True)
    whole = thresher.msa_attention(**x, **SELECTION, layout=layout, deterministic=True)
    ids = thresher.select_blocks(x["q_proxy"], x["k_proxy"], **SELECTION, layout=layout)
    assert torch.equal(ids, whole.block_indices)
    main = [x[n] for n in "qkv"]
    out, lse = thresher.sparse_attention(
        *main, ids, block_size=8, return_lse=True, layout=layout, deterministic=True
    )
    assert torch.equal(out, whole.out) and torch.equal(lse, whole.lse)
    dout = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, main, dout), torch.autograd.grad(whole.out, main, dout)
    ):
        assert torch.equal(a, b)


def test_sparse_attention_returns_lse_only_if_asked():
    x = tensors(20)
    ids = thresher.select_blocks(x["q_proxy"], x["k_proxy"], **SELECTION)
    arguments = (x["q"], x["k"], x["v"], ids)
    out = thresher.sparse_attention(*arguments, block_size=8)
    pair = thresher.sparse_attention(*arguments, block_size=8, return_lse=True)
    assert isinstance(out, torch.Tensor) and isinstance(pair, tuple)
    assert torch.equal(out, pair[0]) and pair[1].shape == (20, 4)


def test_layouts_of_one_batch_are_the_same_numbers():
    x = tensors(2, 21)
    a = thresher.msa_attention(**x, **SELECTION)
    b = thresher.msa_attention(
        **{n: heads_first(t) for n, t in x.items()}, **SELECTION, layout="bhsd"
    )
    assert torch.equal(a.out, b.out.transpose(1, 2))
    assert torch.equal(a.kl, b.kl) and torch.equal(a.block_indices, b.block_indices)


# --- modes of kl ------------------------------------------------------------------------------
FUNCTIONS = {
    "sparse": lambda x, **kwargs: thresher.msa_attention(**x, **SELECTION, **kwargs),
    "warmup": lambda x, **kwargs: thresher.msa_warmup_attention(**x, **kwargs),
}


def gradients(f, x, **kwargs):
    r = f(x, **kwargs)
    loss = r.out.square().sum() + (0 if r.kl_loss is None else 3 * r.kl_loss)
    return r, torch.autograd.grad(loss, list(x.values()), allow_unused=True)


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("lead", [(30,), (2, 15)], ids=["packed", "batched"])
def test_kl_forward_backward_and_none_differ_in_what_they_return_only(f, lead):
    x = tensors(*lead, grad=True)
    now, g_now = gradients(f, x, kl="forward")
    rows = torch.full(now.kl.shape, float("nan"))
    later, g_later = gradients(f, x, kl="backward", kl_buffer=rows)
    without_buffer, g_without = gradients(f, x, kl="backward")
    never, g_never = gradients(f, x, kl=None)

    assert (now.kl > 0).any() and now.kl_loss > 0
    for r in (later, without_buffer):
        assert (r.kl == 0).all() and r.kl_loss == 0 and r.kl.requires_grad
    assert never.kl is None and never.kl_loss is None
    torch.testing.assert_close(rows, now.kl.detach(), rtol=1e-4, atol=1e-5)
    for r in (later, without_buffer, never):
        assert torch.equal(r.out, now.out) and torch.equal(r.lse, now.lse)
    for i, want in enumerate(g_now):
        torch.testing.assert_close(g_later[i], want, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(g_without[i], want, rtol=1e-4, atol=1e-6)
        if i < 3:
            torch.testing.assert_close(g_never[i], want, rtol=1e-4, atol=1e-6)
        else:
            assert g_never[i] is None or (g_never[i] == 0).all()


def test_kl_buffer_is_written_by_the_backward_and_not_before():
    x = tensors(30, grad=True)
    rows = torch.full((30, 2), 7.0)
    r = FUNCTIONS["sparse"](x, kl="backward", kl_buffer=rows)
    assert (rows == 7).all()
    (r.out.sum() + r.kl_loss).backward()
    assert (rows != 7).all()


def test_kl_loss_counts_real_rows_and_keeps_finite_without_any():
    x = tensors(30)
    r = thresher.msa_attention(**x, **SELECTION, cu_seqlens=documents(11, 12))
    assert (r.kl[23:] == 0).all()
    torch.testing.assert_close(r.kl_loss, r.kl.sum() / (23 * 2))
    nothing = thresher.msa_attention(**x, **SELECTION, cu_seqlens=documents())
    assert nothing.kl_loss == 0


# --- information ------------------------------------------------------------------------------
def test_info_says_version_backends_devices_and_is_plain_data():
    info = thresher.info()
    assert json.loads(json.dumps(info)) == info
    assert info["version"] == thresher.__version__
    assert info["torch"] == torch.__version__
    assert "cpu" in info and "cuda" in info
    assert isinstance(info["cuda"]["devices"], list)
    assert info["cuda"]["available"] == (
        bool(info["cuda"]["devices"]) and torch.cuda.is_available()
    )


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "thresher", *arguments], capture_output=True, text=True
    )


def test_info_command_prints_the_same_as_json():
    done = command("info")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == thresher.__version__


def test_selftest_command_passes_and_is_quiet_if_told():
    done = command("selftest", "--quiet")
    assert (done.returncode, done.stdout.strip()) == (0, "selftest passed"), done.stderr


def test_selftest_fails_when_a_result_is_wrong(monkeypatch, capsys):
    from thresher import selftest

    right = selftest.interface.msa_attention

    def wrong(*args, **kwargs):
        r = right(*args, **kwargs)
        r.out = r.out * 1.1
        return r

    monkeypatch.setattr(selftest.interface, "msa_attention", wrong)
    monkeypatch.setattr(selftest, "DTYPES", {"cpu": (torch.float32,), "cuda": ()})
    assert selftest.run() is False
    assert "FAILED" in capsys.readouterr().out


def test_unknown_command_is_refused_with_the_list():
    done = command("nonsense")
    assert done.returncode == 2 and "selftest" in done.stderr
