"""What only a GPU shows: devices, streams, CUDA graphs, memory (spec section 8, cases 15, 23)."""

import pytest
import torch

from .cases import HEADS, NAMES, make_case, upstream
from .checks import assert_outcome, assert_same
from .run import call, run

pytestmark = pytest.mark.gpu


def test_a_gpu_that_is_not_the_current_one(api, device, main_dtype):
    """Case 15."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs; this machine has one")
    case = make_case("cuda:1", main_dtype, lengths=(200, 30))
    dout, dkl = upstream(case)
    with torch.cuda.device(0):
        outcome = run(api, case, dout=dout, dkl=dkl)
        assert torch.cuda.current_device() == 0
    assert outcome.out.device == torch.device("cuda:1")
    assert_outcome(case, outcome, dout, dkl)


def test_side_stream_is_the_stream_of_the_work(api, device, main_dtype):
    """Inputs are produced late on the side stream: work on any other stream would read zeros."""
    case = make_case(device, main_dtype, lengths=(300, 40))
    dout, dkl = upstream(case)
    truth = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        leaves = [torch.zeros_like(t) for t in case.arguments()]
        torch.cuda._sleep(50_000_000)
        for leaf, t in zip(leaves, case.inputs):
            leaf.copy_(t)
        leaves = [t.requires_grad_() for t in leaves]
        r = call(api, case, leaves, deterministic=True)
        gradients = torch.autograd.grad([r.out, r.kl], leaves, [dout, dkl])
        copies = [r.out.clone(), *(g.clone() for g in gradients)]
    side.synchronize()
    assert torch.equal(copies[0], truth.out)
    for name, gradient in zip(NAMES, copies[1:]):
        assert torch.equal(gradient, truth.gradients[name]), name


def test_two_streams_at_once(api, device, main_dtype):
    cases = [make_case(device, main_dtype, lengths=(400, 9), seed=i) for i in range(2)]
    ups = [upstream(case, seed=i) for i, case in enumerate(cases)]
    truths = [run(api, c, dout=u[0], dkl=u[1], deterministic=True) for c, u in zip(cases, ups)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(10):
        outcomes = []
        for case, up, stream in zip(cases, ups, streams):
            with torch.cuda.stream(stream):
                outcomes.append(run(api, case, dout=up[0], dkl=up[1], deterministic=True))
        torch.cuda.synchronize()
        for outcome, truth in zip(outcomes, truths):
            for name in NAMES:
                assert torch.equal(outcome.gradients[name], truth.gradients[name]), name


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_step_never_waits_for_the_host(api, device, main_dtype, warmup):
    """Forward and backward only enqueue: torch raises at a hidden synchronisation."""
    case = make_case(device, main_dtype, lengths=(200, 55))
    dout, dkl = upstream(case)
    run(api, case, dout=dout, dkl=dkl, warmup=warmup)  # first call: lazy loading
    leaves = [t.requires_grad_() for t in case.arguments()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        r = call(api, case, leaves, warmup=warmup)
        torch.autograd.backward([r.out, r.kl], [dout, dkl])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_cuda_graph_replays_with_other_data_and_selection(api, device, main_dtype, warmup):
    """Case 23: captured once; lengths, data and so the selection change; all is rebuilt inside."""

    def other(seed, lengths):
        return make_case(device, main_dtype, lengths=lengths, seed=seed)

    case = other(0, (150, 105, 0))
    dout, dkl = upstream(case)
    static = [t.requires_grad_() for t in case.arguments()]
    static_cu = case.cu_seqlens.clone()
    options = {} if warmup else case.options

    def step():
        function = api.msa_warmup_attention if warmup else api.msa_attention
        r = function(*static, cu_seqlens=static_cu, deterministic=True, **options)
        return r, torch.autograd.grad([r.out, r.kl], static, [dout, dkl])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        r, gradients = step()
    for seed, lengths in ((1, (150, 105, 0)), (2, (10, 0, 245)), (3, (255, 0, 0))):
        new = other(seed, lengths)
        with torch.no_grad():
            for tensor, value in zip(static, new.inputs):
                tensor.copy_(value)
            static_cu.copy_(new.cu_seqlens)
        graph.replay()
        torch.cuda.synchronize()
        truth = run(api, new, dout=dout, dkl=dkl, warmup=warmup, deterministic=True)
        assert torch.equal(r.out, truth.out), lengths
        assert torch.equal(r.kl, truth.kl), lengths
        for name, gradient in zip(NAMES, gradients):
            assert torch.equal(gradient, truth.gradients[name]), name


def test_step_stores_nothing_quadratic(api, device, main_dtype):
    """Peak memory grows linearly with T (spec section 8)."""
    peaks = []
    for length in (8192, 32768):
        case = make_case(
            device, main_dtype, lengths=(length,), heads=HEADS["16/2/4/1"], dim=128,
            proxy_dim=128, block_size=128, top_k_blocks=16,
        )  # fmt: skip
        dout, dkl = upstream(case)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(api, case, dout=dout, dkl=dkl)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 4.5 * peaks[0], peaks


def test_bf16_and_fp16_steps_agree_with_the_cpu_backend(api, device, dtype):
    case = make_case(device, dtype, lengths=(300, 21), padding=3)
    on_cpu = make_case("cpu", dtype, lengths=(300, 21), padding=3)
    dout, dkl = upstream(case)
    ids = run(api, case).block_indices
    a = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
    b = run(api, on_cpu, dout=dout.cpu(), dkl=dkl.cpu(), block_indices=ids.cpu())
    eps = torch.finfo(dtype).eps
    for name in NAMES:
        x, y = (g.gradients[name][: case.real_tokens].double().cpu() for g in (a, b))
        assert (x - y).norm() <= 3 * eps * y.norm(), name
    assert_same("lse", a.lse[: case.real_tokens].cpu(), b.lse[: case.real_tokens])
