"""What the report shows beside the loss: recall of the selection, its picture, where time goes."""

from __future__ import annotations

import time

import torch
from torch import Tensor

import thresher
from thresher.nn import msa_layers


@torch.no_grad()
def held_out_loss(model, batches) -> float:
    """Mean nats a byte over all targets of the batches."""
    total, count = 0.0, 0
    for batch in batches:
        n = int((batch.targets != -100).sum())
        total += float(model.loss(batch)) * n
        count += n
    return total / count


@torch.no_grad()
def layer_inputs(model, tokens: Tensor) -> list[tuple[Tensor, ...]]:
    """(q, k, v, q_proxy, k_proxy) of every attention layer for one document."""
    found = []
    hooks = [
        layer.register_forward_pre_hook(lambda m, args: found.append(m.project(args[0])))
        for layer in msa_layers(model)
    ]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def block_mass(q: Tensor, k: Tensor, heads: int, block_size: int) -> Tensor:
    """Dense attention mass [Hp, T, blocks] of every block, mean over a proxy head's main heads."""
    tokens, q_heads, dim = q.shape
    k = k.repeat_interleave(q_heads // k.shape[1], 1)
    S = torch.einsum("ihd,jhd->hij", q.float(), k.float()) * dim**-0.5
    S = S.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril(), -1e30)
    P = S.softmax(2).unflatten(0, (heads, -1)).mean(1)
    P = torch.nn.functional.pad(P, (0, -tokens % block_size))
    return P.unflatten(2, (-1, block_size)).sum(3)


@torch.no_grad()
def recall(model, tokens: Tensor, seed: int = 0) -> dict[str, list[float]]:
    """Share of the dense attention mass inside the selected blocks, mean over the tokens that see
    more than K blocks; per layer. "random": as many random blocks, the forced ones kept; "best":
    the blocks with most mass, the forced ones kept."""
    c = model.config
    results = {"selected": [], "random": [], "best": []}
    generator = torch.Generator().manual_seed(seed)
    for q, k, _, q_proxy, k_proxy in layer_inputs(model, tokens):
        mass = block_mass(q, k, c.proxy_heads, c.block_size)
        ids = thresher.select_blocks(
            q_proxy, k_proxy, top_k_blocks=c.top_k_blocks, block_size=c.block_size
        )
        blocks = mass.shape[2]
        own = torch.arange(tokens.numel(), device=q.device)[:, None] // c.block_size
        block = torch.arange(blocks, device=q.device)
        late = own[:, 0] >= c.top_k_blocks

        def share(score, mass=mass, own=own, block=block, late=late):
            score = score.masked_fill(block > own, -1.0).masked_fill(block == own, 2.0)
            kept = score.topk(c.top_k_blocks, dim=2).indices
            return float(mass.gather(2, kept).sum(2)[:, late].mean())

        noise = torch.rand(mass.shape, generator=generator).to(q.device)
        results["random"].append(share(noise))
        results["best"].append(share(mass))
        chosen = mass.gather(2, ids.long().clamp(min=0)).masked_fill(ids < 0, 0)
        results["selected"].append(float(chosen.sum(2)[:, late].mean()))
    return results


@torch.no_grad()
def choices(model, tokens: Tensor, rows: int = 64) -> list[Tensor]:
    """Per layer [Hp, rows, blocks]: how often the tokens of a row (a stretch of the document)
    choose a block."""
    c = model.config
    pictures = []
    for *_, q_proxy, k_proxy in layer_inputs(model, tokens):
        ids = thresher.select_blocks(
            q_proxy, k_proxy, top_k_blocks=c.top_k_blocks, block_size=c.block_size
        )
        blocks = -(-tokens.numel() // c.block_size)
        chosen = torch.zeros(*ids.shape[:2], blocks + 1, device=ids.device)
        chosen.scatter_(2, torch.where(ids < 0, blocks, ids).long(), 1.0)
        stretch = tokens.numel() // rows
        chosen = chosen[:, : rows * stretch, :blocks].unflatten(1, (rows, stretch))
        pictures.append(chosen.mean(2).cpu())
    return pictures


def attention_times(model, batch, repeats: int = 3) -> dict[str, dict[str, float]]:
    """Milliseconds of one step's attention over all layers, best of `repeats`: MSA and dense."""
    c = model.config
    with torch.no_grad():
        found = []
        hooks = [
            m.register_forward_pre_hook(
                lambda m, args: found.append(m.project(args[0], batch.cu_seqlens))
            )
            for m in msa_layers(model)
        ]
        model(batch.tokens, batch.cu_seqlens)
        for hook in hooks:
            hook.remove()
    options = {"cu_seqlens": batch.cu_seqlens}
    sizes = {"top_k_blocks": c.top_k_blocks, "block_size": c.block_size}

    def timed(f):
        _wait(batch.tokens)
        start = time.perf_counter()
        result = f()
        _wait(batch.tokens)
        return result, 1e3 * (time.perf_counter() - start)

    best: dict[str, dict[str, float]] = {"msa": {}, "dense": {}}
    for _ in range(repeats):
        spent = {("msa", "selection"): 0.0}
        for tensors in found:
            leaves = [t.detach().requires_grad_() for t in tensors]
            ids, ms = timed(lambda x=leaves: thresher.select_blocks(*x[3:], **options, **sizes))
            spent["msa", "selection"] += ms
            for name, call in (
                (
                    "msa",
                    lambda x=leaves, i=ids: thresher.msa_attention(
                        *x, block_indices=i, kl="backward", **options, **sizes
                    ),
                ),
                ("dense", lambda x=leaves: thresher.msa_warmup_attention(*x, kl=None, **options)),
            ):
                r, forward = timed(call)
                loss = r.out.float().sum() + (r.kl_loss if r.kl_loss is not None else 0)
                _, backward = timed(loss.backward)
                for part, ms in (("forward", forward), ("backward", backward)):
                    spent[name, part] = spent.get((name, part), 0.0) + ms
        for (name, part), ms in spent.items():
            best[name][part] = min(ms, best[name].get(part, float("inf")))
    return best


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
