"""Trains a byte-level language model with MiniMax Sparse Attention on this Python's own sources.

    python examples/train_lm.py --out report        (what `make demo` runs)

Two runs of the same budget: MSA (warm-up, then sparse) and dense attention. Ctrl-C saves a
checkpoint and writes the report of what there is; --resume goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import thresher
from bytelm.data import Corpus
from bytelm.measure import attention_times, choices
from bytelm.model import ModelConfig
from bytelm.train import Run, TrainConfig, load, save
from thresher.nn import set_mode

PROMPT = b"class Stack:\n    def __init__(self, items):\n        self.items = "


def presets() -> dict[str, tuple[ModelConfig, TrainConfig]]:
    return {
        # Three quarters of the 32 blocks at the end of the context are dropped.
        "cpu": (ModelConfig(), TrainConfig()),
        "gpu": (
            ModelConfig(
                layers=6, width=512, heads=16, kv_heads=2, proxy_heads=4, head_dim=64,
                top_k_blocks=8, block_size=128,
            ),
            TrainConfig(steps=1500, context=8192, row=32768, rate=2e-3, dtype="bfloat16"),
        ),
    }  # fmt: skip


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=Path("report"), help="folder of the report")
    p.add_argument("--data", type=Path, help="folder of .py files (default: standard library)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--steps", type=int, help="training steps of each run")
    p.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint.pt")
    p.add_argument("--no-dense", action="store_true", help="without the dense run beside it")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(ModelConfig):
        p.add_argument(f"--{field.name.replace('_', '-')}", type=int)
    for name in ("context", "row", "held_out", "evaluations"):
        p.add_argument(f"--{name.replace('_', '-')}", type=int)
    args = p.parse_args()
    if args.steps is not None and args.steps < 1:
        p.error(f"argument --steps: {args.steps} is less than 1")
    return args


def configure(args) -> tuple[str, ModelConfig, TrainConfig]:
    found = thresher.info()["cuda"]["available"]
    device = args.device
    if device == "auto":
        device = "cuda" if found else "cpu"
    model, train = presets()["gpu" if device == "cuda" else "cpu"]
    given = {k: v for k, v in vars(args).items() if v is not None}
    names = {f.name for f in dataclasses.fields(ModelConfig)}
    model = dataclasses.replace(model, **{k: v for k, v in given.items() if k in names})
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    train = dataclasses.replace(train, **{k: v for k, v in given.items() if k in names})
    return device, model, train


class StopAfterStep:
    """Ctrl-C asks to stop; the step at hand ends first, so that what is saved is whole. A second
    Ctrl-C interrupts at once."""

    asked = False

    def __enter__(self) -> StopAfterStep:
        self._previous = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _ask(self, *_) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def train_all(runs: list[Run], checkpoint: Path, configs: dict, quiet: bool) -> bool:
    """Trains what is left; False if Ctrl-C stopped it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:>6}"), BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[shown]}"), TimeRemainingColumn(),
    )  # fmt: skip
    saved = time.monotonic()
    with StopAfterStep() as stop, Progress(*columns, disable=quiet) as progress:
        print("training; Ctrl-C saves and reports", flush=True)
        for run in runs:
            label = {"msa": "MSA", "dense": "dense"}[run.name]
            task = progress.add_task(label, total=run.train.steps, completed=run.done, shown="")
            while run.done < run.train.steps and not stop.asked:
                shown = run.step()
                text = f"loss {shown['loss']:.3f}"
                if "kl" in shown:
                    text += f"  kl {shown['kl']:.3f}"
                text += f"  {shown['rate']:,.0f} tokens/s  {run.mode(run.done - 1)}"
                progress.update(task, completed=run.done, shown=text)
                if time.monotonic() - saved > 30:
                    save(checkpoint, runs, configs)
                    saved = time.monotonic()
        save(checkpoint, runs, configs)
    if stop.asked:
        print(f"stopped; {checkpoint} is saved, --resume goes on from it")
    return not stop.asked


