"""Real packed batches of 196,608 tokens: document lengths of a production trainer.

data/packed_192k.json holds the boundaries (published with MiniMax-AI/MSA, MIT; lengths only).
Selection, forward and backward run over all tokens; randomly chosen tokens are judged: their
selection, their values, and the whole gradients of every tensor for an upstream gradient that is
not zero in their rows only.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch

from .cases import HEADS, make_case
from .checks import assert_sampled

PACKINGS = json.loads((Path(__file__).parent / "data" / "packed_192k.json").read_text())["cases"]


def packing(device, dtype, name, *, heads, dim, shrink=1, **options):
    """shrink: divide every length, so that the shape of the batch stays."""
    ends = PACKINGS[name]
    lengths = tuple(max(1, (b - a) // shrink) for a, b in itertools.pairwise(ends))
    return make_case(
        device, dtype, lengths=lengths, heads=heads, dim=dim, proxy_dim=dim, padding=5, **options
    )


def test_the_file_holds_nine_batches_of_196608_tokens():
    assert len(PACKINGS) == 9
    for name, ends in PACKINGS.items():
        assert ends[0] == 0 and ends[-1] == 196_608 and ends == sorted(ends), name


@pytest.mark.parametrize("name", PACKINGS)
def test_real_packing_shrunk_32_times_is_right(api, device, main_dtype, name):
    """6,144 tokens with the same proportions."""
    case = packing(
        device, main_dtype, name, heads=(4, 2, 2, 1), dim=64, shrink=32, block_size=32,
        top_k_blocks=4,
    )  # fmt: skip
    assert_sampled(api, case, count=48)


@pytest.mark.parametrize("name", ["many_short_min_2", "forty_five_even"])
def test_real_packing_at_full_length_is_right(api, device, main_dtype, name):
    """Two of the nine, those whose proxy scores are the fewest."""
    heads = HEADS["64/4/4/1"] if device == "cuda" else (2, 1, 1, 1)
    dim = 128 if device == "cuda" else 64
    case = packing(
        device, main_dtype, name, heads=heads, dim=dim, block_size=128,
        top_k_blocks=16 if device == "cuda" else 2,
    )  # fmt: skip
    assert_sampled(api, case, count=12)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKINGS)
def test_every_real_packing_at_full_length_is_right(api, device, dtype, name):
    if dtype == torch.float64:
        pytest.skip("fp64 has no production run; fp32, bf16 and fp16 cover the sizes")
    heads = HEADS["64/4/4/1"] if device == "cuda" else (2, 1, 1, 1)
    dim = 128 if device == "cuda" else 64
    case = packing(
        device, dtype, name, heads=heads, dim=dim, block_size=128,
        top_k_blocks=16 if device == "cuda" else 4,
    )  # fmt: skip
    assert_sampled(api, case, count=16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["many_short_min_2", "forty_five_even"])
def test_warmup_of_a_real_packing_is_right(api, device, main_dtype, name):
    case = packing(
        device, main_dtype, name, heads=(4, 2, 2, 1), dim=64, shrink=1 if device == "cuda" else 8
    )
    assert_sampled(api, case, count=16, warmup=True)
