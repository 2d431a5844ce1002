"""Time of one MSA step on the GPU beside dense attention, in the same run.

    python bench/gpu_step.py [--heads 16/2/4/1 64/4/4/1] [--tokens 16384 65536] [--json FILE]

A step is selection, forward and backward with kl="backward" values and gradient. Its peer is
forward and backward of scaled_dot_product_attention through cuDNN (causal, same q, k, v). Runs
alternate; the L2 cache is overwritten before each; random data, one document; medians.
The extra time of exact KL rows is the forward with kl="forward" less the one with kl="backward".
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import thresher


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    p.add_argument("--heads", nargs="+", default=["16/2/4/1", "64/4/4/1"], help="Hq/Hkv/Hp/Hpk")
    p.add_argument("--dim", type=int, default=128, help="D and Dp")
    p.add_argument("--block-size", type=int, default=128)
    p.add_argument("--top-k-blocks", type=int, default=16)
    p.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--dense-up-to", type=int, default=65536, help="tokens; 0: no dense runs")
    p.add_argument("--json", type=Path)
    return p.parse_args()


def commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return run.stdout.strip() or "unknown"


class Timer:
    """Milliseconds of the parts of a step, between CUDA events."""

    def __init__(self):
        self.events = [torch.cuda.Event(enable_timing=True)]
        self.names = []
        self.events[0].record()

    def mark(self, name: str) -> None:
        self.names.append(name)
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()

    def times(self) -> dict[str, float]:
        torch.cuda.synchronize()
        spent = {
            name: a.elapsed_time(b) for name, a, b in zip(self.names, self.events, self.events[1:])
        }
        return {**spent, "step": self.events[0].elapsed_time(self.events[-1])}


def msa_step(inputs, dout, options) -> dict[str, float]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    timer = Timer()
    ids = thresher.select_blocks(*inputs[3:], **options)
    timer.mark("selection")
    r = thresher.msa_attention(*leaves, block_indices=ids, kl="backward", **options)
    timer.mark("forward")
    torch.autograd.backward([r.out, r.kl_loss], [dout, torch.ones_like(r.kl_loss)])
    timer.mark("backward")
    return timer.times()


def forward_ms(inputs, ids, kl, options) -> dict[str, float]:
    timer = Timer()
    thresher.msa_attention(*inputs, block_indices=ids, kl=kl, **options)
    timer.mark("forward")
    return timer.times()


def dense_step(inputs, dout) -> dict[str, float]:
    q, k, v = (t.transpose(0, 1)[None].detach().requires_grad_() for t in inputs[:3])
    dout = dout.transpose(0, 1)[None]
    timer = Timer()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    timer.mark("forward")
    out.backward(dout)
    timer.mark("backward")
    return timer.times()


def median(samples: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(s[name] for s in samples), 4) for name in samples[0]}


def measure(heads: str, tokens: int, args) -> dict:
    counts = [int(x) for x in heads.split("/")]
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)

    def normal(h):
        return torch.randn(tokens, h, args.dim, device="cuda", dtype=dtype)

    inputs = [normal(counts[i]) for i in (0, 1, 1, 2, 3)]
    dout = normal(counts[0])
    options = {"top_k_blocks": args.top_k_blocks, "block_size": args.block_size}
    dense_wanted = 0 < tokens <= args.dense_up_to
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    msa_step(inputs, dout, options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    msa_step(inputs, dout, options)
    results = sum(t.numel() * t.element_size() for t in [*inputs, inputs[0]])
    extra = torch.cuda.max_memory_allocated() - before - results
    msa, dense = [], []
    ids = thresher.select_blocks(*inputs[3:], **options)
    forwards = {"backward": [], "forward": []}
    forward_ms(inputs, ids, "forward", options)
    if dense_wanted:
        dense_step(inputs, dout)
    for _ in range(args.repeats):
        flush.zero_()
        msa.append(msa_step(inputs, dout, options))
        for kl, samples in forwards.items():
            flush.zero_()
            samples.append(forward_ms(inputs, ids, kl, options))
        if dense_wanted:
            flush.zero_()
            dense.append(dense_step(inputs, dout))
    plain, exact = (median(forwards[kl])["forward"] for kl in ("backward", "forward"))
    result = {
        "heads": heads,
        "tokens": tokens,
        "msa_ms": median(msa),
        # Beyond inputs, outputs and gradients: workspaces, ids, row statistics.
        "msa_extra_bytes": extra,
        "forward_ms": plain,
        "exact_kl_extra_ms": round(exact - plain, 4),
    }
    if dense:
        result["dense_ms"] = median(dense)
        result["speedup"] = round(result["dense_ms"]["step"] / result["msa_ms"]["step"], 2)
    return result


def main() -> None:
    args = parse()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_step: no NVIDIA GPU was found")
    report = {
        "benchmark": "gpu_step",
        "date": date.today().isoformat(),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "clock_mhz": torch.cuda.clock_rate(),
        "torch": torch.__version__,
        "dim": args.dim,
        "block_size": args.block_size,
        "top_k_blocks": args.top_k_blocks,
        "dtype": args.dtype,
        "repeats": args.repeats,
        "results": [],
    }
    for heads in args.heads:
        for tokens in args.tokens:
            r = measure(heads, tokens, args)
            report["results"].append(r)
            m = r["msa_ms"]
            text = (
                f"{heads:>10} {tokens:>8} tokens  MSA {m['step']:.2f} ms (selection "
                f"{m['selection']:.2f}, forward {m['forward']:.2f}, backward {m['backward']:.2f}), "
                f"{r['msa_extra_bytes'] / 2**30:.2f} GiB extra"
            )
            kl_ms, share = r["exact_kl_extra_ms"], r["exact_kl_extra_ms"] / r["forward_ms"]
            text += f", exact KL rows {kl_ms:.2f} ms more ({share:.0%} of the forward)"
            if "dense_ms" in r:
                text += f"  dense {r['dense_ms']['step']:.2f} ms: {r['speedup']:.2f} x"
            print(text, flush=True)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
