"""Text that every machine has: the source files of the Python that runs this.

Files become documents of uneven length, cut at the context length and packed one after the other
into rows of a fixed number of bytes; `cu_seqlens` says where each document starts. The split into
training and held-out files depends on the file names alone, and every batch is a function of
(seed, step), so a run can stop and resume anywhere.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

FILE_START = 0  # a byte that does not occur in source text marks the first position of a file
IGNORE = -100  # target of the last byte of a document: nothing follows
# Not language: packages of the user, tests (some distributions leave them out), generated tables.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SKIPPED |= {"encodings", "pydoc_data"}
HELD_OUT_SHARE = 0.08


@dataclass
class Batch:
    """One packed row. tokens, targets: int64 [T]; cu_seqlens: int32 [documents + 1]."""

    tokens: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor

    def to(self, device) -> Batch:
        return Batch(*(t.to(device, non_blocking=True) for t in vars(self).values()))


def pack(documents: list[np.ndarray]) -> Batch:
    lengths = [len(d) for d in documents]
    tokens = torch.from_numpy(np.concatenate(documents).astype(np.int64))
    targets = torch.full_like(tokens, IGNORE)
    targets[:-1] = tokens[1:]
    ends = np.cumsum(lengths)
    targets[torch.from_numpy(ends - 1)] = IGNORE
    cu_seqlens = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
    return Batch(tokens, targets, cu_seqlens)


def is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_SHARE


class Corpus:
    """Training files and held-out files, as byte arrays, each starting with FILE_START."""

    def __init__(self, root: str | Path | None = None):
        root = Path(root or sysconfig.get_path("stdlib"))
        self.root = root
        self.train: list[np.ndarray] = []
        self.held_out: list[np.ndarray] = []
        self.held_out_names: list[str] = []
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if SKIPPED & set(name.parts):
                continue
            data = path.read_bytes()
            if len(data) < 2:
                continue
            document = np.frombuffer(bytes([FILE_START]) + data, dtype=np.uint8)
            if is_held_out(name.as_posix()):
                self.held_out.append(document)
                self.held_out_names.append(name.as_posix())
            else:
                self.train.append(document)
        if not self.train or not self.held_out:
            raise FileNotFoundError(
                f"{root}: found {len(self.train)} training and {len(self.held_out)} held-out .py "
                "files; expected a Python standard library (--data names another folder)"
            )

    @property
    def train_bytes(self) -> int:
        return sum(map(len, self.train))

    def held_out_batches(self, context: int, count: int) -> list[Batch]:
        """`count` documents of full context length and one row of short files, always the same."""
        long = [d[:context] for d in self.held_out if len(d) >= context]
        if not long:
            raise ValueError(f"context {context}: no held-out file is that long")
        # Beginnings of different files first, then their continuations.
        start = context
        while len(long) < count:
            more = [d[start : start + context] for d in self.held_out if len(d) >= start + context]
            if not more:
                break
            long += more
            start += context
        batches = [pack([d]) for d in long[:count]]
        short, total = [], 0
        for document in self.held_out:
            if 64 <= len(document) < context and total + len(document) <= context:
                short.append(document)
                total += len(document)
        return batches + ([pack(short)] if short else [])


class PackedStream:
    """Training batches: files in shuffled order, cut at `context`, packed into rows of `row` bytes.

    The document that does not fit into its row goes on in the next one, as a document of its own.
    """

    def __init__(self, files: list[np.ndarray], context: int, row: int, seed: int):
        self.files, self.context, self.row, self.seed = files, context, row, seed
        self.bytes = np.concatenate(files)
        self.starts = np.concatenate([[0], np.cumsum([len(f) for f in files])])
        self.rows_per_epoch = len(self.bytes) // row
        if self.rows_per_epoch == 0:
            raise ValueError(f"row {row}: the files hold only {len(self.bytes)} bytes")
        self._epoch = -1

    def _shuffle(self, epoch: int) -> None:
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.files))
        lengths = np.diff(self.starts)[order]
        self._order, self._epoch = order, epoch
        self._ends = np.cumsum(lengths)  # position of each file's end in the epoch's stream

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.rows_per_epoch)
        if epoch != self._epoch:
            self._shuffle(epoch)
        position, end = index * self.row, (index + 1) * self.row
        file = int(np.searchsorted(self._ends, position, side="right"))
        documents = []
        while position < end:
            which = self._order[file]
            offset = self.starts[which + 1] - (self._ends[file] - position)
            take = int(min(self._ends[file] - position, self.context, end - position))
            documents.append(self.bytes[offset : offset + take])
            position += take
            if position == self._ends[file]:
                file += 1
        return pack(documents)
