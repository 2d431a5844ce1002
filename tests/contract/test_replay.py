"""block_indices from outside: spec.md section 9, cases.md row 20."""

import re

import pytest
import torch

import reference64

from .cases import HEADS, make_case, upstream
from .checks import assert_outcome, assert_same, verify
from .run import call, run
from .tolerances import limit


def random_selection(case, seed=7, fill=0.7):
    """Random visible blocks in random order with -1 holes; some rows are all -1."""
    g = torch.Generator().manual_seed(seed)
    proxy_heads, top_k = case.heads[2], case.problem.top_k_blocks
    ids = torch.full((proxy_heads, case.tokens, top_k), -1, dtype=torch.int32)
    for f in case.problem.fragments:
        for t in range(f.q_begin, f.q_end):
            visible = (f.k_len - (f.q_end - f.q_begin) + t - f.q_begin) // case.problem.block_size
            for p in range(proxy_heads):
                if torch.rand((), generator=g) < 0.1:
                    continue
                order = torch.randperm(visible + 1, generator=g)[:top_k]
                keep = torch.rand(len(order), generator=g) < fill
                slots = torch.randperm(top_k, generator=g)[: len(order)]
                ids[p, t, slots[keep]] = order[keep].int()
    return ids.to(case.device)


@pytest.mark.parametrize("heads", ["16/2/4/1", "Hp < Hkv", "Hp > Hkv", "MHA", "not nested"])
def test_unordered_selection_with_holes_and_empty_rows_is_used_as_given(api, device, dtype, heads):
    case = make_case(device, dtype, lengths=(0, 130, 33, 1), heads=HEADS[heads], padding=2)
    ids = random_selection(case)
    outcome = verify(api, case, block_indices=ids)
    assert torch.equal(outcome.block_indices, ids)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_replay_in_batched_layouts(api, device, main_dtype, layout):
    case = make_case(device, main_dtype, batch=2, lengths=130, layout=layout)
    verify(api, case, block_indices=random_selection(case))


def test_a_row_without_blocks_gives_zero_and_minus_infinity(api, device, dtype):
    case = make_case(device, dtype, lengths=(100,))
    ids = random_selection(case)
    ids[:, 40:60] = -1
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
    assert (outcome.out[40:60] == 0).all()
    assert (outcome.lse[40:60] == -float("inf")).all()
    assert (outcome.kl[40:60] == 0).all()
    for name in ("q", "q_proxy"):
        assert (outcome.gradients[name][40:60] == 0).all(), name
    assert_outcome(case, outcome, dout, dkl, ids)


def test_nothing_selected_at_all(api, device, dtype):
    case = make_case(device, dtype, lengths=(64, 10))
    ids = torch.full((4, 74, 3), -1, dtype=torch.int32, device=device)
    outcome = verify(api, case, block_indices=ids)
    for gradient in outcome.gradients.values():
        assert (gradient == 0).all()


def test_replaying_the_own_selection_changes_nothing(api, device, dtype):
    case = make_case(device, dtype, lengths=(200, 31), padding=2)
    dout, dkl = upstream(case)
    first = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    again = run(
        api, case, dout=dout, dkl=dkl, deterministic=True, block_indices=first.block_indices
    )
    assert torch.equal(first.out, again.out)
    assert torch.equal(first.kl, again.kl)
    for name in first.gradients:
        assert torch.equal(first.gradients[name], again.gradients[name]), name


def test_order_and_holes_do_not_matter_to_the_value(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(200,), top_k_blocks=4)
    ids = run(api, case).block_indices
    g = torch.Generator().manual_seed(3)
    shuffled = ids[:, :, torch.randperm(4, generator=g).to(device)]
    dout, dkl = upstream(case)
    a = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
    b = run(api, case, dout=dout, dkl=dkl, block_indices=shuffled)
    assert_same("out", a.out, b.out)
    for name in a.gradients:
        assert_same(name, a.gradients[name], b.gradients[name])


@pytest.mark.parametrize("width", [1, 2, 9])
def test_width_of_a_given_selection_may_differ_from_top_k_or_is_refused(api, device, width):
    """block_indices [Hp, T, K]: another K than top_k_blocks is used as given or a clear error."""
    case = make_case(device, torch.bfloat16, lengths=(70,))
    ids = torch.full((4, 70, width), -1, dtype=torch.int32, device=device)
    ids[:, :, 0] = 0
    try:
        outcome = run(api, case, block_indices=ids)
    except ValueError as error:
        assert "block_indices" in str(error) or "top_k_blocks" in str(error)
    else:
        assert_outcome(case, outcome, None, None, ids)


