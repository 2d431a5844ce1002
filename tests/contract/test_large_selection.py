"""Selection at the sizes that GPU kernels are made for: long lists, many rows, cut work."""

import pytest
import torch

from .cases import make_case
from .checks import assert_selection
from .test_selection import select

pytestmark = pytest.mark.gpu


def large_case(device, dtype, lengths, top_k_blocks, **options):
    """Proxy heads of M3 beside main heads that take little memory: only the proxy is read."""
    options = {"block_size": 128, "proxy_dim": 128, "proxy_scale": 1.0, **options}
    return make_case(
        device, dtype, lengths=lengths, heads=(4, 1, 4, 1), dim=8, top_k_blocks=top_k_blocks,
        **options,
    )  # fmt: skip


def visible_blocks(case):
    """Per token of a batch without padding."""
    f = case.problem.fragments
    positions = [torch.arange(x.k_len, device=case.device) for x in f]
    return torch.cat(positions) // case.problem.block_size + 1


def expected_rows(case, kept):
    """kept: [T, K] ids of rows that see more than K blocks; the others keep all they see."""
    k = case.problem.top_k_blocks
    visible = visible_blocks(case)[:, None]
    slot = torch.arange(k, device=case.device)[None]
    every = torch.where(slot < visible, slot, -1)
    return torch.where(visible > k, kept, every).int().expand(case.heads[2], -1, -1)


@pytest.mark.parametrize("top_k_blocks", [16, 64])
def test_no_block_left_out_of_a_million_rows_beats_one_kept(api, device, dtype, top_k_blocks):
    """2^20 rows of (token, head), all of them against float64 with the bound of fp32 sums."""
    lengths = (40_000, 1, 33_333, 30_000, 127, 30_000, 129, 30_000, 28_554, 25_000, 25_000, 20_000)
    case = large_case(device, dtype, lengths, top_k_blocks)
    assert case.tokens * case.heads[2] == 2**20
    assert_selection(case, select(api, case))


@pytest.mark.parametrize("top_k_blocks", [16, 32, 48, 64, 65])
@pytest.mark.parametrize("block_size", [64, 128])
def test_rising_scores_keep_the_last_blocks(api, device, dtype, block_size, top_k_blocks):
    """Every block beats all before it, so each one enters every list."""
    case = large_case(device, dtype, (30_000, 9_000, 700), top_k_blocks, block_size=block_size)
    x = case.inputs
    number = torch.arange(case.tokens, device=device) // block_size
    k = torch.zeros_like(x.k_proxy)
    k[:, 0, 0] = (number % 256).to(dtype)  # two digits, so that 16 bits hold them exactly
    k[:, 0, 1] = (number // 256 * 256).to(dtype)
    case = case.with_inputs(q_proxy=torch.ones_like(x.q_proxy), k_proxy=k)
    last = visible_blocks(case)[:, None] - top_k_blocks
    kept = last + torch.arange(top_k_blocks, device=device)
    assert torch.equal(select(api, case), expected_rows(case, kept))


@pytest.mark.parametrize("top_k_blocks", [16, 32, 48, 64, 65])
@pytest.mark.parametrize("value", [0.0, -0.5])
def test_equal_scores_keep_the_first_blocks(api, device, dtype, value, top_k_blocks):
    case = large_case(device, dtype, (30_000, 9_000, 700), top_k_blocks)
    k = torch.full_like(case.inputs.k_proxy, value)
    case = case.with_inputs(k_proxy=k)
    kept = torch.arange(top_k_blocks, device=device).repeat(case.tokens, 1)
    kept[:, -1] = visible_blocks(case) - 1  # the local block
    assert torch.equal(select(api, case), expected_rows(case, kept))


@pytest.mark.parametrize("top_k_blocks", [16, 32, 64])
def test_ids_do_not_depend_on_how_the_work_is_cut(api, device, dtype, top_k_blocks):
    """A document that cannot fill the GPU, whose keys are cut, and the same one in a full batch."""
    lengths = (40_000, 9_000, 77, 60_000)
    among = large_case(device, dtype, lengths, top_k_blocks)
    rows = slice(40_000, 49_000)
    x = among.inputs
    alone = large_case(device, dtype, (9_000,), top_k_blocks).with_inputs(
        q_proxy=x.q_proxy[rows].clone(), k_proxy=x.k_proxy[rows].clone()
    )
    ids = select(api, alone)
    assert torch.equal(ids, select(api, among)[:, rows])
    assert_selection(alone, ids)