def report(args, runs: list[Run], device: str, seconds: float) -> None:
    from thresher.report import write_report

    msa = runs[0]
    histories = {r.name: r.history for r in runs}
    set_mode(msa.model, "sparse")
    msa.model.eval()
    batch = msa.stream.batch(0).to(msa.device)
    document = msa.batches[0].tokens
    h = msa.history
    blocks = -(-msa.train.context // msa.model.config.block_size)
    summary = [
        ("device", f"{device}, {torch.get_num_threads()} threads" if device == "cpu" else device),
        ("parameters", f"{sum(p.numel() for p in msa.model.parameters()):,}"),
        ("steps x bytes", f"{msa.done} x {msa.train.row:,}"),
        ("context, block size, blocks kept",
         f"{msa.train.context:,}, {msa.model.config.block_size}, "
         f"{msa.model.config.top_k_blocks} of {blocks} at its end"),
        ("training time, both runs", f"{seconds:.0f} s"),
    ]  # fmt: skip
    if h.held_out:
        summary.append(("held-out loss, MSA", f"{h.held_out[-1]:.4f} nats a byte"))
    dense = histories.get("dense")
    if dense and dense.held_out and dense.evaluated[-1] == h.evaluated[-1]:
        difference = h.held_out[-1] / dense.held_out[-1] - 1
        summary.append(("held-out loss, dense", f"{dense.held_out[-1]:.4f} nats a byte"))
        summary.append(("difference", f"{difference:+.2%}"))
    if h.recall:
        last = {k: sum(v) / len(v) for k, v in h.recall[-1].items()}
        summary.append(
            ("recall of dense attention mass",
             f"{last['selected']:.3f} (random {last['random']:.3f}, best possible "
             f"{last['best']:.3f}; at the start "
             f"{sum(h.recall[0]['selected']) / len(h.recall[0]['selected']):.3f})")
        )  # fmt: skip
    for phase, spent in {**h.seconds, **(dense.seconds if dense else {})}.items():
        tokens = {**h.tokens, **(dense.tokens if dense else {})}[phase]
        summary.append((f"tokens/s, {phase}", f"{tokens / spent:,.0f}"))

    sample = msa.model.generate(PROMPT, 200, temperature=0.9, seed=msa.train.seed)
    text = (PROMPT + sample[len(PROMPT) :]).decode("utf-8", "replace")
    data = {
        "title": "Thresher: a byte-level language model with MiniMax Sparse Attention",
        "summary": summary,
        "warmup_until": msa.train.warmup_share * msa.train.steps,
        "context": msa.train.context,
        "runs": {name: dataclasses.asdict(h) for name, h in histories.items()},
        "choices": [p.tolist() for p in choices(msa.model, document)],
        "times": attention_times(msa.model, batch),
        "sample": text,
        "configuration": {"model": msa.model.config.dict(), "train": dataclasses.asdict(msa.train)},
        "notes": ["Trained on the source files of the Python that ran it; held-out files by name."],
    }
    page = write_report(args.out, data)
    for name, value in summary:
        print(f"{name:34} {value}")
    print(f"\n{text}\n\nreport: {page}")


def main() -> int:
    args = parse()
    device, model, train = configure(args)
    torch.use_deterministic_algorithms(True, warn_only=True)
    corpus = Corpus(args.data)
    print(
        f"{corpus.root}: {len(corpus.train):,} files, {corpus.train_bytes / 1e6:.1f} MB for "
        f"training, {len(corpus.held_out)} files held out"
    )
    names = ["msa"] if args.no_dense else ["msa", "dense"]
    runs = [Run(name, model, train, corpus, device) for name in names]
    checkpoint = args.out / "checkpoint.pt"
    configs = {"model": model.dict(), "train": dataclasses.asdict(train), "runs": names}
    if args.resume:
        if not checkpoint.exists():
            print(f"--resume: there is no {checkpoint}", file=sys.stderr)
            return 2
        load(checkpoint, runs, configs)
    finished = train_all(runs, checkpoint, configs, args.quiet)
    seconds = sum(sum(r.history.seconds.values()) for r in runs)
    if runs[0].done > 0:
        report(args, runs, device, seconds)
    return 0 if finished else 130


if __name__ == "__main__":
    raise SystemExit(main())
