"""The judge's bounds find what they must: small faults in one row, and nothing else gives way."""

import pytest
import torch

from .cases import HEADS, NAMES, make_case, upstream
from .checks import Deviations, assert_outcome, errors, expected
from .run import run
from .tolerances import floor, limit, norm_floor

WIDE = pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def judged(dtype, **kwargs):
    case = make_case("cpu", dtype, lengths=(150, 33), heads=HEADS["16/2/4/1"], **kwargs)
    dout, dkl = upstream(case)
    return case, dout, dkl


@WIDE
def test_floor_for_cancellation_lies_far_below_the_bounds_on_random_data(wide):
    """So that the relative bounds decide wherever a relative error means something."""
    case, dout, dkl = judged(wide)
    rows, gradients = expected(case, None, dout, dkl)
    rounding = Deviations(case, None, dout, dkl, rows, gradients)
    for name in ("out", "lse", "kl", *NAMES):
        reference = getattr(gradients if name in NAMES else rows, name)
        deviation = rounding.of(name)()
        share = norm_floor(deviation.reshape(len(deviation), -1), wide) / reference.norm()
        assert share < limit(wide, name) / 5, f"{name}: {share:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["out", "lse", "kl", *NAMES])
def test_one_wrong_row_is_found(api, dtype, name):
    """A row of mean size with an error of thrice the bound, and as many deviations of rounding."""
    case, dout, dkl = judged(dtype)
    outcome = run(api, case, dout=dout, dkl=dkl)
    assert_outcome(case, outcome, dout, dkl)
    rows, gradients = expected(case, outcome.block_indices, dout, dkl)
    rounding = Deviations(case, outcome.block_indices, dout, dkl, rows, gradients)
    reference = getattr(gradients if name in NAMES else rows, name)
    result = outcome.gradients[name] if name in NAMES else getattr(outcome, name)
    place = (90, 1) if reference.shape[1] > 1 else (90, 0)
    deviation = rounding.of(name)()[place].reshape(1, -1)
    own = errors(result, reference)[1]
    wrong = 3 * max(limit(dtype, name, own + torch.finfo(dtype).eps), 1e-9)
    wrong = wrong * reference.norm() / reference[..., 0].numel() ** 0.5 + 3 * floor(
        deviation, dtype
    )
    result[place] += (wrong.item() / deviation.numel() ** 0.5) * torch.ones_like(result[place])
    with pytest.raises(AssertionError, match=rf"^{name}: "):
        assert_outcome(case, outcome, dout, dkl)


@WIDE
def test_an_error_of_the_whole_tensor_just_above_the_bound_is_found(api, wide):
    case, dout, dkl = judged(wide)
    for name in NAMES:
        outcome = run(api, case, dout=dout, dkl=dkl)
        outcome.gradients[name] *= 1 + 1.2 * limit(wide, name)
        with pytest.raises(AssertionError, match=rf"^{name}: norm"):
            assert_outcome(case, outcome, dout, dkl)


def test_rounding_of_a_sum_that_cancels_is_accepted_and_more_is_not(api):
    """A document of one token: dq is exactly 0; delta and dP may differ by their rounding."""
    case = make_case("cpu", torch.float32, lengths=(1, 1, 1))
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl)
    outcome.gradients["q"] += 1e-9
    assert_outcome(case, outcome, dout, dkl)
    outcome.gradients["q"] += 1e-4
    with pytest.raises(AssertionError, match=r"^q: "):
        assert_outcome(case, outcome, dout, dkl)
