"""Time and memory of one MSA step on the CPU beside PyTorch's dense causal attention.

    python bench/cpu_step.py [--tokens 16384 65536] [--json FILE]

A step is selection, forward and backward with kl="backward"; its peer is forward and backward of
scaled_dot_product_attention (causal) on the same q, k, v, in the same run, the two alternating.
Random data, one document. Times are medians; a peer that takes minutes runs once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import thresher

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    p.add_argument("--heads", default="8/2/2/1", help="Hq/Hkv/Hp/Hpk")
    p.add_argument("--dim", type=int, default=64, help="D and Dp")
    p.add_argument("--block-size", type=int, default=128)
    p.add_argument("--top-k-blocks", type=int, default=8)
    p.add_argument("--dtype", choices=DTYPES, default="fp32")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--no-dense", action="store_true")
    p.add_argument("--json", type=Path)
    return p.parse_args()


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return run.stdout.strip() or "unknown"


class PeakMemory:
    """Peak resident bytes of this process above what was resident at the start (Linux)."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self.start = self._status("VmRSS")
        return self

    def __exit__(self, *_):
        self.bytes = self._status("VmHWM") - self.start

    @staticmethod
    def _status(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {name}")


def timed(f):
    start = time.perf_counter()
    result = f()
    return result, time.perf_counter() - start


def msa_step(inputs, options) -> dict[str, float]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    ids, selection = timed(lambda: thresher.select_blocks(*inputs[3:], **options))
    result, forward = timed(
        lambda: thresher.msa_attention(*leaves, block_indices=ids, kl="backward", **options)
    )
    gradients = [torch.ones_like(result.out), torch.ones_like(result.kl_loss)]
    _, backward = timed(lambda: torch.autograd.backward([result.out, result.kl_loss], gradients))
    return {
        "selection": selection,
        "forward": forward,
        "backward": backward,
        "step": selection + forward + backward,
    }


def dense_step(inputs) -> dict[str, float]:
    q, k, v = (t.detach().transpose(0, 1)[None].requires_grad_() for t in inputs[:3])
    out, forward = timed(
        lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    )
    _, backward = timed(lambda: out.backward(torch.ones_like(out)))
    return {"forward": forward, "backward": backward, "step": forward + backward}


def median(samples: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(s[name] for s in samples) for name in samples[0]}


def matmul_rate(dtype) -> float:
    """GFLOP/s of a large product, the machine's ceiling."""
    a = torch.randn(2048, 2048, dtype=dtype)
    best = min(timed(lambda: a @ a)[1] for _ in range(5))
    return 2 * 2048**3 / best / 1e9


def measure(tokens: int, args) -> dict:
    heads = [int(x) for x in args.heads.split("/")]
    options = {"top_k_blocks": args.top_k_blocks, "block_size": args.block_size}
    torch.manual_seed(0)
    inputs = [
        torch.randn(tokens, h, args.dim, dtype=DTYPES[args.dtype])
        for h in (heads[0], heads[1], heads[1], heads[2], heads[3])
    ]
    msa_step([t[:1024] for t in inputs], options)  # starts the threads
    with PeakMemory() as peak:
        msa_step(inputs, options)
    msa, dense = [], []
    for i in range(args.repeats):
        msa.append(msa_step(inputs, options))
        if not args.no_dense and (i == 0 or dense[0]["step"] * args.repeats < 120):
            dense.append(dense_step(inputs))
    result = {
        "tokens": tokens,
        "msa_seconds": median(msa),
        "msa_peak_extra_bytes": peak.bytes,
    }
    if dense:
        result["dense_seconds"] = median(dense)
        result["dense_runs"] = len(dense)
        result["speedup"] = result["dense_seconds"]["step"] / result["msa_seconds"]["step"]
    return result


def main() -> None:
    args = parse()
    dtype = DTYPES[args.dtype]
    report = {
        "benchmark": "cpu_step",
        "date": date.today().isoformat(),
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "heads": args.heads,
        "dim": args.dim,
        "block_size": args.block_size,
        "top_k_blocks": args.top_k_blocks,
        "dtype": args.dtype,
        "repeats": args.repeats,
        "matmul_gflops": matmul_rate(dtype),
        "results": [],
    }
    for tokens in args.tokens:
        r = measure(tokens, args)
        report["results"].append(r)
        m = r["msa_seconds"]
        print(
            f"{tokens:>8} tokens  MSA {m['step']:.3f} s (selection {m['selection']:.3f}, forward "
            f"{m['forward']:.3f}, backward {m['backward']:.3f})  peak extra memory "
            f"{r['msa_peak_extra_bytes'] / 1e6:.0f} MB",
            flush=True,
        )
        if "speedup" in r:
            print(f"{'':>15}  dense {r['dense_seconds']['step']:.3f} s: {r['speedup']:.2f} x")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
