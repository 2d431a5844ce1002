"""The one table of tolerances. Everything follows from the dtype; nothing is tuned to a test.

fp64 and fp32: fixed bounds of the relative error. bf16 and fp16: twice the error that plain PyTorch
in the same dtype (plain.py) makes on the same problem, both measured against float64, plus the unit
roundoff of the result's dtype (a result is rounded once even if all else were exact).

Two errors are bounded, each by the same rule:
    norm   ||x - ref|| / ||ref||
    rows   ||x - ref|| / max(||ref||, median norm of the rows that are not 0), for every row (the
           last dimension; single numbers for lse and kl): one bad row cannot hide in a large tensor

Cancellation: a sum whose terms cancel (dq of a document of one token is exactly 0) has no relative
error worth a bound. There, and nowhere else, an error may be as large as the rounding of the terms,
which reference64.rounding computes for the very inputs; see `rounding_units` and `floor`. On random
data the floor lies far below the bounds above (fp32 about 50 times, fp64 a million times), so that
it decides only where the reference has lost the digits.
"""

import torch

DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
MAIN_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}

VALUES = ("out", "lse", "kl", "kl_loss")
GRADIENTS = ("q", "k", "v", "q_proxy", "k_proxy")

RELATIVE_ERROR = {
    torch.float64: {"values": 1e-10, "gradients": 1e-10},
    torch.float32: {"values": 2e-5, "gradients": 5e-5},
}
TIMES_PLAIN = 2.0


def is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and kl, and of sums inside a kernel."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def limit(dtype: torch.dtype, name: str, plain_error: float = 0.0) -> float:
    """Largest error of the result `name` (one of VALUES or GRADIENTS) for inputs of `dtype`."""
    kind = "values" if name in VALUES else "gradients"
    if not is_half(dtype):
        return RELATIVE_ERROR[dtype][kind]
    if name in ("lse", "kl", "kl_loss"):  # stored in fp32
        return TIMES_PLAIN * plain_error + RELATIVE_ERROR[torch.float32][kind]
    return TIMES_PLAIN * plain_error + torch.finfo(dtype).eps / 2


def rounding_units(dtype: torch.dtype) -> dict[str, float]:
    """Standard deviations of one rounding, for reference64.rounding.

    An error uniform in (-u, u), u = eps / 2, has the deviation u / sqrt(3). Twice that for
    arithmetic: a running sum of n terms rounds n times, each time by its size so far.
    """
    unit = 0.5 / 3**0.5
    return {
        "accumulate": 2 * unit * torch.finfo(accumulation(dtype)).eps,
        "store": unit * torch.finfo(dtype).eps,
    }


# Deviations by which a norm may exceed its root mean square: five are not met in a million rows.
SIGMAS = 5.0


def _row_deviations(deviations: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Numbers below the normal range are rounded to multiples of the smallest one.
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return (deviations**2 + smallest**2).sum(-1).sqrt()


def floor(deviations: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest rounding error of each row: its elements may all move together (with delta, lse)."""
    return (1 + SIGMAS) * _row_deviations(deviations, dtype)


def norm_floor(deviations: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest norm of the rounding errors of all rows, which are independent of each other.

    The norm of a normal vector exceeds its root mean square no more than one normal number with the
    largest deviation exceeds 0 (concentration of Lipschitz functions).
    """
    rows = _row_deviations(deviations, dtype)
    return rows.norm() + SIGMAS * rows.max()


def selection_epsilon(dtype: torch.dtype) -> float:
    """Machine epsilon of the accumulation of a proxy score."""
    return torch.finfo(accumulation(dtype)).eps
