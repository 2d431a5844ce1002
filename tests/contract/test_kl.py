"""The proxy's KL: true values in every mode, the loss over them, and its gradient (section 5)."""

import math

import pytest
import torch

import reference64

from .cases import HEADS, make_case, upstream
from .checks import assert_close, assert_outcome, assert_same, verify
from .plain import plain
from .run import call, run
from .tolerances import accumulation, is_half


def buffer(case):
    """A kl_buffer that shows what was not written."""
    rows = case.inputs.q.new_full(
        (case.tokens, case.heads[2]), float("nan"), dtype=accumulation(case.dtype)
    )
    return case.to_caller(rows).clone()


def plain_kl(case, block_indices):
    if not is_half(case.dtype):
        return None
    zeros = torch.zeros_like(case.inputs.q)
    rows = torch.zeros(case.tokens, case.heads[2], device=case.device)
    return plain(case.problem, case.inputs, block_indices, zeros, rows)[2]


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_kl_backward_mode_fills_the_buffer_with_true_values(api, device, dtype, warmup):
    case = make_case(device, dtype, lengths=(0, 200, 33), padding=2)
    dout, dkl = upstream(case)
    rows = buffer(case)
    outcome = run(api, case, dout=dout, dkl=dkl, kl="backward", kl_buffer=rows, warmup=warmup)
    truth = reference64.forward(case.problem, case.inputs, outcome.block_indices)
    assert_close("kl", rows, truth.kl, dtype, plain_kl(case, outcome.block_indices))
    assert (outcome.kl == 0).all() and outcome.kl_loss == 0, "the value is only in the buffer"
    forward = run(api, case, dout=dout, dkl=dkl, kl="forward", warmup=warmup)
    for name in outcome.gradients:
        assert_same(name, outcome.gradients[name], forward.gradients[name])


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_kl_none_gives_no_loss_and_no_proxy_gradient(api, device, dtype, warmup):
    case = make_case(device, dtype, lengths=(200, 33))
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, kl=None, warmup=warmup)
    assert outcome.kl is None and outcome.kl_loss is None
    for name in ("q_proxy", "k_proxy"):
        gradient = outcome.gradients[name]
        assert gradient is None or (gradient == 0).all()
    full = run(api, case, dout=dout, dkl=dkl, warmup=warmup)
    for name in ("q", "k", "v"):
        assert_same(name, outcome.gradients[name], full.gradients[name])
    assert torch.equal(outcome.out, full.out)


def test_kl_loss_is_the_mean_over_real_rows_on_the_device(api, device, dtype):
    case = make_case(device, dtype, lengths=(0, 150, 0, 41), padding=9)
    outcome = run(api, case)
    loss = outcome.kl_loss
    assert loss.dim() == 0 and loss.device.type == torch.device(device).type
    mean = outcome.kl.double().sum() / (case.heads[2] * case.real_tokens)
    assert loss.item() == pytest.approx(mean.item(), rel=1e-5)


def test_kl_loss_gradient_is_the_gradient_of_the_mean(api, device, dtype):
    case = make_case(device, dtype, lengths=(120, 41), padding=3)
    leaves = [t.requires_grad_() for t in case.arguments()]
    r = call(api, case, leaves)
    r.kl_loss.backward()
    weight = 1.0 / (case.heads[2] * case.real_tokens)
    dkl = torch.full((case.tokens, case.heads[2]), weight, device=case.device, dtype=r.kl.dtype)
    given = run(api, case, dkl=dkl)
    for name in ("q_proxy", "k_proxy"):
        leaf = leaves[case.inputs._fields.index(name)]
        assert_same(name, leaf.grad, given.gradients[name])


def test_weights_of_tokens_and_heads_are_the_users(api, device, dtype):
    """Any upstream gradient of the rows, zeros and negatives included."""
    case = make_case(device, dtype, lengths=(180, 20))
    dout, dkl = upstream(case)
    dkl[::3] = 0
    dkl[:, 0] *= -2
    outcome = run(api, case, dout=dout, dkl=dkl)
    assert_outcome(case, outcome, dout, dkl)


def test_no_gradient_flows_from_kl_to_the_main_attention(api, device, dtype):
    case = make_case(device, dtype, lengths=(150,))
    _, dkl = upstream(case)
    outcome = run(api, case, dkl=dkl)
    for name in ("q", "k", "v"):
        gradient = outcome.gradients[name]
        assert gradient is None or (gradient == 0).all(), name
    assert (outcome.gradients["q_proxy"] != 0).any()


