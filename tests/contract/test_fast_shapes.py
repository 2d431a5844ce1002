"""The shapes that the fastest GPU kernels take: D = B = 128 and 4, 8 or 16 main heads on one proxy
head and kv head. The same contract judges them; other tests use smaller shapes."""

import pytest
import torch

from .cases import NAMES, make_case, upstream
from .checks import errors, verify
from .run import run

pytestmark = pytest.mark.gpu

FAST = {
    "4 heads": (16, 2, 4, 1),
    "8 heads": (32, 4, 4, 2),
    "16 heads": (64, 4, 4, 1),
    "Hp < Hkv": (16, 4, 2, 1),
}
LENGTHS = (0, 1, 2, 127, 128, 129, 0, 0, 700, 333, 0)


def fast_case(device, dtype, heads=FAST["4 heads"], lengths=LENGTHS, **options):
    sizes = {"dim": 128, "proxy_dim": 128, "block_size": 128, "top_k_blocks": 3, **options}
    return make_case(device, dtype, heads=heads, lengths=lengths, **sizes)


@pytest.mark.parametrize("heads", FAST.values(), ids=FAST.keys())
def test_step_is_right(api, device, dtype, heads):
    verify(api, fast_case(device, dtype, heads, padding=5))


@pytest.mark.parametrize("heads", FAST.values(), ids=FAST.keys())
def test_step_is_right_with_small_proxy_heads(api, device, main_dtype, heads):
    verify(api, fast_case(device, main_dtype, heads, proxy_dim=64))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_batched_step_is_right(api, device, main_dtype, layout):
    verify(api, fast_case(device, main_dtype, batch=3, lengths=450, layout=layout))


def test_more_places_than_blocks_equal_dense_attention(api, device, main_dtype):
    verify(api, fast_case(device, main_dtype, top_k_blocks=24, lengths=(900, 130)))


@pytest.mark.parametrize("heads", ["4 heads", "16 heads"])
def test_perfect_proxy_has_kl_zero(api, device, dtype, heads):
    """Every main head is its proxy head: student equals teacher, and no rounding comes through."""
    case = fast_case(device, dtype, FAST[heads])
    x = case.inputs
    group, kv_heads = x.q.shape[1] // x.q_proxy.shape[1], x.k.shape[1]
    case = case.with_inputs(
        q=x.q_proxy.repeat_interleave(group, 1), k=x.k_proxy.repeat(1, kv_heads, 1)
    )
    assert run(api, case).kl.abs().max() <= 2e-5


@pytest.mark.parametrize("heads", FAST.values(), ids=FAST.keys())
def test_exact_kl_rows_are_the_same_bits_again(api, device, main_dtype, heads):
    case = fast_case(device, main_dtype, heads, padding=5)
    first = run(api, case)
    again = run(api, case, block_indices=first.block_indices)
    assert torch.equal(first.kl, again.kl)


def test_negative_scales(api, device, main_dtype):
    verify(api, fast_case(device, main_dtype, softmax_scale=-0.05, proxy_scale=-0.1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [*NAMES, "dout"])
def test_a_bad_number_stays_in_the_rows_that_read_it(api, device, main_dtype, name, value):
    """Token 300 of 500, in the middle of a block: earlier tokens of the block do not see it."""
    case = fast_case(device, main_dtype, lengths=(500, 130))
    token, block = 300, 2
    dout, dkl = upstream(case)
    ids = run(api, case).block_indices
    clean = run(api, case, dout=dout, dkl=dkl, block_indices=ids)
    if name == "dout":
        dout = dout.clone()
        dout[token] = value
    else:
        bad_tensor = getattr(case.inputs, name).clone()
        bad_tensor[token] = value
        case = case.with_inputs(**{name: bad_tensor})
    bad = run(api, case, dout=dout, dkl=dkl, block_indices=ids)

    t = torch.arange(case.tokens, device=device)
    if name in ("q", "q_proxy", "dout"):
        reads = (t == token)[:, None].expand(-1, case.heads[2])
    else:
        reads = ((t >= token) & (t < 500) & (ids == block).any(2)).T
    main = reads.repeat_interleave(case.heads[0] // case.heads[2], 1)

    def same(what, a, b):
        assert a.isfinite().all(), f"{what} is not finite"
        norm, _ = errors(a, b.double())
        assert norm < 8 * torch.finfo(main_dtype).eps, f"{what}: {norm}"

    same("out", bad.out[~main], clean.out[~main])
    same("dq", bad.gradients["q"][~main], clean.gradients["q"][~main])
    same("kl", bad.kl[~reads], clean.kl[~reads])
    same("dq_proxy", bad.gradients["q_proxy"][~reads], clean.gradients["q_proxy"][~reads])
    for other in ("k", "v", "k_proxy"):
        # Keys after the token are not seen by it; other readers of a bad key do see earlier ones.
        after = t >= 500 if name in ("k", "v", "k_proxy") else t > token
        same(f"d{other}", bad.gradients[other][after], clean.gradients[other][after])
    if name != "dout":
        assert not (bad.out.isfinite().all() and bad.kl.isfinite().all()), "it must be seen"
