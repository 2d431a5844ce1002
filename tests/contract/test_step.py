"""One MSA layer, forward and backward, against float64: out, lse, kl and the five gradients."""

import pytest
import torch

from .cases import HEADS, UNEVEN, make_case
from .checks import verify


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_step_is_right_for_every_head_ratio(api, device, dtype, heads):
    verify(api, make_case(device, dtype, heads=heads, lengths=UNEVEN, padding=2))


@pytest.mark.parametrize("block_size, top_k_blocks", [(32, 2), (64, 2), (128, 2), (256, 1)])
def test_step_is_right_for_every_block_size(api, device, main_dtype, block_size, top_k_blocks):
    case = make_case(
        device, main_dtype, lengths=(520, 3), block_size=block_size, top_k_blocks=top_k_blocks
    )
    verify(api, case)


@pytest.mark.parametrize(
    "dim, proxy_dim", [(64, 128), (96, 64), (128, 64), (128, 128), (192, 64), (256, 128)]
)
def test_step_is_right_for_every_head_dimension(api, device, main_dtype, dim, proxy_dim):
    verify(api, make_case(device, main_dtype, lengths=(130, 33), dim=dim, proxy_dim=proxy_dim))


@pytest.mark.parametrize(
    "dim, proxy_dim, block_size", [(1, 1, 8), (3, 7, 5), (20, 8, 16), (72, 40, 32)]
)
@pytest.mark.parametrize("odd_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_step_is_right_for_odd_sizes_on_the_cpu(api, odd_dtype, dim, proxy_dim, block_size):
    case = make_case(
        "cpu", odd_dtype, lengths=(45, 0, 7), dim=dim, proxy_dim=proxy_dim, block_size=block_size
    )
    verify(api, case)


@pytest.mark.parametrize("init_blocks, local_blocks", [(1, 1), (0, 3), (2, 1), (0, 0)])
def test_step_is_right_with_forced_blocks(api, device, main_dtype, init_blocks, local_blocks):
    case = make_case(
        device, main_dtype, lengths=(300,), init_blocks=init_blocks, local_blocks=local_blocks
    )
    verify(api, case)


@pytest.mark.parametrize("softmax_scale, proxy_scale", [(0.3, 0.02), (1.0, 0.5), (0.01, 1.0)])
def test_step_is_right_for_any_scale(api, device, dtype, softmax_scale, proxy_scale):
    case = make_case(
        device, dtype, lengths=(200,), softmax_scale=softmax_scale, proxy_scale=proxy_scale
    )
    verify(api, case)


@pytest.mark.parametrize("top_k_blocks", [1, 2, 7, 8, 20])
def test_step_is_right_for_any_top_k(api, device, main_dtype, top_k_blocks):
    verify(api, make_case(device, main_dtype, lengths=(256, 20), top_k_blocks=top_k_blocks))


def test_step_is_right_at_the_defaults(api, device, dtype):
    """block_size 128, top_k_blocks 16, local_blocks 1, init_blocks 0."""
    case = make_case(device, dtype, lengths=(300, 129), block_size=128, top_k_blocks=16)
    given = verify(api, case)
    r = api.msa_attention(*case.arguments(), **case.geometry())
    assert torch.equal(r.block_indices, given.block_indices)
    assert torch.equal(r.out, given.out)


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["16/2/4/1", "64/4/4/1"])
def test_step_is_right_at_published_sizes(api, device, dtype, heads):
    """D 128, B 128, K 16 at 4,096 tokens: half of the blocks of the last tokens are dropped."""
    case = make_case(
        device,
        dtype,
        lengths=(4096,),
        heads=HEADS[heads],
        dim=128,
        proxy_dim=128,
        block_size=128,
        top_k_blocks=16,
    )
    verify(api, case)


def test_deterministic_mode_is_right_too(api, device, dtype):
    verify(api, make_case(device, dtype, lengths=(400, 31), padding=1), deterministic=True)
