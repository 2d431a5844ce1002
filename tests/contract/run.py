"""One call of the public functions, forward and backward, brought back to packed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cases import NAMES, Case


@dataclass
class Outcome:
    out: torch.Tensor  # [T, Hq, D]
    lse: torch.Tensor  # [T, Hq]
    kl: torch.Tensor | None  # [T, Hp]
    kl_loss: torch.Tensor | None
    block_indices: torch.Tensor | None  # [Hp, T, K]
    gradients: dict[str, torch.Tensor | None] | None = None
    raw: object = None  # what the function returned


def call(api, case: Case, leaves, *, warmup=False, kl="forward", **kwargs):
    """The result as the caller gets it. block_indices are given in packed form."""
    kwargs.setdefault("deterministic", False)
    if warmup:
        for name in ("softmax_scale", "proxy_scale"):
            if name in case.options:
                kwargs.setdefault(name, case.options[name])
        return api.msa_warmup_attention(*leaves, kl=kl, **case.geometry(), **kwargs)
    if kwargs.get("block_indices") is not None:
        kwargs["block_indices"] = case.indices_to_caller(kwargs["block_indices"])
    return api.msa_attention(*leaves, kl=kl, **case.options, **case.geometry(), **kwargs)


def run(
    api,
    case: Case,
    *,
    dout: torch.Tensor | None = None,
    dkl: torch.Tensor | None = None,
    needs=NAMES,
    **kwargs,
) -> Outcome:
    """dout, dkl: packed upstream gradients; without any there is no backward.

    needs: names of the inputs that require a gradient.
    """
    leaves = case.arguments()
    if dout is not None or dkl is not None:
        for name, leaf in zip(NAMES, leaves):
            leaf.requires_grad_(name in needs)
    r = call(api, case, leaves, **kwargs)

    def packed(tensor):
        return None if tensor is None else case.to_packed(tensor.detach())

    indices = r.block_indices
    outcome = Outcome(
        packed(r.out),
        packed(r.lse),
        packed(r.kl),
        None if r.kl_loss is None else r.kl_loss.detach(),
        None if indices is None else case.indices_to_packed(indices),
        raw=r,
    )
    pairs = [(r.out, dout), (r.kl, dkl)]
    pairs = [(tensor, case.to_caller(g)) for tensor, g in pairs if g is not None]
    if pairs:
        torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
        outcome.gradients = {n: packed(leaf.grad) for n, leaf in zip(NAMES, leaves)}
    return outcome
