"""thresher.compat.msa_v1: the calls of MiniMax's training API, answered by thresher's functions."""

import inspect

import pytest
import torch

import thresher
from thresher.compat import msa_v1
from thresher.compat.msa_v1 import attention, indexer, kl

from .problem import documents, tensors

LENGTHS = (130, 0, 1, 2200)  # the last has 18 blocks, more than a token keeps
PADDING = 5
REAL = sum(LENGTHS)
TOKENS = REAL + PADDING
CU = documents(*LENGTHS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
NAMES = ("q", "k", "v", "q_proxy", "k_proxy")
SCALE = 16**-0.5


def inputs(dtype=torch.float32, grad=False):
    return tensors(TOKENS, dtype=dtype, grad=grad).values()


def select(q_proxy, k_proxy, cu=CU, **kwargs):
    return indexer.forward(
        q_proxy,
        k_proxy,
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=2200,
        max_seqlen_kv=2200,
        **kwargs,
    )


def prepare(ids, cu=CU, cu_k=None, **kwargs):
    sizes = {"total_k": ids.shape[1], "total_rows": 21, "max_seqlen_q": 2200, "max_seqlen_k": 2200}
    return attention.prepare(ids, cu, cu if cu_k is None else cu_k, **(sizes | kwargs))


def ours(x, **kwargs):
    return thresher.msa_attention(*x, cu_seqlens=CU, **kwargs)


def proxy_scores(q_proxy, k_proxy, ids, scale):
    """fp64 scores [Hp, T, T], -inf where a key is not visible or its block is not selected."""
    t = torch.arange(REAL)
    document = torch.searchsorted(CU, t, right=True) - 1
    position = t - CU[document]
    visible = (document[:, None] == document) & (position[:, None] >= position)
    chosen = (ids[:, :REAL, :, None] == torch.arange(18)).any(2)  # [Hp, T, blocks]
    chosen = chosen[:, :, position // 128]
    scores = torch.einsum("thd,jd->htj", q_proxy[:REAL].double(), k_proxy[:REAL, 0].double())
    return (scale * scores).masked_fill(~(visible & chosen), -torch.inf)


# --- names ------------------------------------------------------------------------------------
SIGNATURES = {
    indexer.forward: "q k * cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv fragment_indices "
    "schedule workspace lse_temperature deterministic use_fp16_score",
    attention.prepare: "topk_indices cu_seqlens_q cu_seqlens_k * total_k total_rows max_seqlen_q "
    "max_seqlen_k fragment_indices prepare_kl_schedule",
    attention.forward: "q k v metadata * softmax_scale lse_temperature_scale return_softmax_lse "
    "return_temperature_lse partial_dtype sparse_attn_p_mode deterministic",
    attention.backward: "q k v dout out lse metadata * softmax_scale sparse_attn_p_mode q_fp8 "
    "k_fp8 deterministic",
    kl.backward: "q k teacher_lse qi ki indexer_lse metadata * softmax_scale indexer_softmax_scale "
    "loss_coeff deterministic",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__[-9:]}.{f.__name__}")
def test_arguments_have_the_names_and_the_order_of_msa_v1(function):
    positional, keyword = (part.split() for part in SIGNATURES[function].split("*"))
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == keyword


def test_modules_are_found_under_thresher():
    assert thresher.compat.msa_v1 is msa_v1
    assert (msa_v1.attention, msa_v1.indexer, msa_v1.kl) == (attention, indexer, kl)


# --- indexer ----------------------------------------------------------------------------------
@DTYPES
def test_selection_is_that_of_select_blocks_with_the_order_of_msa_v1(dtype):
    *_, q_proxy, k_proxy = inputs(dtype)
    ids, _ = select(q_proxy, k_proxy)
    assert ids.shape == (2, TOKENS, 16) and ids.dtype == torch.int32 and ids.is_contiguous()
    assert torch.equal(ids, thresher.select_blocks(q_proxy, k_proxy, cu_seqlens=CU))
    assert (ids[:, REAL:] == -1).all()

    position = torch.cat([torch.arange(n) for n in LENGTHS])
    count = (position // 128 + 1).clamp(max=16)
    used = torch.arange(16) < count[:, None]
    real = ids[:, :REAL]
    assert torch.equal(real >= 0, used.expand_as(real)), "-1 to the right of as many as there are"
    last = real.gather(2, (count - 1)[None, :, None].expand(2, -1, 1).long())[..., 0]
    assert torch.equal(last, (position // 128).int().expand_as(last)), "own block is the last one"


def test_ids_count_from_the_start_of_the_document():
    *_, q_proxy, k_proxy = inputs()
    ids, lse = select(q_proxy, k_proxy)
    alone, alone_lse = select(q_proxy[131:REAL], k_proxy[131:REAL], documents(2200))
    assert torch.equal(ids[:, 131:REAL], alone)
    torch.testing.assert_close(lse[:, 131:REAL], alone_lse, rtol=1e-5, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_lse_is_over_the_selected_keys_divided_by_the_temperature(dtype, temperature):
    *_, q_proxy, k_proxy = inputs(dtype)
    ids, lse = select(q_proxy, k_proxy, lse_temperature=temperature)
    assert lse.shape == (2, TOKENS) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert torch.equal(ids, select(q_proxy, k_proxy)[0]), "the selection does not depend on it"
    expected = proxy_scores(q_proxy, k_proxy, ids, SCALE / temperature).logsumexp(-1)
    torch.testing.assert_close(lse[:, :REAL].double(), expected, rtol=1e-5, atol=1e-5)
    assert (lse[:, REAL:] == -torch.inf).all()


def test_indexer_carries_no_gradient():
    *_, q_proxy, k_proxy = inputs(grad=True)
    assert not any(x.requires_grad for x in select(q_proxy, k_proxy))


# --- attention --------------------------------------------------------------------------------
@DTYPES
def test_forward_is_sparse_attention_with_its_gradients(dtype):
    x, y = list(inputs(dtype, grad=True)), list(inputs(dtype, grad=True))
    ids, _ = select(x[3], x[4])
    out, lse = attention.forward(*x[:3], prepare(ids), softmax_scale=0.3, return_softmax_lse=True)
    expected = thresher.sparse_attention(
        *y[:3], ids, cu_seqlens=CU, softmax_scale=0.3, return_lse=True
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert out.dtype == dtype and lse.shape == (TOKENS, 4) and not lse.requires_grad
    only = attention.forward(*x[:3], prepare(ids), softmax_scale=0.3)
    assert torch.equal(only, out)
    for o in (out, expected[0]):
        o.float().square().sum().backward()
    for name, a, b in zip(NAMES, x[:3], y):
        assert (a.grad != 0).any() and torch.equal(a.grad, b.grad), name


def test_default_scale_and_temperature_lse():
    q, k, v, q_proxy, k_proxy = inputs()
    metadata = prepare(select(q_proxy, k_proxy)[0])
    out, lse, same = attention.forward(
        q, k, v, metadata, return_softmax_lse=True, return_temperature_lse=True
    )
    assert same is lse and not lse.requires_grad
    explicit = attention.forward(q, k, v, metadata, softmax_scale=SCALE)
    assert torch.equal(out, explicit)
    options = {"return_softmax_lse": True, "return_temperature_lse": True}
    out2, lse2, warm = attention.forward(q, k, v, metadata, lse_temperature_scale=2.0, **options)
    _, expected = attention.forward(
        q, k, v, metadata, softmax_scale=SCALE / 2, return_softmax_lse=True
    )
    assert torch.equal(out2, out) and torch.equal(lse2, lse) and torch.equal(warm, expected)
    assert (warm != lse)[:REAL].any()


@DTYPES
def test_order_of_the_ids_does_not_matter(dtype):
    """msa_v1 sorts by score, the token's own block last."""
    q, k, v, q_proxy, k_proxy = inputs(dtype)
    ids, _ = select(q_proxy, k_proxy)
    full = (ids >= 0).all(-1, keepdim=True)
    shuffled = torch.where(full, torch.cat([ids[..., :15].flip(-1), ids[..., 15:]], -1), ids)
    assert not torch.equal(shuffled, ids)
    a, b = (attention.forward(q, k, v, prepare(i)) for i in (ids, shuffled))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@DTYPES
def test_explicit_backward_is_that_of_autograd(dtype):
    q, k, v, q_proxy, k_proxy = inputs(dtype, grad=True)
    metadata = prepare(select(q_proxy, k_proxy)[0])
    out, lse = attention.forward(q, k, v, metadata, softmax_scale=0.3, return_softmax_lse=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    given = attention.backward(q, k, v, dout, out, lse, metadata, softmax_scale=0.3)
    for name, a, b in zip(NAMES, given, expected):
        assert a.dtype == dtype and not a.requires_grad and (a != 0).any(), name
        assert torch.equal(a, b), name


# --- KL ---------------------------------------------------------------------------------------
@DTYPES
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_backward_is_the_gradient_of_the_kl_rows(dtype, temperature):
    q, k, v, q_proxy, k_proxy = inputs(dtype, grad=True)
    ids, proxy_lse = select(q_proxy, k_proxy, lse_temperature=temperature)
    metadata = prepare(ids)
    *_, teacher_lse = attention.forward(
        q,
        k,
        v,
        metadata,
        return_softmax_lse=True,
        return_temperature_lse=True,
        lse_temperature_scale=temperature,
    )
    rows = 2 * TOKENS  # makes the weight of a row 3
    dqi, dki = kl.backward(
        q,
        k,
        teacher_lse,
        q_proxy,
        k_proxy,
        proxy_lse,
        metadata,
        softmax_scale=SCALE / temperature,
        indexer_softmax_scale=SCALE / temperature,
        loss_coeff=3.0 * rows,
    )
    scale = SCALE / temperature
    r = ours((q, k, v, q_proxy, k_proxy), softmax_scale=scale, proxy_scale=scale, block_indices=ids)
    expected = torch.autograd.grad(3 * r.kl.sum(), (q_proxy, k_proxy))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for a, b in zip((dqi, dki), expected):
        assert a.dtype == dtype and not a.requires_grad and (a[:REAL] != 0).any()
        assert (a[REAL:] == 0).all()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_loss_coeff_weighs_the_mean_over_all_rows_padding_included():
    q, k, v, q_proxy, k_proxy = inputs(grad=True)
    ids, proxy_lse = select(q_proxy, k_proxy)
    metadata = prepare(ids)
    _, lse = attention.forward(q, k, v, metadata, return_softmax_lse=True)
    gradients = kl.backward(q, k, lse, q_proxy, k_proxy, proxy_lse, metadata)
    r = ours((q, k, v, q_proxy, k_proxy))
    expected = torch.autograd.grad(r.kl_loss * REAL / TOKENS, (q_proxy, k_proxy))
    for a, b in zip(gradients, expected):
        assert (b != 0).any()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-8)


# --- what is refused --------------------------------------------------------------------------
SMALL = documents(40)


@pytest.fixture
def small():
    """Arguments of every function for one document of 40 tokens."""
    q, k, v, q_proxy, k_proxy = tensors(40).values()
    ids, proxy_lse = select(q_proxy, k_proxy, SMALL)
    metadata = prepare(ids, SMALL)
    out, lse = attention.forward(q, k, v, metadata, return_softmax_lse=True)
    return {
        "indexer.forward": lambda **o: select(o.pop("q", q_proxy), k_proxy, SMALL, **o),
        "prepare": lambda **o: prepare(o.pop("topk_indices", ids), SMALL, **o),
        "forward": lambda **o: attention.forward(
            o.pop("q", q), k, v, o.pop("metadata", metadata), **o
        ),
        "backward": lambda **o: attention.backward(
            q, k, v, o.pop("dout", out), out, o.pop("lse", lse), metadata, **o
        ),
        "kl": lambda **o: kl.backward(
            q,
            k,
            o.pop("teacher_lse", lse),
            o.pop("qi", q_proxy),
            k_proxy,
            o.pop("indexer_lse", proxy_lse),
            metadata,
            **o,
        ),
    }


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        ("indexer.forward", "fragment_indices", torch.zeros(1, dtype=torch.int32)),
        ("indexer.forward", "schedule", object()),
        ("indexer.forward", "workspace", object()),
        ("indexer.forward", "use_fp16_score", True),
        ("prepare", "fragment_indices", torch.zeros(1, dtype=torch.int32)),
        ("forward", "partial_dtype", torch.float16),
        ("forward", "sparse_attn_p_mode", "fp8"),
        ("backward", "sparse_attn_p_mode", "fp8"),
        ("backward", "q_fp8", torch.zeros(2)),
        ("backward", "k_fp8", torch.zeros(2)),
    ],
)
def test_settings_without_a_counterpart_are_refused_by_name(small, function, name, value):
    small[function]()
    with pytest.raises(ValueError, match=rf"^{name}: .*default"):
        small[function](**{name: value})


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        ("indexer.forward", "q", torch.zeros(1, 40, 2, 16)),
        ("indexer.forward", "lse_temperature", 0.0),
        ("indexer.forward", "lse_temperature", float("nan")),
        ("indexer.forward", "deterministic", 1),
        ("prepare", "topk_indices", torch.zeros(2, 40, 16, dtype=torch.int64)),
        ("prepare", "topk_indices", torch.zeros(2, 40, dtype=torch.int32)),
        ("prepare", "total_k", 41),
        ("prepare", "total_rows", -1),
        ("prepare", "max_seqlen_q", 2.0),
        ("forward", "q", torch.zeros(40, 4, 16, dtype=torch.int32)),
        ("forward", "q", torch.zeros(40, 4, 16).to(torch.float8_e4m3fn)),
        ("forward", "metadata", torch.zeros(2, 40, 16, dtype=torch.int32)),
        ("forward", "softmax_scale", float("inf")),
        ("forward", "lse_temperature_scale", -1.0),
        ("forward", "deterministic", None),
        ("forward", "return_temperature_lse", True),
        ("backward", "dout", torch.zeros(40, 2, 16)),
        ("backward", "lse", torch.zeros(40, 4, dtype=torch.float64)),
        ("backward", "lse", torch.zeros(4, 40)),
        ("kl", "teacher_lse", torch.zeros(4, 40)),
        ("kl", "indexer_lse", torch.zeros(40, 2)),
        ("kl", "qi", torch.zeros(40, 4, 16)),
        ("kl", "loss_coeff", float("nan")),
        ("kl", "indexer_softmax_scale", "1"),
    ],
)
def test_wrong_arguments_are_refused_by_name(small, function, name, value):
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: "):
        small[function](**{name: value})


def test_metadata_of_another_length_is_refused():
    q, k, v, *_ = tensors(41).values()
    ids = torch.zeros(2, 40, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^metadata: .*40 tokens.*41"):
        attention.forward(q, k, v, prepare(ids, SMALL))


def test_bounds_of_queries_and_keys_must_be_equal():
    *_, q_proxy, k_proxy = tensors(40).values()
    ids, _ = select(q_proxy, k_proxy, SMALL)
    prepare(ids, SMALL, SMALL.clone())
    for cu_k in (documents(30), documents(40, 0)):
        with pytest.raises(ValueError, match=r"^cu_seqlens_k: .*context parallelism"):
            prepare(ids, SMALL, cu_k)
        with pytest.raises(ValueError, match=r"^cu_seqlens_kv: .*context parallelism"):
            indexer.forward(
                q_proxy,
                k_proxy,
                cu_seqlens_q=SMALL,
                cu_seqlens_kv=cu_k,
                max_seqlen_q=40,
                max_seqlen_kv=40,
            )
    with pytest.raises(TypeError, match=r"^cu_seqlens_k: .*int64"):
        prepare(ids, SMALL, SMALL.long())


def test_determinism_can_be_asked_for_here_or_globally(small):
    for name in ("indexer.forward", "prepare", "forward", "backward", "kl"):
        option = {"prepare_kl_schedule": False} if name == "prepare" else {"deterministic": True}
        small[name](**option)
