"""`python -m thresher selftest`: every operation of every device found, against the definition."""

from __future__ import annotations

import sys

import torch

from . import interface, reference
from ._check import DTYPES

# Largest relative error (norm-wise) of results and gradients, by dtype.
BOUND = {
    torch.float32: 5e-5,
    torch.float64: 1e-10,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}
NAMES = ("q", "k", "v", "q_proxy", "k_proxy")


def devices() -> list[str]:
    from . import info

    return ["cpu", "cuda"] if info()["cuda"]["available"] else ["cpu"]


def run(quiet: bool = False) -> bool:
    """Prints a table; True if everything agrees."""
    good = True
    if not quiet:
        print(f"{'device':8}{'dtype':10}{'operation':32}{'largest error':>14}{'bound':>10}")
    for device in devices():
        for dtype in DTYPES[device]:
            for operation, error in _operations(device, dtype):
                passed = error <= BOUND[dtype]  # NaN fails
                good &= passed
                if not quiet:
                    name = str(dtype).removeprefix("torch.")
                    print(
                        f"{device:8}{name:10}{operation:32}{error:14.1e}{BOUND[dtype]:10.0e}"
                        f"  {'ok' if passed else 'FAILED'}"
                    )
                    sys.stdout.flush()
    print("selftest passed" if good else "selftest FAILED")
    return good


def _operations(device, dtype):
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, 70, 70, 333], dtype=torch.int32, device=device)

    def normal(heads, dim=64):
        x = torch.randn(340, heads, dim, generator=generator)
        return x.to(device, dtype)

    tensors = normal(8), normal(2), normal(2), normal(4), normal(2)
    options = {"block_size": 32, "top_k_blocks": 4}

    # Selection: on small integers every score is exact, so that the ids must be equal.
    whole = [(t * 2).round() for t in tensors[3:]]
    scale = {"proxy_scale": 1.0, "cu_seqlens": cu_seqlens}
    got = interface.select_blocks(*whole, **options, **scale)
    want = reference.select_blocks(*whole, **options, **scale)
    yield "select_blocks", float((got != want).float().mean())

    ids = interface.select_blocks(*tensors[3:], cu_seqlens=cu_seqlens, **options)
    ups = normal(8), torch.randn(340, 4, generator=generator).to(device)
    if dtype == torch.float64:
        ups = ups[0], ups[1].double()
    for mode in ("sparse", "warmup"):
        for deterministic in (False, True):
            results = []
            # The definition in fp64, which only the CPU takes.
            for api, place in ((interface, (device, dtype)), (reference, ("cpu", torch.float64))):
                extra = {"cu_seqlens": cu_seqlens.to(place[0]), "deterministic": deterministic}
                if mode == "sparse":
                    extra.update(options, block_indices=ids.to(place[0]))
                leaves = [t.to(*place, copy=True).requires_grad_() for t in tensors]
                f = api.msa_attention if mode == "sparse" else api.msa_warmup_attention
                r = f(*leaves, **extra)
                g = ups[0].to(*place), ups[1].to(place[0], r.kl.dtype)
                torch.autograd.backward([r.out, r.kl], g)
                real = slice(0, 333)
                results.append([r.out[real], r.lse[real], r.kl[real], *(t.grad for t in leaves)])
            errors = [
                float((a - b).norm() / b.norm())
                for a, b in zip(*([x.detach().cpu().double() for x in r] for r in results))
            ]
            name = f"{mode}{' deterministic' if deterministic else ''}"
            yield f"{name} forward", max(errors[:3], key=_nan_last)
            yield f"{name} backward", max(errors[3:], key=_nan_last)


def _nan_last(x: float) -> float:
    return float("inf") if x != x else x
