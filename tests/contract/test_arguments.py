"""Wrong arguments: ValueError or TypeError that names the argument, before anything is written.

Everything runs in this process: a crash of the interpreter is a failure of the suite.
"""

import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from .cases import NAMES, make_case
from .run import call

pytestmark = pytest.mark.usefixtures("thresher_only")


def good(device, dtype, **kwargs):
    return make_case(device, dtype, lengths=(40, 24), **kwargs)


def refused(api, case, arguments, name, *, warmup=False, **kwargs):
    """The call raises, and the text names `name`; returns the text."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call(api, case, arguments, warmup=warmup, **kwargs)
    text = str(caught.value)
    assert re.search(rf"\b{name}\b", text), f"{name} is not named in: {text}"
    return text


# --- ranks, shapes, dtypes, devices -----------------------------------------------------------
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
@pytest.mark.parametrize("rank", [0, 1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_wrong_rank_is_refused(api, device, main_dtype, name, rank, warmup):
    case = good(device, main_dtype)
    arguments = case.arguments()
    arguments[NAMES.index(name)] = torch.zeros((2,) * rank, device=device, dtype=main_dtype)
    refused(api, case, arguments, name, warmup=warmup)


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
@pytest.mark.parametrize(
    "bad", [torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_dtype_is_refused_with_what_is_supported(api, device, main_dtype, name, bad, warmup):
    case = good(device, main_dtype)
    arguments = case.arguments()
    i = NAMES.index(name)
    arguments[i] = torch.zeros_like(arguments[i], dtype=bad)
    text = refused(api, case, arguments, name, warmup=warmup)
    assert str(bad).removeprefix("torch.") in text, "the value is not said"
    assert "bfloat16" in text or "bf16" in text or "dtype" in text, "what is supported is not said"


@pytest.mark.parametrize("name", NAMES[1:])
def test_mixed_dtypes_are_refused(api, device, main_dtype, name):
    case = good(device, main_dtype)
    arguments = case.arguments()
    i = NAMES.index(name)
    arguments[i] = arguments[i].to(torch.float16)
    refused(api, case, arguments, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [None, 3, "q", [[1.0]]], ids=["None", "int", "str", "list"])
def test_not_a_tensor_is_refused(api, device, main_dtype, name, value):
    case = good(device, main_dtype)
    arguments = case.arguments()
    arguments[NAMES.index(name)] = value
    refused(api, case, arguments, name)


@pytest.mark.parametrize("name", NAMES)
def test_other_devices_are_refused(api, device, main_dtype, name):
    case = good(device, main_dtype)
    arguments = case.arguments()
    i = NAMES.index(name)
    arguments[i] = torch.empty_like(arguments[i], device="meta")
    refused(api, case, arguments, "q" if name == "q" else name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, "cu_seqlens", "block_indices"])
def test_a_cpu_tensor_among_cuda_tensors_is_refused(api, device, main_dtype, name):
    case = good(device, main_dtype)
    arguments = case.arguments()
    kwargs = {}
    if name in NAMES:
        i = NAMES.index(name)
        arguments[i] = arguments[i].cpu()
    elif name == "block_indices":
        kwargs["block_indices"] = torch.zeros(4, 64, 3, dtype=torch.int32)
    else:
        case = make_case(device, main_dtype, lengths=(40, 24))
        object.__setattr__(case, "cu_seqlens", case.cu_seqlens.cpu())
    refused(api, case, arguments, "q" if name == "q" else name, **kwargs)


def test_sparse_layout_tensors_are_refused(api, device, main_dtype):
    case = good(device, main_dtype)
    arguments = case.arguments()
    arguments[0] = arguments[0].to_sparse()
    refused(api, case, arguments, "q")


@pytest.mark.parametrize("name", NAMES)
def test_lengths_that_differ_are_refused(api, device, main_dtype, name):
    case = good(device, main_dtype)
    arguments = case.arguments()
    i = NAMES.index(name)
    arguments[i] = arguments[i][:-1]
    with pytest.raises((ValueError, TypeError)):
        call(api, case, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_head_dimensions_that_differ_are_refused(api, device, main_dtype, name):
    case = good(device, main_dtype)
    arguments = case.arguments()
    i = NAMES.index(name)
    arguments[i] = arguments[i][..., :-8].contiguous()
    with pytest.raises((ValueError, TypeError), match=r"\b(q|k|v|q_proxy|k_proxy)\b"):
        call(api, case, arguments)


# Case 12 of cases.md: ratios that do not divide were accepted elsewhere, the output unwritten.
RATIOS = {
    "Hkv does not divide Hq (3 of 7)": ((7, 3, 7, 1), "k"),
    "Hkv does not divide Hq (2 of 33)": ((33, 2, 3, 1), "k"),
    "Hkv does not divide Hq (2 of 3)": ((3, 2, 1, 1), "k"),
    "Hkv larger than Hq": ((2, 4, 2, 1), "k"),
    "Hp does not divide Hq": ((8, 2, 3, 1), "q_proxy"),
    "Hp larger than Hq": ((2, 2, 4, 1), "q_proxy"),
    "Hpk does not divide Hp": ((12, 2, 4, 3), "k_proxy"),
    "Hpk larger than Hp": ((8, 2, 2, 4), "k_proxy"),
}


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
@pytest.mark.parametrize("heads, name", RATIOS.values(), ids=RATIOS.keys())
def test_illegal_head_ratio_is_refused(api, device, main_dtype, heads, name, warmup):
    case = good(device, main_dtype, heads=heads)
    text = refused(api, case, case.arguments(), name, warmup=warmup)
    for number in heads[:2] if name == "k" else heads[2:] if name == "k_proxy" else (heads[2],):
        assert str(number) in text, f"{number} is not said in: {text}"


@pytest.mark.parametrize("name", NAMES)
def test_no_heads_are_refused(api, device, main_dtype, name):
    case = good(device, main_dtype)
    arguments = case.arguments()
    i = NAMES.index(name)
    arguments[i] = arguments[i][:, :0]
    with pytest.raises((ValueError, TypeError)):
        call(api, case, arguments)


def test_head_dimension_zero_is_refused(api, device, main_dtype):
    case = good(device, main_dtype)
    arguments = [t[..., :0] for t in case.arguments()]
    with pytest.raises((ValueError, TypeError)):
        call(api, case, arguments)


# --- numbers ----------------------------------------------------------------------------------
NUMBERS = [
    ("top_k_blocks", 0),
    ("top_k_blocks", -1),
    ("top_k_blocks", -(2**31)),
    ("top_k_blocks", 2**31),
    ("top_k_blocks", 2**63),
    ("block_size", 0),
    ("block_size", -128),
    ("block_size", 2**31),
    ("block_size", 2**70),
    ("init_blocks", -1),
    ("init_blocks", 2**31),
    ("local_blocks", -1),
    ("local_blocks", 2**40),
    ("softmax_scale", float("nan")),
    ("softmax_scale", float("inf")),
    ("proxy_scale", float("nan")),
    ("proxy_scale", -float("inf")),
]


@pytest.mark.parametrize("name, value", NUMBERS)
def test_numbers_out_of_range_are_refused(api, device, main_dtype, name, value):
    case = good(device, main_dtype)
    object.__setattr__(case, "options", {**case.options, name: value})
    refused(api, case, case.arguments(), name)


@pytest.mark.parametrize("name", ["top_k_blocks", "block_size", "init_blocks", "local_blocks"])
@pytest.mark.parametrize("value", ["3", 2.5, None, [1]], ids=repr)
def test_numbers_of_the_wrong_type_are_refused(api, device, main_dtype, name, value):
    case = good(device, main_dtype)
    object.__setattr__(case, "options", {**case.options, name: value})
    refused(api, case, case.arguments(), name)


def test_more_forced_blocks_than_places_are_refused(api, device, main_dtype):
    case = good(device, main_dtype)
    object.__setattr__(
        case, "options", {**case.options, "init_blocks": 2, "local_blocks": 2, "top_k_blocks": 3}
    )
    text = refused(api, case, case.arguments(), "top_k_blocks")
    assert "init_blocks" in text and "local_blocks" in text


# --- cu_seqlens -------------------------------------------------------------------------------
def with_cu_seqlens(case, value):
    object.__setattr__(case, "cu_seqlens", value)
    return case


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([0, 40, 64], dtype=torch.int64),
        torch.tensor([0.0, 40.0, 64.0]),
        torch.tensor([[0, 40, 64]], dtype=torch.int32),
        torch.tensor(64, dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
        [0, 40, 64],
        64,
        "cu",
    ],
    ids=["int64", "float", "rank 2", "rank 0", "empty", "list", "int", "str"],
)
def test_cu_seqlens_of_the_wrong_kind_is_refused(api, device, main_dtype, value):
    if isinstance(value, torch.Tensor):
        value = value.to(device)
    case = with_cu_seqlens(good(device, main_dtype), value)
    refused(api, case, case.arguments(), "cu_seqlens")


@pytest.mark.parametrize(
    "value",
    [[1, 40, 64], [-1, 40, 64], [0, 50, 40, 64], [0, 40, 65], [0, 2**31 - 1], [0, -5], [0, 64, 0]],
    ids=str,
)
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_cu_seqlens_with_wrong_values_is_refused_on_the_cpu(api, main_dtype_cpu, value, warmup):
    """On a GPU nobody looks without a synchronisation; test_wrong_cu_seqlens_never_fault is its."""
    case = good("cpu", main_dtype_cpu)
    case = with_cu_seqlens(case, torch.tensor(value, dtype=torch.int32))
    refused(api, case, case.arguments(), "cu_seqlens", warmup=warmup)


@pytest.fixture
def main_dtype_cpu():
    return torch.float32


def test_cu_seqlens_of_batched_tensors_is_refused(api, device, main_dtype):
    case = make_case(device, main_dtype, batch=2, lengths=32)
    case = with_cu_seqlens(case, torch.tensor([0, 32, 64], dtype=torch.int32, device=device))
    refused(api, case, case.arguments(), "cu_seqlens")


# --- block_indices ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape", [(4, 64), (4, 63, 3), (3, 64, 3), (64, 4, 3), (4, 64, 3, 1), (0,)]
)
def test_block_indices_of_the_wrong_shape_are_refused(api, device, main_dtype, shape):
    case = good(device, main_dtype)
    ids = torch.zeros(shape, dtype=torch.int32, device=device)
    refused(api, case, case.arguments(), "block_indices", block_indices=ids)


@pytest.mark.parametrize("dtype_of_ids", [torch.int64, torch.float32, torch.int16, torch.bool])
def test_block_indices_of_the_wrong_dtype_are_refused(api, device, main_dtype, dtype_of_ids):
    case = good(device, main_dtype)
    ids = torch.zeros((4, 64, 3), device=device).to(dtype_of_ids)
    refused(api, case, case.arguments(), "block_indices", block_indices=ids)


def test_block_indices_with_strides_are_right_or_refused(api, device, main_dtype):
    case = good(device, main_dtype)
    ids = torch.zeros(4, 3, 64, dtype=torch.int32, device=device).transpose(1, 2)
    ids[:, :, 1:] = -1
    given = call(api, case, case.arguments(), block_indices=ids)
    dense = call(api, case, case.arguments(), block_indices=ids.contiguous())
    assert torch.equal(given.out, dense.out)


# --- layouts, names ---------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["sbhd", "", 3, "BSHD "])
def test_unknown_layout_is_refused(api, device, main_dtype, layout):
    case = make_case(device, main_dtype, batch=2, lengths=32, layout=layout)
    with pytest.raises((ValueError, TypeError), match="layout"):
        call(api, case, case.arguments())


def test_unknown_keyword_is_refused(api, device, main_dtype):
    case = good(device, main_dtype)
    with pytest.raises(TypeError, match="topk"):
        call(api, case, case.arguments(), topk=3)


# --- the other functions ----------------------------------------------------------------------
def test_select_blocks_names_its_arguments(api, device, main_dtype):
    x = good(device, main_dtype).inputs
    with pytest.raises((ValueError, TypeError), match="k_proxy"):
        api.select_blocks(x.q_proxy, x.k_proxy[:, :, :32].contiguous())
    with pytest.raises((ValueError, TypeError), match="q_proxy"):
        api.select_blocks(x.q_proxy[0], x.k_proxy)
    with pytest.raises((ValueError, TypeError), match="top_k_blocks"):
        api.select_blocks(x.q_proxy, x.k_proxy, top_k_blocks=-3)
    with pytest.raises((ValueError, TypeError), match="local_blocks"):
        api.select_blocks(x.q_proxy, x.k_proxy, local_blocks=-1)


def test_sparse_attention_names_its_arguments(api, device, main_dtype):
    x = good(device, main_dtype).inputs
    ids = torch.zeros(4, 64, 3, dtype=torch.int32, device=device)
    with pytest.raises((ValueError, TypeError), match="block_indices"):
        api.sparse_attention(x.q, x.k, x.v, ids.long())
    with pytest.raises((ValueError, TypeError), match="block_indices"):
        api.sparse_attention(x.q, x.k, x.v, ids[:3])  # 3 proxy heads do not divide 8
    with pytest.raises((ValueError, TypeError), match=r"\bv\b"):
        api.sparse_attention(x.q, x.k, x.v[:, :1], ids)
    with pytest.raises((ValueError, TypeError), match="block_size"):
        api.sparse_attention(x.q, x.k, x.v, ids, block_size=0)


# --- nothing is written before the check ------------------------------------------------------
def test_a_refused_call_writes_nothing(api, device, main_dtype):
    case = good(device, main_dtype)
    buffer = torch.full((64, 4), 7.0, device=device)
    arguments = case.arguments()
    arguments[2] = arguments[2][:-1]
    with pytest.raises(ValueError):
        call(api, case, arguments, kl="backward", kl_buffer=buffer)
    assert (buffer == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [36, 264])
def test_shape_that_the_gpu_does_not_cover_says_who_does(api, device, main_dtype, dim):
    case = make_case(device, main_dtype, lengths=(40,), dim=dim)
    with pytest.raises(ValueError, match=r"(?i)cpu"):
        call(api, case, case.arguments())


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [torch.float32, torch.float64])
def test_dtype_that_the_gpu_does_not_cover_says_who_does(api, device, bad):
    case = make_case(device, bad, lengths=(40,))
    with pytest.raises((ValueError, TypeError), match=r"(?i)cpu"):
        call(api, case, case.arguments())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "value", [[0, 50, 40, 64], [0, 40, 65], [0, 2**31 - 1], [5, 40, 64]], ids=str
)
def test_wrong_cu_seqlens_never_fault(api, device, main_dtype, value):
    """Values are garbage then, but nothing is read or written out of bounds."""
    case = good(device, main_dtype)
    case = with_cu_seqlens(case, torch.tensor(value, dtype=torch.int32, device=device))
    leaves = [t.requires_grad_() for t in case.arguments()]
    r = call(api, case, leaves)
    torch.autograd.backward([r.out, r.kl], [torch.ones_like(r.out), torch.ones_like(r.kl)])
    torch.cuda.synchronize()


# --- fuzz -------------------------------------------------------------------------------------
shapes = st.lists(st.integers(0, 5), min_size=0, max_size=5).map(tuple)
dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool]
)


@st.composite
def tensors(draw):
    """A tensor of any small shape, dtype and stride, sometimes with a large expanded size."""
    t = torch.zeros(draw(shapes), dtype=draw(dtypes))
    if t.dim() > 1 and draw(st.booleans()):
        t = t.transpose(0, draw(st.integers(1, t.dim() - 1)))
    if t.dim() and t.shape[0] == 1 and draw(st.booleans()):
        t = t.expand(draw(st.sampled_from([1, 2, 1000])), *t.shape[1:])
    return t


@st.composite
def almost_good(draw):
    """Five tensors of a legal problem, one or two of them replaced by something else."""
    heads = draw(st.sampled_from([(4, 2, 2, 1), (2, 1, 1, 1), (6, 3, 2, 2)]))
    tokens, dim = draw(st.integers(0, 9)), draw(st.integers(1, 9))
    sizes = [(tokens, heads[0], dim), *[(tokens, heads[1], dim)] * 2]
    sizes += [(tokens, heads[2], dim), (tokens, heads[3], dim)]
    result = [torch.zeros(size) for size in sizes]
    for _ in range(draw(st.integers(0, 2))):
        result[draw(st.integers(0, 4))] = draw(tensors())
    return result


# Nothing between 6 and 2^31: a legal top_k_blocks of a billion would only ask for its memory.
integers = st.one_of(
    st.integers(-3, 6), st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**31), -(2**63), -(2**65)])
)
options = st.fixed_dictionaries(
    {},
    optional={
        "top_k_blocks": integers,
        "block_size": integers,
        "init_blocks": integers,
        "local_blocks": integers,
        "cu_seqlens": st.lists(st.integers(-3, 12), max_size=5).map(
            lambda v: torch.tensor(v, dtype=torch.int32)
        ),
        "block_indices": st.one_of(tensors(), st.none()),
        "softmax_scale": st.floats(),
        "layout": st.sampled_from(["bshd", "bhsd", "thd", None]),
        "kl": st.sampled_from(["forward", "backward", None, "x"]),
        "kl_buffer": st.one_of(tensors(), st.none()),
    },
)


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(arguments=almost_good(), kwargs=options, warmup=st.booleans())
def test_any_arguments_give_a_result_or_a_python_error(api, arguments, kwargs, warmup):
    """ValueError, TypeError (OverflowError for integers beyond 64 bits), or a finished result."""
    function = api.msa_attention
    if warmup:
        function = api.msa_warmup_attention
        for name in ("top_k_blocks", "init_blocks", "local_blocks", "block_indices", "block_size"):
            kwargs.pop(name, None)
    try:
        r = function(*arguments, **kwargs)
    except (ValueError, TypeError) as error:
        assert str(error), "an error without a text"
    else:
        assert r.out.shape == arguments[0].shape
