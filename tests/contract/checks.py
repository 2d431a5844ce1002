"""Judges an outcome against float64, with the tolerances of tolerances.py."""

from __future__ import annotations

import torch

import reference64

from .cases import NAMES, Case, upstream
from .plain import plain
from .run import Outcome, run
from .tolerances import (
    accumulation,
    floor,
    is_half,
    limit,
    norm_floor,
    rounding_units,
    selection_epsilon,
)


def _rows(result: torch.Tensor, reference: torch.Tensor):
    """(errors, sizes) of the rows, see tolerances.py. Both tensors finite."""
    if reference.dim() < 3:  # lse, kl: every number is a row of its own
        result, reference = result.reshape(-1, 1), reference.reshape(-1, 1)
    difference = (result.double() - reference.double()).norm(dim=-1)
    return difference, reference.double().norm(dim=-1)


def _scales(size: torch.Tensor):
    """What the errors are relative to: the whole tensor's norm, and one number a row."""
    tiny = torch.finfo(torch.float64).tiny
    written = size[size > 0]  # most rows of a sampled gradient are exactly 0
    typical = written.median() if written.numel() else size.new_zeros(())
    return size.norm().clamp_min(tiny), torch.maximum(size, typical).clamp_min(tiny)


def errors(result: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(norm, largest of the rows), see tolerances.py. Both tensors finite."""
    difference, size = _rows(result, reference)
    if size.numel() == 0:
        return 0.0, 0.0
    whole, each = _scales(size)
    return (difference.norm() / whole).item(), (difference / each).max().item()


def assert_close(name, result, reference, dtype, plain_result=None, deviations=None) -> None:
    """Same places not finite, same values there, and close elsewhere.

    deviations: a function that gives the standard deviations of the rounding error, like reference.
    It is only called if the relative bound does not hold: for sums that cancel.
    """
    assert result.shape == reference.shape, f"{name}: {result.shape} for {reference.shape}"
    finite = reference.isfinite()
    assert torch.equal(result.isfinite(), finite), f"{name}: not finite in other places"
    assert torch.equal(result[~finite].double(), reference[~finite]), f"{name}: other infinities"
    zero = torch.zeros((), dtype=torch.float64, device=result.device)
    reference = torch.where(finite, reference, zero)
    if reference.numel() == 0:
        return
    yardstick = (0.0, 0.0)
    if plain_result is not None:
        yardstick = errors(torch.where(finite, plain_result.double(), zero), reference)
    norm_bound, rows_bound = (limit(dtype, name, error) for error in yardstick)
    difference, size = _rows(torch.where(finite, result.double(), zero), reference)
    whole, each = _scales(size)
    norm_good = bool(difference.norm() <= norm_bound * whole)
    rows_good = difference <= rows_bound * each
    if deviations is not None and not (norm_good and rows_good.all()):
        deviation = torch.where(finite, deviations(), zero)
        if deviation.dim() < 3:
            deviation = deviation.reshape(-1, 1)
        stored = dtype if result.dtype == dtype else accumulation(dtype)
        row_floor = floor(deviation, stored)
        rows_good |= difference <= row_floor
        norm_good |= bool(difference.norm() <= norm_floor(deviation, stored))
    plain_text = f" (plain PyTorch: {yardstick[0]:.2e}, rows {yardstick[1]:.2e})"
    plain_text = "" if plain_result is None else plain_text
    norm = difference.norm() / whole
    assert norm_good, f"{name}: norm error {norm:.2e} exceeds {norm_bound:.2e}{plain_text}"
    worst = (difference / each).masked_fill(rows_good, -1.0)
    assert rows_good.all(), (
        f"{name}: error {worst.max():.2e} of row {int(worst.argmax())} exceeds {rows_bound:.2e}"
        f"{plain_text}"
    )


def assert_same(name, a, b) -> None:
    """Two ways to the same numbers: equal up to the order of their sums."""
    dtype = a.dtype
    bound = torch.finfo(dtype).eps if is_half(dtype) else 20 * torch.finfo(dtype).eps
    norm, _ = errors(a, b.double())
    assert norm <= bound, f"{name}: two ways differ by {norm:.2e}, more than {bound:.2e}"


def assert_selection(case: Case, block_indices: torch.Tensor, tokens=None) -> None:
    faults = reference64.selection_faults(
        case.problem,
        block_indices,
        case.inputs.q_proxy,
        case.inputs.k_proxy,
        epsilon=selection_epsilon(case.dtype),
        tokens=tokens,
    )
    assert not faults, "; ".join(faults)


def assert_padding(case: Case, outcome: Outcome) -> None:
    """Rows past the last document: out and gradients exactly 0, lse -inf, ids -1, kl 0."""
    rest = slice(case.real_tokens, case.tokens)
    assert (outcome.out[rest] == 0).all()
    assert (outcome.lse[rest] == -float("inf")).all()
    if outcome.kl is not None:
        assert (outcome.kl[rest] == 0).all()
    if outcome.block_indices is not None:
        assert (outcome.block_indices[:, rest] == -1).all()
    for name, gradient in (outcome.gradients or {}).items():
        if gradient is not None:
            assert (gradient[rest] == 0).all(), f"padding rows of d{name}"


def assert_unread_keys_are_zero(case: Case, outcome: Outcome, block_indices) -> None:
    """Key rows that no query selected have gradients of exactly 0: written, not left over."""
    q_heads, kv_heads, proxy_heads, proxy_kv_heads = case.heads
    keys = case.inputs.k.shape[0]
    read = reference64.read_keys(case.problem, keys, block_indices, proxy_heads)  # [Hp, Tk]
    by_query_head = read.repeat_interleave(q_heads // proxy_heads, 0)
    by_kv_head = by_query_head.unflatten(0, (kv_heads, -1)).any(1).T
    by_proxy_kv_head = read.unflatten(0, (proxy_kv_heads, -1)).any(1).T
    for name, used in (("k", by_kv_head), ("v", by_kv_head), ("k_proxy", by_proxy_kv_head)):
        gradient = outcome.gradients[name]
        if gradient is not None:
            assert (gradient[~used] == 0).all(), f"d{name}: rows that nobody reads are not 0"


def expected(case: Case, block_indices, dout, dkl, tokens=None):
    """(rows, gradients) in float64 for a selection (None: warm-up)."""
    rows = reference64.forward(case.problem, case.inputs, block_indices, tokens)
    gradients = None
    if dout is not None:
        gradients = reference64.backward(
            case.problem, case.inputs, block_indices, dout, dkl, tokens
        )
    return rows, gradients


class Deviations:
    """Standard deviations of the rounding errors of `rows` and `gradients`, computed when asked."""

    def __init__(self, case: Case, block_indices, dout, dkl, rows, gradients, tokens=None):
        if gradients is None:  # no backward: an upstream gradient of 0
            gradients = reference64.Gradients(*(t.double() for t in case.inputs))
            dout, dkl = torch.zeros_like(case.inputs.q), torch.zeros_like(rows.kl)
        self.arguments = (case.problem, case.inputs, block_indices, dout, dkl, rows, gradients)
        self.tokens, self.units, self.found = tokens, rounding_units(case.dtype), None

    def of(self, name: str):
        """A function for assert_close."""

        def deviations():
            if self.found is None:
                rows, gradients = reference64.rounding(*self.arguments, self.tokens, **self.units)
                self.found = {**rows._asdict(), **gradients._asdict()}
            return self.found[name]

        return deviations


def assert_outcome(case: Case, outcome: Outcome, dout, dkl, block_indices="selected") -> None:
    """Everything of an outcome: dtypes, padding, values, gradients.

    block_indices: what the reference attends to; "selected": what the outcome says it selected.
    Upstream gradients of the loss of `outcome` are dout for out and dkl for kl.
    """
    if isinstance(block_indices, str):
        block_indices = outcome.block_indices
    dtype, wide = case.dtype, accumulation(case.dtype)
    assert outcome.out.dtype == dtype
    assert outcome.lse.dtype == wide
    rows, gradients = expected(case, block_indices, dout, dkl)

    plain_out = plain_lse = plain_kl = None
    plain_gradients = dict.fromkeys(NAMES)
    if is_half(dtype):
        zeros = (torch.zeros_like(case.inputs.q), torch.zeros_like(rows.kl, dtype=wide))
        given = zeros if dout is None else (dout, dkl)
        plain_out, plain_lse, plain_kl, plain_gradients = plain(
            case.problem, case.inputs, block_indices, *given
        )
    rounding = Deviations(case, block_indices, dout, dkl, rows, gradients)
    assert_close("out", outcome.out, rows.out, dtype, plain_out, rounding.of("out"))
    assert_close("lse", outcome.lse, rows.lse, dtype, plain_lse, rounding.of("lse"))
    if outcome.kl is not None:
        assert outcome.kl.dtype == wide
        assert_close("kl", outcome.kl, rows.kl, dtype, plain_kl, rounding.of("kl"))
        real = max(1, case.real_tokens * case.heads[2])
        plain_loss = None if plain_kl is None else plain_kl.double().sum() / real
        assert_close(
            "kl_loss",
            outcome.kl_loss,
            rows.kl.sum() / real,
            dtype,
            plain_loss,
            lambda: rounding.of("kl")().norm() / real,
        )
    if outcome.gradients is not None:
        for name, reference in zip(NAMES, gradients):
            result = outcome.gradients[name]
            assert result is not None, f"no gradient of {name}"
            assert result.dtype == dtype
            assert_close(name, result, reference, dtype, plain_gradients[name], rounding.of(name))
        if block_indices is not None:
            assert_unread_keys_are_zero(case, outcome, block_indices)
    assert_padding(case, outcome)


def verify(api, case: Case, **kwargs) -> Outcome:
    """Run a case forward and backward and judge all of it."""
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, **kwargs)
    if kwargs.get("warmup"):
        assert outcome.block_indices is None
        assert_outcome(case, outcome, dout, dkl, None)
    elif kwargs.get("block_indices") is not None:
        assert_outcome(case, outcome, dout, dkl, kwargs["block_indices"])
    else:
        assert_selection(case, outcome.block_indices)
        assert_outcome(case, outcome, dout, dkl)
    return outcome


def assert_sampled(api, case: Case, *, count: int, warmup=False, seed=11) -> Outcome:
    """For problems too large to be computed whole in float64: `count` random tokens are judged.

    All other upstream rows are 0, so the whole gradients of every tensor come from these tokens
    alone, and cost count * Tk to compute, whatever the size of the problem.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(case.real_tokens, generator=generator)[:count].sort().values
    dout, dkl = upstream(case, tokens=tokens)
    outcome = run(api, case, dout=dout, dkl=dkl, warmup=warmup)
    tokens = tokens.to(case.device)
    ids = outcome.block_indices
    if not warmup:
        assert_selection(case, ids, tokens=tokens)
    rows, gradients = expected(case, ids, dout, dkl, tokens)
    plain_rows, plain_gradients = dict.fromkeys(("out", "lse", "kl")), dict.fromkeys(NAMES)
    if is_half(case.dtype):
        *values, plain_gradients = plain(case.problem, case.inputs, ids, dout, dkl, tokens)
        plain_rows = {name: t[tokens] for name, t in zip(plain_rows, values)}
    rounding = Deviations(case, ids, dout, dkl, rows, gradients, tokens)
    for name, plain_result in plain_rows.items():
        result, reference = getattr(outcome, name)[tokens], getattr(rows, name)[tokens]
        deviations = rounding.of(name)
        assert_close(
            name, result, reference, case.dtype, plain_result, lambda d=deviations: d()[tokens]
        )
    for name, reference in zip(NAMES, gradients):
        result = outcome.gradients[name]
        assert_close(name, result, reference, case.dtype, plain_gradients[name], rounding.of(name))
    assert_padding(case, outcome)
    return outcome