def test_sparse_attention_alone_is_right(api, device, dtype):
    case = make_case(device, dtype, lengths=(0, 130, 33), padding=2)
    ids = random_selection(case)
    dout, _ = upstream(case)
    q, k, v = (t.requires_grad_() for t in case.arguments()[:3])
    out, lse = api.sparse_attention(
        q, k, v, ids, block_size=32, return_lse=True, deterministic=False, **case.geometry()
    )
    truth = run(api, case, dout=dout, kl=None, block_indices=ids)
    rows = reference64.forward(case.problem, case.inputs, ids)
    bound = limit(dtype, "out", 3 * torch.finfo(dtype).eps)
    assert (out.detach().double() - rows.out).norm() <= bound * rows.out.norm()
    assert_same("out", out.detach(), truth.out)
    assert torch.equal(lse.isinf(), truth.lse.isinf())
    out.backward(dout)
    for name, leaf in (("q", q), ("k", k), ("v", v)):
        assert_same(name, leaf.grad, truth.gradients[name])
    alone = api.sparse_attention(q, k, v, ids, block_size=32, **case.geometry())
    assert torch.equal(alone.detach(), out.detach())


# --- wrong entries ----------------------------------------------------------------------------
WRONG = [
    ("out of range", 1000),
    ("out of range", 2**31 - 1),
    ("negative", -2),
    ("negative", -(2**31)),
    ("later block", 3),  # visible blocks of token 80 are 0, 1, 2
    ("duplicate", 0),
]


def wrong_selection(case, value, head=2, token=80, slot=1):
    ids = torch.full((4, case.tokens, 3), -1, dtype=torch.int32, device=case.device)
    ids[:, :, 0] = 0
    ids[head, token, slot] = value
    later = ids.clone()
    later[3, 90, 2] = value  # a second wrong entry: the first one is named
    return ids, later


@pytest.mark.parametrize("why, value", WRONG)
def test_checked_mode_names_the_first_wrong_entry(
    api, device, main_dtype, why, value, thresher_only
):
    case = make_case(device, main_dtype, lengths=(150,))
    _, ids = wrong_selection(case, value)
    with pytest.raises(ValueError) as caught:
        run(api, case, block_indices=ids, check_indices=True)
    text = str(caught.value)
    assert "block_indices" in text
    numbers = [int(n) for n in re.findall(r"-?\d+", text)]
    for expected in (2, 80, 1, value):
        assert expected in numbers, f"{expected} is not in: {text}"


@pytest.mark.parametrize("why, value", WRONG)
@pytest.mark.parametrize("function", ["sparse_attention", "msa_attention"])
def test_the_cpu_always_checks(api, why, value, function, thresher_only):
    case = make_case("cpu", torch.float32, lengths=(150,))
    ids, _ = wrong_selection(case, value)
    with pytest.raises(ValueError, match="block_indices"):
        if function == "msa_attention":
            run(api, case, block_indices=ids)
        else:
            api.sparse_attention(*case.arguments()[:3], ids, block_size=32, **case.geometry())


def test_a_wrong_entry_of_a_padding_row_is_not_read(api, device, main_dtype):
    """Rows past the last document are never read, their ids neither."""
    case = make_case(device, main_dtype, lengths=(100,), padding=4)
    ids = torch.zeros(4, 104, 3, dtype=torch.int32, device=device)
    ids[:, :, 1:] = -1
    ids[:, 100:] = 77
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
    outcome.block_indices = None
    assert_outcome(case, outcome, dout, dkl, ids)


@pytest.mark.gpu
@pytest.mark.parametrize("why, value", WRONG)
def test_unchecked_mode_counts_a_wrong_entry_as_no_block(api, device, dtype, why, value):
    """The default on a GPU: nothing is read out of bounds, the entry is -1."""
    case = make_case(device, dtype, lengths=(150, 100))
    ids, _ = wrong_selection(case, value)
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
    holes, _ = wrong_selection(case, -1)
    assert_outcome(case, outcome, dout, dkl, holes)


def test_document_ends_bound_the_ids_not_the_batch(api, device, main_dtype, thresher_only):
    """Block 1 exists in the batch but not in the second document."""
    case = make_case(device, main_dtype, lengths=(150, 20))
    ids = torch.zeros(4, 170, 3, dtype=torch.int32, device=device)
    ids[:, :, 1:] = -1
    ids[0, 160, 1] = 1
    with pytest.raises(ValueError, match="block_indices"):
        run(api, case, block_indices=ids, check_indices=True)


def test_reference_of_this_suite_counts_wrong_entries_as_none():
    case = make_case("cpu", torch.float64, lengths=(150,))
    for _, value in WRONG:
        ids, _ = wrong_selection(case, value)
        holes, _ = wrong_selection(case, -1)
        a, b = (reference64.forward(case.problem, case.inputs, i) for i in (ids, holes))
        assert torch.equal(a.out, b.out)


def test_call_without_scoring_leaves_the_given_indices_alone(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(90,))
    ids = random_selection(case)
    before = ids.clone()
    r = call(api, case, case.arguments(), block_indices=ids)
    assert torch.equal(ids, before) and torch.equal(r.block_indices, before)
