"""The same call twice gives the same bits: spec.md section 9, cases.md rows 16 and 19."""

import threading

import pytest
import torch

from .cases import HEADS, NAMES, make_case, upstream
from .checks import assert_same
from .run import run

MODES = pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])


def assert_bitwise(a, b):
    for field in ("out", "lse", "kl", "kl_loss"):
        assert torch.equal(getattr(a, field), getattr(b, field)), field
    if a.block_indices is not None:
        assert torch.equal(a.block_indices, b.block_indices)
    for name in NAMES:
        assert torch.equal(a.gradients[name], b.gradients[name]), name


@MODES
@pytest.mark.parametrize("heads", ["16/2/4/1", "Hp < Hkv", "MHA"])
def test_deterministic_mode_repeats_every_bit(api, device, dtype, heads, warmup):
    case = make_case(device, dtype, lengths=(300, 0, 77), heads=HEADS[heads], padding=3)
    dout, dkl = upstream(case)
    first = run(api, case, dout=dout, dkl=dkl, warmup=warmup, deterministic=True)
    for _ in range(3):
        again = run(api, case, dout=dout, dkl=dkl, warmup=warmup, deterministic=True)
        assert_bitwise(first, again)


@MODES
def test_global_switch_of_torch_is_honoured(api, device, dtype, warmup):
    """deterministic=None follows torch.are_deterministic_algorithms_enabled(), which is on here."""
    assert torch.are_deterministic_algorithms_enabled()
    case = make_case(device, dtype, lengths=(260,))
    dout, dkl = upstream(case)
    named = run(api, case, dout=dout, dkl=dkl, warmup=warmup, deterministic=True)
    default = run(api, case, dout=dout, dkl=dkl, warmup=warmup, deterministic=None)
    assert_bitwise(named, default)


@MODES
def test_number_of_threads_does_not_change_a_bit_on_the_cpu(api, warmup):
    case = make_case("cpu", torch.float32, lengths=(300, 60, 1), heads=HEADS["16/2/4/1"])
    dout, dkl = upstream(case)
    before = torch.get_num_threads()
    try:
        outcomes = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            outcomes.append(run(api, case, dout=dout, dkl=dkl, warmup=warmup))
    finally:
        torch.set_num_threads(before)
    for outcome in outcomes[1:]:
        assert_bitwise(outcomes[0], outcome)


def test_number_of_openmp_threads_does_not_change_a_bit_on_the_cpu(thresher_only, tmp_path):
    """The library's own OpenMP pool, sized by the environment: one process a size."""
    import os
    import subprocess
    import sys

    program = """
import sys, torch, thresher
torch.manual_seed(0)
def leaf(h): return torch.randn(400, h, 32).requires_grad_()
x = [leaf(4), leaf(2), leaf(2), leaf(2), leaf(1)]
cu = torch.tensor([0, 290, 290, 400], dtype=torch.int32)
r = thresher.msa_attention(*x, cu_seqlens=cu, block_size=16, top_k_blocks=4)
torch.manual_seed(1)
torch.autograd.backward([r.out, r.kl], [torch.randn_like(r.out), torch.randn_like(r.kl)])
torch.save([r.out.detach(), r.kl.detach(), r.block_indices, *[t.grad for t in x]], sys.argv[1])
"""
    results = []
    for threads in ("1", "3"):
        path = tmp_path / f"{threads}.pt"
        env = {**os.environ, "OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, "-c", program, str(path)], env=env, check=True)
        results.append(torch.load(path))
    for a, b in zip(*results):
        assert torch.equal(a, b)


@MODES
def test_two_threads_at_once_do_not_disturb_each_other(api, device, main_dtype, warmup):
    """Other problems in other threads: no state is shared."""
    cases = [
        make_case(device, main_dtype, lengths=(150, 9), seed=1),
        make_case(device, main_dtype, lengths=(20, 210), seed=2),
    ]
    ups = [upstream(case, seed=i) for i, case in enumerate(cases)]

    def step(i):
        dout, dkl = ups[i]
        return run(api, cases[i], dout=dout, dkl=dkl, warmup=warmup, deterministic=True)

    truths = [step(i) for i in range(2)]
    failures = []

    def worker(i):
        try:
            for _ in range(8):
                assert_bitwise(step(i), truths[i])
        except BaseException as error:  # a thread cannot fail a test by itself
            failures.append(error)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


@pytest.mark.slow
def test_a_hundred_repeats_of_a_hot_block(api, device, main_dtype):
    """Case 1: one block chosen by every token; the sum over its many readers never races."""
    case = make_case(device, main_dtype, lengths=(2000,), heads=HEADS["16/2/4/1"])
    ids = torch.full((4, 2000, 3), -1, dtype=torch.int32, device=device)
    ids[:, :, 0] = 0
    dout, dkl = upstream(case)
    first = run(api, case, dout=dout, dkl=dkl, block_indices=ids, deterministic=True)
    for _ in range(100):
        again = run(api, case, dout=dout, dkl=dkl, block_indices=ids, deterministic=True)
        assert_bitwise(first, again)


@pytest.mark.gpu
def test_nondeterministic_mode_differs_from_deterministic_only_by_rounding(api, device, dtype):
    case = make_case(device, dtype, lengths=(700, 33))
    dout, dkl = upstream(case)
    a = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    b = run(api, case, dout=dout, dkl=dkl, deterministic=False)
    assert torch.equal(a.block_indices, b.block_indices), "selection is deterministic always"
    assert_same("out", a.out, b.out)
    for name in NAMES:
        assert_same(name, a.gradients[name], b.gradients[name])
