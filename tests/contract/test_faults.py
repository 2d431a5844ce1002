"""The 25 faults that public kernels of this kind have had (one class of fault a number).

Judged here, or where the promise lives; test_rows.py holds the whole list and checks it. Some:
     1 hot block                          here; test_determinism (repeats)
     2 head dim 64, causal as a list      here
     3 backward before its preprocessing  here (soak)
     4 other metadata in the backward     test_autograd (one loss, two forwards)
     5 dout stride times row above 2^31   here; test_offsets
     6 15,000 documents                   here
     7 S = 46,341                         here
     8 9 q lengths unlike k lengths       tests/cpp/test_cpu_attention (the C++ API has fragments)
    10 lengths 0, 1, 0, 1                 here
    11 946 rows, 944 tokens               here
    12 head ratios that do not divide     test_arguments
    13 14 strides and alignment of dout   test_layouts
    15 tensors on another GPU             test_gpu
    16 deterministic mode with GQA        here; test_determinism
    17 student below exp(-100)            test_kl
    18 two forwards outstanding           test_autograd, test_checkpoint
    19 recompute with near ties           test_checkpoint
    20 wrong selection ids                test_replay
    21 LSE over another set               test_kl
    22 torch.compile                      test_compile
    23 CUDA graph with a new selection    test_gpu
    24 unused KL                          test_autograd
    25 last partial tile                  here
"""

import pytest
import torch

from .cases import HEADS, NAMES, make_case, upstream
from .checks import assert_outcome, assert_padding, assert_same, assert_sampled, verify
from .run import run


def hot_selection(case):
    ids = torch.full((case.heads[2], case.tokens, 3), -1, dtype=torch.int32, device=case.device)
    ids[:, :, 0] = 0
    return ids


def test_case_01_one_block_chosen_by_every_token(api, device, dtype):
    case = make_case(device, dtype, lengths=(1500,), heads=HEADS["16/2/4/1"])
    verify(api, case, block_indices=hot_selection(case))


@pytest.mark.slow
@pytest.mark.gpu
def test_case_01_a_thousand_repeats(api, device, dtype):
    case = make_case(device, dtype, lengths=(4000,), heads=HEADS["16/2/4/1"])
    ids = hot_selection(case)
    dout, dkl = upstream(case)
    first = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
    assert_outcome(case, first, dout, dkl, ids)
    for _ in range(1000):
        again = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
        for name in NAMES:
            assert_same(name, again.gradients[name], first.gradients[name])


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_case_02_causal_pattern_as_a_block_list_equals_dense(api, device, dtype, block_size):
    """Head dim 64; every visible block is listed: gradients are the dense causal ones."""
    length = 5 * block_size + 17
    case = make_case(
        device, dtype, lengths=(length,), block_size=block_size, top_k_blocks=6, heads=HEADS["MQA"]
    )
    blocks = torch.arange(6, device=device)
    last = torch.arange(length, device=device) // block_size
    ids = torch.where(blocks[None, :] <= last[:, None], blocks[None, :], -1).int()[None]
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
    assert_outcome(case, outcome, dout, dkl, None)


@pytest.mark.slow
def test_case_03_soak_of_mixed_shapes(api, device, main_dtype):
    """Every launch equals the first one of its shape; 10,000 on a GPU."""
    launches = 10_000 if device == "cuda" else 600
    shapes = [(1,), (33, 0, 190), (128, 128), (7,) * 30, (400, 1)]
    cases = [make_case(device, main_dtype, lengths=s, seed=i) for i, s in enumerate(shapes)]
    ups = [upstream(case) for case in cases]
    first = [run(api, c, dout=u[0], dkl=u[1], deterministic=True) for c, u in zip(cases, ups)]
    for i in range(launches):
        j = i % len(cases)
        again = run(api, cases[j], dout=ups[j][0], dkl=ups[j][1], deterministic=True)
        for name in NAMES:
            assert torch.equal(again.gradients[name], first[j].gradients[name]), (i, name)


@pytest.mark.slow
def test_case_05_dout_row_225304_with_stride_9728(api, device, main_dtype):
    """The product is 2,191,757,312: above 2^31. Rows in between are never touched."""
    from .test_offsets import sparse_view

    rows, stride, documents = 225_305, 9_728, 451
    lengths = (500,) * (documents - 1) + (rows - 500 * (documents - 1),)
    case = make_case(
        device, main_dtype, lengths=lengths, heads=(2, 1, 1, 1), block_size=128, top_k_blocks=2
    )
    tokens = torch.tensor([0, 100_000, 220_752, rows - 1])
    dout, dkl = upstream(case, tokens=tokens)
    far = sparse_view((rows, 2, 64), (stride, 64, 1), main_dtype, device)
    far[tokens.to(device)] = dout[tokens.to(device)]
    near = run(api, case, dout=dout, dkl=dkl, deterministic=True)
    given = run(api, case, dout=far, dkl=dkl, deterministic=True)
    for name in NAMES:
        assert torch.equal(given.gradients[name], near.gradients[name]), name


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_case_06_fifteen_thousand_documents(api, device, main_dtype, warmup):
    lengths = tuple(i % 4 for i in range(15_000))
    case = make_case(device, main_dtype, lengths=lengths, heads=(2, 1, 1, 1), padding=2)
    assert_sampled(api, case, count=40, warmup=warmup)


@pytest.mark.slow
def test_case_07_one_document_of_46341_tokens(api, device, main_dtype):
    """46,341 squared is just above 2^31."""
    case = make_case(
        device, main_dtype, lengths=(46_341,), heads=(2, 1, 1, 1), block_size=128, top_k_blocks=4
    )
    assert_sampled(api, case, count=24)


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_case_10_lengths_of_nothing_and_one(api, device, dtype, warmup):
    verify(api, make_case(device, dtype, lengths=(0, 1, 0, 1), padding=1), warmup=warmup)


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_case_11_946_rows_of_which_944_are_real(api, device, dtype, warmup):
    case = make_case(device, dtype, lengths=(400, 344, 200), padding=2)
    dout, dkl = upstream(case)
    outcome = run(api, case, dout=dout, dkl=dkl, warmup=warmup)
    assert case.real_tokens == 944 and case.tokens == 946
    assert_padding(case, outcome)
    assert_outcome(case, outcome, dout, dkl)


@pytest.mark.parametrize("heads", ["gqa 6:1", "MQA", "16/2/4/1"])
def test_case_16_deterministic_mode_with_grouped_heads_twice(api, device, dtype, heads):
    """What the first call leaves behind (semaphores, counters) must not stop the second."""
    for lengths in ((300,), (40, 260), (300,)):
        case = make_case(device, dtype, lengths=lengths, heads=HEADS[heads])
        verify(api, case, deterministic=True)


@pytest.mark.parametrize("extra", [1, 15, 16, 17, 63, 65])
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_case_25_last_partial_tile_leaves_the_next_rows_alone(
    api, device, main_dtype, extra, warmup
):
    """Documents that end inside a tile; every row is compared, see tolerances.py."""
    case = make_case(device, main_dtype, lengths=(64 + extra, 64 + extra, extra), padding=3)
    verify(api, case, warmup=warmup)
