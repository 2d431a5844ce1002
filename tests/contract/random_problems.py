"""Random problems without end, each a function of its number, judged against float64.

    make nightly                                          100,000 of them, numbers from 0
    make nightly ARGS="--first 100000 --count 2000"        others
    make nightly ARGS="--first 4711 --count 1 --jobs 1"    one again, as a failure prints it

Prints progress, the failures with the number that repeats each of them, and problems a second. A
problem that kills its process is a failure like any other: the next one is taken up by a new one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback

if __name__ in ("__main__", "__mp_main__"):
    # One thread a process: the problems are small, and processes share the machine better.
    os.environ["OMP_NUM_THREADS"] = "1"

import torch

from .cases import NAMES, Case, make_case, upstream
from .checks import assert_same, assert_selection, verify
from .run import run
from .tolerances import DTYPES, accumulation

KINDS = ("selected", "warmup", "replayed", "kl in the backward", "some gradients")


# --- a problem from its number ----------------------------------------------------------------
def lengths_of(draw: random.Random, block_size: int) -> tuple[int, ...]:
    """Documents: empty, short, long, and those that end on a block's border or beside it."""

    def length():
        kind = draw.randrange(6)
        if kind == 0:
            return draw.choice([0, 1, 2])
        if kind == 1:
            return max(0, draw.randint(1, 6) * min(block_size, 32) + draw.randint(-1, 1))
        return draw.randint(0, 20 if kind < 4 else 120)

    return tuple(length() for _ in range(draw.choice([0, 1, 1, 2, 3, 4, 9, 25])))


def options_of(draw: random.Random, gpu: bool) -> dict:
    """Arguments of make_case: heads, sizes, blocks, scales, layout."""
    proxy_kv = draw.randint(1, 3)
    proxy = proxy_kv * draw.randint(1, 3)
    heads = proxy * draw.randint(1, 4)
    kv = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    block_size = draw.choice([32, 64, 128] if gpu else [1, 2, 3, 7, 8, 16, 32, 33, 64, 128])
    top_k = draw.choice([1, 2, 3, 4, 5, 8, 16, 40])
    init = draw.choice([0, 0, draw.randint(0, top_k)])
    sizes = [8, 16, 40, 64, 72, 128] if gpu else range(1, 41)
    options = dict(
        heads=(heads, kv, proxy, proxy_kv),
        dim=draw.choice(sizes),
        proxy_dim=draw.choice(sizes),
        block_size=block_size,
        top_k_blocks=top_k,
        init_blocks=init,
        local_blocks=draw.choice([min(1, top_k - init), draw.randint(0, top_k - init)]),
        seed=draw.randrange(2**31),
    )
    if draw.random() < 0.5:
        options["softmax_scale"] = draw.choice([-1, 1, 1, 1]) * 10 ** draw.uniform(-2, 0.3)
        options["proxy_scale"] = draw.choice([-1, 1, 1, 1]) * 10 ** draw.uniform(-2, 0.3)
    if draw.random() < 0.25:
        options["batch"], options["lengths"] = draw.randint(1, 4), draw.randint(1, 100)
        options["layout"] = draw.choice(["bshd", "bhsd", None])
    else:
        options["lengths"] = lengths_of(draw, block_size)
        options["padding"] = draw.choice([0, 0, 1, 2, 3, 17])
    return options


def shaped(case: Case, draw: random.Random) -> Case:
    """Normal numbers as they are, or few values (ties everywhere), or some rows of zeros."""
    how = draw.choice(["normal", "normal", "normal", "few values", "zero rows"])
    if how == "normal":
        return case
    generator = torch.Generator().manual_seed(draw.randrange(2**31))

    def change(tensor):
        if how == "few values":
            return tensor.round()
        rows = torch.rand(tensor.shape[:2], generator=generator) < 0.2
        return tensor.masked_fill(rows[..., None].to(tensor.device), 0.0)

    inputs = {name: change(t) for name, t in case.inputs._asdict().items()}
    inputs = {n: torch.cat([t[: case.real_tokens], case.inputs._asdict()[n][case.real_tokens :]])
              for n, t in inputs.items()}  # padding stays NaN  # fmt: skip
    return case.with_inputs(**inputs)


