"""The edge cases of spec.md section 9, one test (or more) a row."""

import pytest
import torch

import reference64

from .cases import HEADS, NAMES, make_case, upstream
from .checks import (
    assert_outcome,
    assert_padding,
    assert_sampled,
    assert_selection,
    verify,
)
from .run import run

MODES = pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])


# --- documents --------------------------------------------------------------------------------
@MODES
def test_documents_of_0_1_2_127_128_129_tokens(api, device, dtype, warmup):
    case = make_case(
        device, dtype, lengths=(0, 1, 2, 127, 128, 129), block_size=128, top_k_blocks=1
    )
    verify(api, case, warmup=warmup)


@pytest.mark.parametrize(
    "lengths",
    [(0, 0, 0, 65), (65, 0, 0, 0), (33, 0, 0, 0, 32), (0, 0, 1, 0, 0), (0,), (0, 0, 0)],
    ids=str,
)
@MODES
def test_empty_documents_anywhere_contribute_nothing(api, device, dtype, lengths, warmup):
    verify(api, make_case(device, dtype, lengths=lengths), warmup=warmup)


@MODES
@pytest.mark.parametrize("padding", [0, 5])
def test_no_document_at_all(api, device, main_dtype, warmup, padding):
    """cu_seqlens = [0]: everything, if there is anything, is padding."""
    verify(api, make_case(device, main_dtype, lengths=(), padding=padding), warmup=warmup)


# --- padding ----------------------------------------------------------------------------------
@MODES
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_padding_is_never_read_and_its_results_are_zero(api, device, dtype, warmup, value):
    case = make_case(device, dtype, lengths=(100, 44), padding=37)
    for tensor in case.inputs:
        tensor[144:] = value
    dout, dkl = upstream(case)
    dout[144:] = value
    dkl[144:] = value
    outcome = run(api, case, dout=dout, dkl=dkl, warmup=warmup)
    assert_padding(case, outcome)
    assert_outcome(case, outcome, dout, dkl)


# --- unselected blocks ------------------------------------------------------------------------
def test_gradients_of_a_block_that_no_token_selected_are_exactly_zero(api, device, dtype):
    case = make_case(device, dtype, lengths=(256, 64))
    ids = torch.full((4, 320, 3), -1, dtype=torch.int32, device=device)
    ids[:, :, 0] = 0
    ids[:, 192:256, 1] = 5  # blocks 1 to 4, 6 and 7 are nobody's
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
    for name in ("k", "v", "k_proxy"):
        gradient = outcome.gradients[name]
        assert (gradient[32:160] == 0).all() and (gradient[192:256] == 0).all(), name
        assert (gradient[:32] != 0).any() and (gradient[160:192] != 0).any(), name
    assert_outcome(case, outcome, dout, dkl)


def test_a_kv_head_that_nobody_selects_has_zero_gradients(api, device, dtype):
    """One proxy head keeps blocks, the other none: only its own kv head gets gradients."""
    case = make_case(device, dtype, lengths=(96,), heads=(4, 2, 2, 2))
    ids = torch.full((2, 96, 3), -1, dtype=torch.int32, device=device)
    ids[0, :, 0] = 0
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
    for name in ("k", "v", "k_proxy"):
        assert (outcome.gradients[name][:, 1] == 0).all(), name
    assert_outcome(case, outcome, dout, dkl)


# --- skewed loads -----------------------------------------------------------------------------
def test_every_token_selects_the_same_block(api, device, dtype):
    case = make_case(device, dtype, lengths=(700,))
    ids = torch.zeros(4, 700, 3, dtype=torch.int32, device=device)
    ids[:, :, 1:] = -1
    verify(api, case, block_indices=ids)


@MODES
def test_many_tiny_documents_next_to_a_long_one(api, device, main_dtype, warmup):
    """Judged where the upstream gradient is not zero: 64 random tokens."""
    lengths = (7,) * 1000 + (3000,) + (7,) * 1000
    case = make_case(device, main_dtype, lengths=lengths, heads=HEADS["MQA"], top_k_blocks=4)
    assert_sampled(api, case, warmup=warmup, count=64)


@pytest.mark.slow
def test_a_million_tokens_next_to_ten_thousand_documents_of_seven(api, device, main_dtype):
    length = 1_000_000 if device == "cuda" else 60_000  # the proxy forward is quadratic
    case = make_case(
        device,
        main_dtype,
        lengths=(length,) + (7,) * 10_000,
        heads=(2, 1, 1, 1),
        block_size=128,
        top_k_blocks=4,
    )
    assert_sampled(api, case, count=24)


# --- dense limit ------------------------------------------------------------------------------
def test_k_larger_than_the_number_of_blocks_equals_dense_attention(api, device, dtype):
    case = make_case(device, dtype, batch=2, lengths=100, top_k_blocks=50)
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl)
    assert_outcome(case, outcome, dout, dkl, None)


