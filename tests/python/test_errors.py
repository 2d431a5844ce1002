"""Whatever is wrong with an argument: ValueError or TypeError that names it, never a crash.

A legal call of a public function is drawn, then one argument is damaged in a drawn way. The text
must name the damaged argument, or, where two arguments contradict each other, one of the two.
tests/contract/test_arguments.py lists single faults; here hypothesis looks for those that nobody
listed. Everything runs in this process, so a crash ends the run.
"""

import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

import thresher
from thresher.nn import MsaAttention

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NOT_FLOATS = [torch.int32, torch.int64, torch.bool, torch.uint8, torch.complex64]
WRONG_OBJECTS = [None, 3, 2.5, "tensor", [[1.0]], (), object()]
TOO_LARGE = [2**31, 2**32, 2**63, 2**64, 2**70]

TENSORS = {
    "msa_attention": ("q", "k", "v", "q_proxy", "k_proxy"),
    "msa_warmup_attention": ("q", "k", "v", "q_proxy", "k_proxy"),
    "select_blocks": ("q_proxy", "k_proxy"),
    "sparse_attention": ("q", "k", "v", "block_indices"),
}
NUMBERS = {
    "msa_attention": ("top_k_blocks", "block_size", "init_blocks", "local_blocks"),
    "msa_warmup_attention": (),
    "select_blocks": ("top_k_blocks", "block_size", "init_blocks", "local_blocks"),
    "sparse_attention": ("block_size",),
}
SCALES = {
    "msa_attention": ("softmax_scale", "proxy_scale"),
    "msa_warmup_attention": ("softmax_scale", "proxy_scale"),
    "select_blocks": ("proxy_scale",),
    "sparse_attention": ("softmax_scale",),
}
FUZZ = settings(
    max_examples=250,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# --- legal calls ------------------------------------------------------------------------------
@st.composite
def legal(draw, names=tuple(TENSORS)):
    """(function name, arguments by name, form: "packed", "bshd" or "bhsd")."""
    function = draw(st.sampled_from(names))
    form = draw(st.sampled_from(["packed", "bshd", "bhsd"]))
    hq, hkv, hp, hpk = draw(st.sampled_from([(4, 2, 2, 1), (6, 3, 2, 2), (2, 1, 1, 1)]))
    tokens, dim, proxy_dim = draw(st.integers(1, 7)), draw(st.integers(2, 5)), 3
    dtype = draw(st.sampled_from(FLOATS))
    g = torch.Generator().manual_seed(0)

    def tensor(heads, dim):
        lead = {"packed": (tokens, heads), "bshd": (2, tokens, heads), "bhsd": (2, heads, tokens)}
        return torch.randn(*lead[form], dim, generator=g).to(dtype)

    x = {
        "q": tensor(hq, dim), "k": tensor(hkv, dim), "v": tensor(hkv, dim),
        "q_proxy": tensor(hp, proxy_dim), "k_proxy": tensor(hpk, proxy_dim),
    }  # fmt: skip
    x["block_indices"] = torch.zeros(
        *(() if form == "packed" else (2,)), hp, tokens, 1, dtype=torch.int32
    )
    arguments = {name: x[name] for name in TENSORS[function]}
    arguments.update(dict.fromkeys(NUMBERS[function], 1))
    if form == "packed":
        cut = draw(st.integers(0, tokens))
        arguments["cu_seqlens"] = torch.tensor([0, cut, tokens], dtype=torch.int32)
    else:
        arguments["layout"] = form
    if "init_blocks" in arguments:
        arguments["top_k_blocks"] = 2
    return function, arguments, form


def refused(function, arguments, *names):
    """The call raises, and the text begins with (or at least contains) one of the names."""
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(thresher, function)(**arguments)
    text = str(caught.value)
    assert any(re.search(rf"\b{name}\b", text) for name in names), f"{names}: {text}"
    return text


@FUZZ
@given(call=legal())
def test_the_calls_that_are_damaged_below_are_legal(call):
    function, arguments, _ = call
    getattr(thresher, function)(**arguments)


# --- tensors ----------------------------------------------------------------------------------
def floats_of(function):
    return [n for n in TENSORS[function] if n != "block_indices"]


@FUZZ
@given(call=legal(), data=st.data())
def test_an_object_that_is_no_tensor_is_refused_by_name(call, data):
    function, arguments, _ = call
    name = data.draw(st.sampled_from(TENSORS[function]))
    wrong = data.draw(st.sampled_from(WRONG_OBJECTS))
    if name == "block_indices" and wrong is None and function == "msa_attention":
        return
    refused(function, {**arguments, name: wrong}, name)


@FUZZ
@given(call=legal(), data=st.data())
def test_a_wrong_rank_is_refused_by_name(call, data):
    function, arguments, _ = call
    name = data.draw(st.sampled_from(TENSORS[function]))
    x = arguments[name]
    rank = data.draw(st.integers(0, 6).filter(lambda r: r != x.dim()))
    x = x.flatten()[0].reshape((1,) * rank)
    # With the other possible rank the first tensor is right, and those that differ from it are not.
    others = (*TENSORS[function][1:], "layout", "cu_seqlens") if rank in (3, 4) else ()
    refused(function, {**arguments, name: x}, name, *others)


@FUZZ
@given(call=legal(), data=st.data())
def test_a_wrong_dtype_is_refused_by_name_and_said(call, data):
    function, arguments, _ = call
    name = data.draw(st.sampled_from(TENSORS[function]))
    right = [torch.int32] if name == "block_indices" else []
    wrong = data.draw(
        st.sampled_from([d for d in [*FLOATS, *NOT_FLOATS] if d != arguments[name].dtype])
    )
    others = ()
    if wrong in right:
        return
    if wrong in FLOATS and name != "block_indices":  # the first one sets what the others must be
        others = floats_of(function)
    text = refused(function, {**arguments, name: arguments[name].to(wrong)}, name, *others)
    assert str(wrong).removeprefix("torch.") in text, text


@FUZZ
@given(call=legal(), data=st.data())
def test_another_device_is_refused_by_name(call, data):
    function, arguments, _ = call
    name = data.draw(st.sampled_from([n for n, a in arguments.items() if torch.is_tensor(a)]))
    text = refused(function, {**arguments, name: arguments[name].to("meta")}, name)
    assert "meta" in text


@FUZZ
@given(call=legal(), data=st.data())
def test_a_wrong_size_is_refused_by_a_name(call, data):
    """One dimension longer, shorter or empty; heads may still divide, then the call is legal."""
    function, arguments, form = call
    name = data.draw(st.sampled_from(TENSORS[function]))
    x = arguments[name]
    axis = data.draw(st.integers(0, x.dim() - 1))
    size = data.draw(st.sampled_from([0, x.shape[axis] - 1, x.shape[axis] + 1]))
    wrong = torch.zeros((*x.shape[:axis], size, *x.shape[axis + 1 :]), dtype=x.dtype)
    heads = x.dim() - (3 if form == "bhsd" or name == "block_indices" else 2)
    slots = name == "block_indices" and axis == x.dim() - 1
    names = [*TENSORS[function], "cu_seqlens", "top_k_blocks"]
    if (axis == heads or slots) and size > 0:
        # Another number of heads or places may be legal: a result, or a refusal.
        try:
            getattr(thresher, function)(**{**arguments, name: wrong})
        except (ValueError, TypeError) as error:
            assert any(re.search(rf"\b{n}\b", str(error)) for n in names), error
        return
    refused(function, {**arguments, name: wrong}, *names)


@FUZZ
@given(call=legal(), data=st.data())
def test_any_strides_give_the_same_result(call, data):
    """Strides are never wrong: gaps, other orders, repeated rows."""
    function, arguments, _ = call
    name = data.draw(st.sampled_from([n for n, a in arguments.items() if torch.is_tensor(a)]))
    x = arguments[name]
    order = data.draw(st.permutations(range(x.dim())))
    gap = data.draw(st.integers(1, 3))
    store = torch.full((*(x.shape[i] for i in order), gap), 77, dtype=x.dtype)
    strided = store[..., 0].permute([order.index(i) for i in range(x.dim())])
    strided.copy_(x)
    a, b = (getattr(thresher, function)(**{**arguments, name: t}) for t in (x, strided))
    a, b = (getattr(r, "out", r) for r in (a, b))
    assert torch.equal(a, b)


@pytest.mark.parametrize("function", TENSORS)
@pytest.mark.parametrize("packed", [True, False])
def test_empty_batches_are_legal_and_give_empty_results(function, packed):
    lead = (0,) if packed else (2, 0)
    heads = {"q": 4, "k": 2, "v": 2, "q_proxy": 2, "k_proxy": 1}
    x = {n: torch.zeros(*lead, h, 8, requires_grad=True) for n, h in heads.items()}
    x["block_indices"] = torch.zeros(*(() if packed else (2,)), 2, 0, 3, dtype=torch.int32)
    r = getattr(thresher, function)(**{n: x[n] for n in TENSORS[function]})
    if function == "select_blocks":
        assert r.numel() == 0 and r.shape[-1] == 16
        return
    out = r.out if hasattr(r, "out") else r
    assert out.shape == x["q"].shape
    out.sum().backward()
    assert x["q"].grad.shape == x["q"].shape


# --- numbers ----------------------------------------------------------------------------------
@FUZZ
@given(call=legal(("msa_attention", "select_blocks", "sparse_attention")), data=st.data())
def test_a_wrong_number_is_refused_by_name(call, data):
    """Negative, zero where one is needed, beyond 32 bits, or no whole number."""
    function, arguments, _ = call
    name = data.draw(st.sampled_from(NUMBERS[function]))
    least = 0 if name in ("init_blocks", "local_blocks") else 1
    wrong = data.draw(
        st.one_of(
            st.integers(-(2**70), least - 1),
            st.sampled_from(TOO_LARGE),
            st.floats(),
            st.sampled_from(["3", None, [1], True, torch.tensor([1, 2])]),
        )
    )
    refused(function, {**arguments, name: wrong}, name)


@FUZZ
@given(call=legal(), data=st.data())
def test_a_wrong_scale_is_refused_by_name(call, data):
    function, arguments, _ = call
    name = data.draw(st.sampled_from(SCALES[function]))
    wrong = data.draw(
        st.sampled_from([float("nan"), float("inf"), -float("inf"), "1", [1.0], True, 1j])
    )
    refused(function, {**arguments, name: wrong}, name)


@FUZZ
@given(call=legal(("msa_attention", "select_blocks")), data=st.data())
def test_more_forced_blocks_than_places_are_refused(call, data):
    function, arguments, _ = call
    top_k = data.draw(st.integers(1, 40))
    init = data.draw(st.integers(0, 60))
    local = data.draw(st.integers(max(0, top_k - init + 1), 80))
    options = {"top_k_blocks": top_k, "init_blocks": init, "local_blocks": local}
    refused(function, {**arguments, **options}, "top_k_blocks")


@FUZZ
@given(call=legal(), data=st.data())
def test_a_wrong_switch_or_layout_is_refused_by_name(call, data):
    function, arguments, _ = call
    switches = {
        "msa_attention": ("deterministic", "check_indices", "kl", "layout"),
        "msa_warmup_attention": ("deterministic", "kl", "layout"),
        "select_blocks": ("layout",),
        "sparse_attention": ("deterministic", "check_indices", "return_lse", "layout"),
    }
    name = data.draw(st.sampled_from(switches[function]))
    wrong = data.draw(st.sampled_from(["yes", 1, 0.0, [], "bsdh", "BSHD", "forwards", b"bshd"]))
    refused(function, {**arguments, name: wrong}, name)


def test_layout_of_packed_tensors_is_refused_by_name():
    x = torch.zeros(4, 2, 8)
    for layout in ("bshd", "bhsd"):
        with pytest.raises(ValueError, match="layout"):
            thresher.select_blocks(x, x, layout=layout)


# --- cu_seqlens -------------------------------------------------------------------------------
def in_order(values, tokens):
    return values and values[0] == 0 and values == sorted(values) and values[-1] <= tokens


@FUZZ
@given(
    call=legal().filter(lambda c: c[2] == "packed"),
    values=st.lists(st.one_of(st.integers(-3, 9), st.sampled_from([2**31 - 1, -(2**31)]))),
)
@example(call=("select_blocks", {"q_proxy": torch.zeros(4, 1, 2), "k_proxy": torch.zeros(4, 1, 2)},
               "packed"), values=[0, 3, 2, 4])  # fmt: skip
def test_bounds_that_decrease_or_leave_the_batch_are_refused_by_name(call, values):
    """Any list of numbers: either it is in order, or the text names cu_seqlens."""
    function, arguments, _ = call
    arguments = {**arguments, "cu_seqlens": torch.tensor(values, dtype=torch.int32)}
    tokens = next(iter(arguments.values())).shape[0]
    if in_order(values, tokens):
        getattr(thresher, function)(**arguments)
    else:
        refused(function, arguments, "cu_seqlens")


@FUZZ
@given(call=legal(), data=st.data())
def test_cu_seqlens_of_another_kind_is_refused_by_name(call, data):
    function, arguments, _ = call
    good = torch.tensor([0, 1], dtype=torch.int32)
    wrong = data.draw(
        st.sampled_from(
            [good.long(), good.float(), good[None], good[0], good[:0], [0, 1], 1, "0", (0, 1)]
        )
    )
    refused(function, {**arguments, "cu_seqlens": wrong}, "cu_seqlens")


def test_strided_cu_seqlens_are_read_right():
    x = torch.randn(6, 1, 4)
    good = torch.tensor([0, 2, 6], dtype=torch.int32)
    strided = torch.full((3, 2), 99, dtype=torch.int32)
    strided[:, 0] = good
    a, b = (thresher.select_blocks(x, x, block_size=1, cu_seqlens=c) for c in (good, strided[:, 0]))
    assert torch.equal(a, b)


# --- block_indices ----------------------------------------------------------------------------
@FUZZ
@given(
    call=legal(("sparse_attention",)).filter(lambda c: c[2] == "packed"),
    seed=st.integers(0, 2**16),
    size=st.sampled_from([2, 9, 2**20, 2**31 - 1]),
)
def test_any_block_ids_are_used_or_named_with_their_place(call, seed, size):
    """Random ids, most of them wrong: a result, or the (head, token, slot) of one that is wrong."""
    _, arguments, _ = call
    ids = arguments["block_indices"]
    g = torch.Generator().manual_seed(seed)
    arguments["block_indices"] = ids = torch.randint(
        -size, size, (*ids.shape[:-1], 3), generator=g
    ).int()
    try:
        thresher.sparse_attention(**arguments)
    except ValueError as error:
        text = str(error)
        assert "block_indices" in text
        assert set(ids.flatten().tolist()) & {int(n) for n in re.findall(r"-?\d+", text)}, text


# --- kl_buffer --------------------------------------------------------------------------------
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(6, 2, dtype=torch.float16),
        torch.zeros(6, 2, dtype=torch.float64),
        torch.zeros(5, 2),
        torch.zeros(6, 1),
        torch.zeros(12),
        torch.zeros(6, 2, device="meta"),
        torch.zeros(6, 2, requires_grad=True),
        torch.zeros(6, 2).to_sparse(),
        "buffer",
        7,
    ],
    ids=str,
)
def test_a_wrong_kl_buffer_is_refused_by_name(bad, warmup):
    x = [torch.zeros(6, h, 4) for h in (4, 2, 2, 2, 1)]
    function = thresher.msa_warmup_attention if warmup else thresher.msa_attention
    with pytest.raises((ValueError, TypeError), match=r"^kl_buffer"):
        function(*x, kl="backward", kl_buffer=bad)
    for kl in ("forward", None):
        with pytest.raises(ValueError, match=r"^kl_buffer"):
            function(*x, kl=kl, kl_buffer=torch.zeros(6, 2))


