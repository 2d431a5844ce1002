"""Training runs: warm-up, then sparse; or dense throughout. Stops and resumes anywhere."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from thresher.nn import collect_kl, msa_layers, set_mode

from .data import Corpus, PackedStream
from .measure import held_out_loss, recall
from .model import ByteLM, ModelConfig


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 180
    warmup_share: float = 0.4  # of the steps: dense main attention, the proxy learns
    context: int = 2048
    row: int = 4096  # bytes a step
    rate: float = 4e-3
    kl_weight: float = 1.0
    evaluations: int = 9
    held_out: int = 8
    seed: int = 0
    dtype: str = "float32"


@dataclass
class History:
    """What a run has shown so far; everything the report needs."""

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    kl: list[list[float]] = field(default_factory=list)  # per layer
    evaluated: list[int] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    recall: list[dict] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    tokens: dict[str, int] = field(default_factory=dict)


class Run:
    """One model trained by one plan: name "msa" or "dense"."""

    def __init__(self, name: str, model: ModelConfig, train: TrainConfig, corpus: Corpus, device):
        self.name, self.train, self.device = name, train, device
        torch.manual_seed(train.seed)  # both runs start from the same weights
        self.model = ByteLM(model).to(device, getattr(torch, train.dtype))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=train.rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.stream = PackedStream(corpus.train, train.context, train.row, train.seed)
        self.batches = [
            b.to(device) for b in corpus.held_out_batches(train.context, train.held_out)
        ]
        self.history = History()
        self.done = 0

    # --- plan ---------------------------------------------------------------------------------
    def mode(self, step: int) -> str:
        if self.name == "dense":
            return "dense"
        return "warmup" if step < self.train.warmup_share * self.train.steps else "sparse"

    def rate(self, step: int) -> float:
        ramp = min(1.0, (step + 1) / 20)
        return self.train.rate * ramp * (0.55 + 0.45 * math.cos(math.pi * step / self.train.steps))

    def evaluates(self, step: int) -> bool:
        every = max(1, self.train.steps // self.train.evaluations)
        return step % every == 0 or step == self.train.steps

    # --- work ---------------------------------------------------------------------------------
    def step(self) -> dict:
        """One step; returns what the progress bar shows."""
        begin = time.perf_counter()
        if self.done == 0:
            self.evaluate()
        mode = self.mode(self.done)
        set_mode(self.model, mode)
        batch = self.stream.batch(self.done).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.done)
        start = time.perf_counter()
        loss = self.model.loss(batch)
        kl = collect_kl(self.model)
        total = loss if kl is None else loss + self.train.kl_weight * kl
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        h, value = self.history, float(loss.detach())
        seconds = time.perf_counter() - start
        self.done += 1
        h.step.append(self.done)
        h.loss.append(value)
        layers = msa_layers(self.model)
        h.kl.append([float(x.kl_loss.detach()) for x in layers if x.kl_loss is not None])
        h.seconds[mode] = h.seconds.get(mode, 0.0) + seconds
        h.tokens[mode] = h.tokens.get(mode, 0) + batch.tokens.numel()
        if self.evaluates(self.done):
            self.evaluate()
        shown = {"loss": value, "rate": batch.tokens.numel() / (time.perf_counter() - begin)}
        if kl is not None:
            shown["kl"] = float(kl.detach()) / len(layers)
        return shown

    def evaluate(self) -> None:
        """Held-out loss in the mode of the last step (before the first: of the first), and the
        recall that the proxy would reach now."""
        set_mode(self.model, self.mode(max(self.done - 1, 0)))
        self.model.eval()
        self.history.evaluated.append(self.done)
        self.history.held_out.append(held_out_loss(self.model, self.batches))
        if self.name == "msa":
            each = [recall(self.model, b.tokens) for b in self.batches[:3]]
            mean = {
                name: [sum(x) / len(each) for x in zip(*(r[name] for r in each))]
                for name in each[0]
            }
            self.history.recall.append(mean)
        self.model.train()

    # --- stop and go on -----------------------------------------------------------------------
    def state(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": asdict(self.history),
            "done": self.done,
        }

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = History(**state["history"])
        self.done = state["done"]


def save(path: Path, runs: list[Run], configs: dict) -> None:
    """Written beside the old one and then put in its place, so that a stop loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    torch.save({"runs": {r.name: r.state() for r in runs}, "configs": configs}, new)
    new.replace(path)


def load(path: Path, runs: list[Run], configs: dict) -> None:
    state = torch.load(path, weights_only=True)
    if state["configs"] != configs:
        changed = [k for k in configs if state["configs"].get(k) != configs[k]]
        raise ValueError(f"{path} was made with another configuration (differs in {changed})")
    for run in runs:
        run.load(state["runs"][run.name])