# --- extreme numbers --------------------------------------------------------------------------
@MODES
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_around_30000_are_finite_and_right(api, device, dtype, warmup, sign):
    """Every logit of a row is +-30,000 plus a little: a softmax without its maximum overflows."""
    case = make_case(device, dtype, lengths=(90, 40), softmax_scale=1.0, proxy_scale=1.0)
    x = case.inputs

    def shifted(a, b):
        a, b = a * 0.25, b * 0.25
        a[..., 0], b[..., 0] = sign * 175.0, 175.0  # exact in bf16; the product is 30,625
        return a, b

    q, k = shifted(x.q, x.k)
    q_proxy, k_proxy = shifted(x.q_proxy, x.k_proxy)
    case = case.with_inputs(q=q, k=k, q_proxy=q_proxy, k_proxy=k_proxy)
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, warmup=warmup)
    for tensor in (outcome.out, outcome.lse, outcome.kl, *outcome.gradients.values()):
        assert tensor.isfinite().all()
    if not warmup:
        assert_selection(case, outcome.block_indices)
    # A logit of 30,000 is known to 30,000 * eps only: the softmax weights differ by as much.
    rows = reference64.forward(case.problem, case.inputs, outcome.block_indices)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    slack = 64 * 30_625 * eps
    own = torch.finfo(dtype).eps
    assert (outcome.lse.double() - rows.lse).abs().max() <= slack
    assert (outcome.out.double() - rows.out).norm() <= (slack + own) * rows.out.norm()


@MODES
def test_one_logit_takes_all(api, device, dtype, warmup):
    """Spread logits: P is one-hot to the last bit, gradients of q and k vanish, dv does not."""
    case = make_case(device, dtype, lengths=(120,), softmax_scale=50.0)
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, warmup=warmup)
    for tensor in (outcome.out, outcome.lse, outcome.kl, *outcome.gradients.values()):
        assert tensor.isfinite().all()


@MODES
def test_all_zero_inputs(api, device, dtype, warmup):
    case = make_case(device, dtype, lengths=(77, 33))
    zeros = {name: torch.zeros_like(t) for name, t in case.inputs._asdict().items()}
    case = case.with_inputs(**zeros)
    outcome = verify(api, case, warmup=warmup)
    assert (outcome.out == 0).all()
    visible = torch.arange(1, 78, device=device, dtype=torch.float64)
    if warmup:
        assert (outcome.lse[:77, 0].double() - visible.log()).abs().max() < 1e-5


@MODES
def test_all_equal_logits_average_the_values(api, device, dtype, warmup):
    case = make_case(device, dtype, lengths=(77, 33))
    ones = {name: torch.ones_like(t) for name, t in case.inputs._asdict().items() if name != "v"}
    verify(api, case.with_inputs(**ones), warmup=warmup)


# --- NaN and Inf stay where they are read -----------------------------------------------------
def readers(outcome, case, token, warmup):
    """bool [Hp, T]: proxy heads and queries that read key row `token` (one document)."""
    t = torch.arange(case.tokens, device=case.device)
    seen = (t >= token).expand(case.heads[2], -1)
    if warmup:
        return seen.clone()
    block = token // case.problem.block_size
    return seen & (outcome.block_indices == block).any(2)


@MODES
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_number_stays_in_the_rows_that_read_it(api, device, main_dtype, name, value, warmup):
    """Replayed selection, so that a bad proxy row cannot move it. Token 70 of 200."""
    case = make_case(device, main_dtype, lengths=(200, 50), heads=(4, 2, 2, 1))
    dout, dkl = upstream(case)
    token = 70
    ids = None if warmup else run(api, case).block_indices
    extra = {} if warmup else {"block_indices": ids}
    clean = run(api, case, dout=dout, dkl=dkl, warmup=warmup, deterministic=True, **extra)
    bad_tensor = getattr(case.inputs, name).clone()
    bad_tensor[token] = value
    bad_case = case.with_inputs(**{name: bad_tensor})
    bad = run(api, bad_case, dout=dout, dkl=dkl, warmup=warmup, deterministic=True, **extra)

    heads, proxy_heads = case.heads[0], case.heads[2]
    query_reads = torch.zeros(proxy_heads, case.tokens, dtype=torch.bool, device=device)
    if name in ("q", "q_proxy"):
        query_reads[:, token] = True
    else:
        clean.block_indices = ids
        query_reads = readers(clean, case, token, warmup)
        query_reads[:, 200:] = False
    main = query_reads.repeat_interleave(heads // proxy_heads, 0).T
    proxy = query_reads.T
    if name in ("q", "k", "v"):
        assert torch.equal(bad.out[~main], clean.out[~main])
        assert bad.out[main].isnan().any() or value == float("inf")
        assert torch.equal(bad.gradients["q"][~main], clean.gradients["q"][~main])
    else:
        assert torch.equal(bad.out, clean.out) and torch.equal(bad.lse, clean.lse)
        for other in ("q", "k", "v"):
            assert torch.equal(bad.gradients[other], clean.gradients[other]), other
    if name == "v":
        assert torch.equal(bad.lse, clean.lse) and torch.equal(bad.kl, clean.kl)
    assert torch.equal(bad.kl[~proxy], clean.kl[~proxy])
    assert torch.equal(bad.gradients["q_proxy"][~proxy], clean.gradients["q_proxy"][~proxy])
    # The other document shares nothing with the bad row.
    for other in NAMES:
        assert torch.equal(bad.gradients[other][200:], clean.gradients[other][200:]), other


@MODES
def test_a_bad_upstream_row_stays_in_the_rows_that_feed_it(api, device, main_dtype, warmup):
    case = make_case(device, main_dtype, lengths=(200, 50))
    dout, dkl = upstream(case)
    clean = run(api, case, dout=dout, dkl=dkl, warmup=warmup, deterministic=True)
    dout[100] = float("nan")
    dkl[100] = float("inf")
    bad = run(api, case, dout=dout, dkl=dkl, warmup=warmup, deterministic=True)
    for name in ("q", "q_proxy"):
        others = torch.arange(case.tokens, device=device) != 100
        assert torch.equal(bad.gradients[name][others], clean.gradients[name][others]), name
    for name in ("k", "v", "k_proxy"):
        assert torch.equal(bad.gradients[name][101:], clean.gradients[name][101:]), name