def test_no_gradient_flows_from_out_to_the_proxy(api, device, dtype):
    case = make_case(device, dtype, lengths=(150,))
    dout, _ = upstream(case)
    outcome = run(api, case, dout=dout)
    for name in ("q_proxy", "k_proxy"):
        gradient = outcome.gradients[name]
        assert gradient is None or (gradient == 0).all(), name
    assert (outcome.gradients["q"] != 0).any()


def test_perfect_proxy_has_kl_zero_and_no_gradient(api, device, dtype):
    """q_proxy = q, k_proxy = k, one main head a proxy head: student equals teacher."""
    case = make_case(device, dtype, lengths=(200,), heads=(2, 1, 2, 1))
    case = case.with_inputs(q_proxy=case.inputs.q, k_proxy=case.inputs.k)
    _, dkl = upstream(case)
    outcome = run(api, case, dkl=dkl)
    assert outcome.kl.abs().max() <= 2e-5
    assert outcome.gradients["q_proxy"].abs().max() <= 2e-4


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_student_below_exp_minus_100_keeps_value_and_gradient(api, device, dtype, warmup):
    """Log domain: student underflows to 0 in fp32, KL is large and right, gradient is -teacher."""
    case = make_case(device, dtype, lengths=(96,), heads=HEADS["MQA"], top_k_blocks=3)
    x = case.inputs
    k_proxy = torch.zeros_like(x.k_proxy)
    k_proxy[0, :, 0] = 8.0  # one key takes all of the student
    q_proxy = torch.zeros_like(x.q_proxy)
    q_proxy[..., 0] = 8.0 * 64**0.5 * 4  # s_proxy = 256 there, 0 elsewhere
    case = case.with_inputs(q_proxy=q_proxy, k_proxy=k_proxy)
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, warmup=warmup)
    assert_outcome(case, outcome, dout, dkl)
    assert outcome.kl[95].max() > 100


def test_teacher_of_zero_counts_nothing(api, device, dtype):
    """Main logits of several hundred: most of P is exactly 0, and 0 * ln 0 = 0."""
    case = make_case(device, dtype, lengths=(160,), softmax_scale=8.0)
    outcome = verify(api, case)
    assert outcome.kl.isfinite().all()


def test_teacher_lse_is_taken_over_the_attended_set(api, device, main_dtype):
    """Case 21: a selection that leaves most of the mass out still has a teacher that sums to 1."""
    case = make_case(device, main_dtype, lengths=(320,), heads=HEADS["MQA"], top_k_blocks=2)
    ids = torch.full((1, 320, 2), -1, dtype=torch.int32, device=device)
    ids[0, :, 0] = 0
    outcome = verify(api, case, block_indices=ids)
    assert (outcome.kl >= -1e-5).all()


def test_kl_of_a_row_with_one_key_is_zero(api, device, dtype):
    case = make_case(device, dtype, lengths=(1,) * 20)
    outcome = run(api, case)
    assert outcome.kl.abs().max() <= 1e-6


def test_kl_mode_names_are_checked(api, device, main_dtype, thresher_only):
    case = make_case(device, main_dtype, lengths=(10,))
    with pytest.raises(ValueError, match="kl"):
        call(api, case, case.arguments(), kl="sideways")
    with pytest.raises((ValueError, TypeError), match="kl_buffer"):
        call(api, case, case.arguments(), kl="forward", kl_buffer=buffer(case))
    for bad in (buffer(case)[:5], buffer(case).to(torch.float16), buffer(case).T):
        with pytest.raises((ValueError, TypeError), match="kl_buffer"):
            call(api, case, case.arguments(), kl="backward", kl_buffer=bad)


def test_kl_values_agree_with_the_definition_in_numbers(api, device, main_dtype):
    """A case small enough for paper: two keys, one head."""
    case = make_case(device, main_dtype, lengths=(2,), heads=(1, 1, 1, 1))
    zeros = {name: torch.zeros_like(t) for name, t in case.inputs._asdict().items()}
    zeros["q_proxy"][1, 0, 0] = 2.0
    zeros["k_proxy"][1, 0, 0] = 4.0  # s_proxy = (0, 8 * 0.125 = 1), teacher = (1/2, 1/2)
    outcome = run(api, case.with_inputs(**zeros))
    student = (1 / (1 + math.e), math.e / (1 + math.e))
    kl = sum(0.5 * (math.log(0.5) - math.log(s)) for s in student)
    assert outcome.kl[1, 0].item() == pytest.approx(kl, rel=1e-5)
    assert outcome.lse[1, 0].item() == pytest.approx(math.log(2), rel=1e-6)