def selection_of(case: Case, draw: random.Random) -> torch.Tensor:
    """Visible blocks in any order with holes, rows without any; [Hp, T, K]."""
    top_k, block_size = case.problem.top_k_blocks, case.problem.block_size
    ids = torch.full((case.heads[2], case.tokens, top_k), -1, dtype=torch.int32)
    fill = draw.choice([0.1, 0.7, 1.0])
    for f in case.problem.fragments:
        for t in range(f.q_begin, f.q_end):
            visible = range((t - f.q_begin) // block_size + 1)
            for row in ids[:, t]:
                row[: len(visible)] = torch.tensor(draw.sample(visible, min(len(visible), top_k)))
                row[torch.tensor([draw.random() >= fill for _ in row])] = -1
    return ids.to(case.device)


def problem(number: int, device: str):
    """(kind, case, draw): everything that follows is drawn from `draw` too."""
    draw = random.Random(number)
    kind = draw.choice(KINDS)
    dtype = draw.choice(DTYPES[device])
    return kind, shaped(make_case(device, dtype, **options_of(draw, device == "cuda")), draw), draw


# --- judged -----------------------------------------------------------------------------------
def judge(api, number: int, device: str) -> None:
    kind, case, draw = problem(number, device)
    warmup = kind == "warmup" or (kind in KINDS[3:] and draw.random() < 0.5)
    if kind in ("selected", "warmup"):
        verify(api, case, warmup=warmup, deterministic=draw.random() < 0.5)
        return
    if kind == "replayed":
        verify(api, case, block_indices=selection_of(case, draw))
        return
    dout, dkl = upstream(case)
    full = run(api, case, dout=dout, dkl=dkl, warmup=warmup, deterministic=True)
    if not warmup:
        assert_selection(case, full.block_indices)
    if kind == "kl in the backward":
        rows = case.inputs.q.new_full(full.kl.shape, float("nan"), dtype=accumulation(case.dtype))
        rows = case.to_caller(rows).clone()
        given = run(api, case, dout=dout, dkl=dkl, warmup=warmup, kl="backward", kl_buffer=rows,
                    deterministic=True)  # fmt: skip
        torch.testing.assert_close(case.to_packed(rows), full.kl, rtol=1e-4, atol=1e-5)
        needs = NAMES
    else:
        needs = draw.sample(NAMES, draw.randint(1, 4))
        main = set(needs) & set(NAMES[:3])
        given_out = dout if main else None
        given_kl = dkl if len(main) < len(needs) else None
        given = run(api, case, dout=given_out, dkl=given_kl, needs=needs, warmup=warmup,
                    deterministic=True)  # fmt: skip
    for name in NAMES:
        if name in needs:
            assert_same(name, given.gradients[name], full.gradients[name])
        else:
            assert given.gradients[name] is None, name


# --- processes --------------------------------------------------------------------------------
def work(numbers, device, current, done, failures):
    """One process: `numbers` in turn; the number in hand is in `current`, should it die of it."""
    import thresher

    torch.set_num_threads(1)
    # torch.empty then returns NaN: what a kernel forgets to write is seen.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for number in numbers:
        current.value = number
        try:
            judge(thresher, number, device)
        except Exception as error:
            kind, case, _ = problem(number, device)
            text = f"{kind}, {case.dtype}, {case.options}, {case.heads}: {error}"
            if not isinstance(error, AssertionError):
                text += "\n" + traceback.format_exc()
            failures.put((number, text))
        done.value += 1


class Worker:
    def __init__(self, context, numbers, device, failures):
        self.context, self.numbers, self.device, self.failures = context, numbers, device, failures
        self.current = context.Value("q", -1, lock=False)
        self.done = context.Value("q", 0, lock=False)
        self.start(numbers)

    def start(self, numbers):
        arguments = (numbers, self.device, self.current, self.done, self.failures)
        self.process = self.context.Process(target=work, args=arguments, daemon=True)
        self.process.start()

    def alive(self) -> bool:
        """Takes up the rest in a new process if the old one was killed by a problem."""
        if self.process.is_alive() or self.process.exitcode == 0:
            return self.process.is_alive()
        number, code = self.current.value, self.process.exitcode
        if number < 0:
            raise SystemExit(f"a process ended with {code} before its first problem")
        self.failures.put((number, f"the process ended with {code}"))
        self.done.value += 1
        self.start([n for n in self.numbers if n > number])
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--device", default="cpu", choices=DTYPES.keys())
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")
    a = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue, failed, began, said = context.Queue(), [], time.monotonic(), 0.0
    numbers = range(a.first, a.first + a.count)
    jobs = max(1, min(a.jobs, a.count))
    workers = [Worker(context, numbers[i::jobs], a.device, queue) for i in range(jobs)]

    def drain():
        while not queue.empty():
            number, text = queue.get()
            failed.append(number)
            print(f"\nFAILED {number}: {text}\n  again: make nightly "
                  f'ARGS="--device {a.device} --first {number} --count 1"', flush=True)  # fmt: skip

    alive = True
    while alive:
        alive = any([w.alive() for w in workers])
        drain()
        seconds = time.monotonic() - began
        done = sum(w.done.value for w in workers)
        if not a.quiet and seconds - said >= 10:
            said = seconds
            print(f"{done} of {a.count} problems, {len(failed)} failed, {done / seconds:.1f} a "
                  f"second", flush=True)  # fmt: skip
        time.sleep(0.1)
    for w in workers:
        w.process.join()
    drain()
    seconds, done = time.monotonic() - began, sum(w.done.value for w in workers)
    print(f"{done} problems from number {a.first} on {a.device}: {len(failed)} failed, "
          f"{seconds:.0f} s, {done / seconds / jobs:.1f} a second and process")  # fmt: skip
    if failed:
        print("failed:", *sorted(failed))
    return 1 if failed or done < a.count else 0


if __name__ == "__main__":
    sys.exit(main())
