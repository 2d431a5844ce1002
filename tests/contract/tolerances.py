"""The one table of tolerances. Everything follows from the dtype; nothing is tuned to a test.

fp64 and fp32: fixed bounds of the relative error. bf16 and fp16: twice the error that plain PyTorch
in the same dtype (plain.py) makes on the same problem, both measured against float64, plus the unit
roundoff of the result's dtype (a result is rounded once even if all else were exact).

Two errors are bounded, each by the same rule:
    norm   ||x - ref|| / ||ref||
    rows   max over rows (the last dimension; single numbers for lse and kl) of
           ||x - ref|| / max(||ref||, median norm of the rows that are not 0): one bad row cannot
           hide in a large tensor
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


def selection_epsilon(dtype: torch.dtype) -> float:
    """Machine epsilon of the accumulation of a proxy score."""
    return torch.finfo(accumulation(dtype)).eps