# --- the module -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["top_k_blocks", "block_size", "init_blocks", "local_blocks"])
@pytest.mark.parametrize("wrong", [-1, 2**31, "3", 1.5])
def test_a_layer_with_wrong_options_is_refused_by_name(name, wrong):
    with pytest.raises((ValueError, TypeError), match=name):
        layer = MsaAttention(8, 2, 1, 4, 1, mode="sparse", **{name: wrong})
        layer(torch.zeros(3, 8))


@pytest.mark.parametrize(
    "name, wrong", [("num_kv_heads", -1), ("num_proxy_heads", 0), ("num_proxy_kv_heads", 5)]
)
def test_a_layer_with_wrong_head_counts_is_refused_by_name(name, wrong):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "num_proxy_heads": 2, "num_proxy_kv_heads": 1}
    with pytest.raises(ValueError, match=f"^{name}"):
        MsaAttention(8, head_dim=4, **{**sizes, name: wrong})


def test_bounds_of_a_batched_layer_input_are_refused_by_name():
    layer = MsaAttention(8, 2, 1, 4, 1, mode="sparse")
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises((ValueError, TypeError), match="cu_seqlens"):
        layer(torch.zeros(2, 3, 8), bounds)
    for wrong in (bounds.long(), torch.tensor([0, 5], dtype=torch.int32), [0, 3], bounds[:0]):
        with pytest.raises((ValueError, TypeError), match="cu_seqlens"):
            layer(torch.zeros(3, 8), wrong)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(8), torch.zeros(3, 7), torch.zeros(1, 1, 3, 8), None]
)
def test_a_wrong_layer_input_is_refused_by_name(wrong):
    layer = MsaAttention(8, 2, 1, 4, 1, mode="sparse")
    with pytest.raises((ValueError, TypeError), match=r"^x: "):
        layer(wrong)
