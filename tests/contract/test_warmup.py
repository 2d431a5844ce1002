"""Dense warm-up: sections 4 to 6 over every visible key (section 7)."""

import pytest
import torch

from .cases import HEADS, UNEVEN, make_case, upstream
from .checks import assert_same, verify
from .run import run


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_warmup_is_right_for_every_head_ratio(api, device, dtype, heads):
    verify(api, make_case(device, dtype, heads=heads, lengths=UNEVEN, padding=3), warmup=True)


@pytest.mark.parametrize("dim, proxy_dim", [(64, 128), (128, 64), (96, 64)])
def test_warmup_is_right_for_every_head_dimension(api, device, main_dtype, dim, proxy_dim):
    case = make_case(device, main_dtype, lengths=(180, 33), dim=dim, proxy_dim=proxy_dim)
    verify(api, case, warmup=True)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_warmup_is_right_in_batched_layouts(api, device, dtype, layout):
    verify(api, make_case(device, dtype, batch=2, lengths=150, layout=layout), warmup=True)


def test_warmup_is_right_for_any_scale(api, device, dtype):
    case = make_case(device, dtype, lengths=(150, 40), softmax_scale=0.4, proxy_scale=0.05)
    verify(api, case, warmup=True)


def test_warmup_result_has_no_selection(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(40,))
    assert api.msa_warmup_attention(*case.arguments(), **case.geometry()).block_indices is None


def test_warmup_equals_torch_dense_causal_attention(api, device, dtype):
    case = make_case(device, dtype, batch=2, lengths=130, layout="bhsd")
    dout, _ = upstream(case)
    outcome = run(api, case, dout=dout, kl=None, warmup=True)
    q, k, v = (t.double().requires_grad_() for t in case.arguments()[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(case.to_caller(dout).double())
    bound = 3 * max(torch.finfo(dtype).eps, 1e-12) if dtype != torch.float32 else 2e-5
    for a, b in (
        (outcome.out, out),
        *zip(list(outcome.gradients.values())[:3], (q.grad, k.grad, v.grad)),
    ):
        b = case.to_packed(b.detach())
        assert (a.double() - b).norm() <= bound * b.norm()


def test_warmup_equals_sparse_attention_over_all_blocks(api, device, dtype):
    case = make_case(device, dtype, lengths=(120, 31, 7), top_k_blocks=8)
    dout, dkl = upstream(case)
    dense = run(api, case, dout=dout, dkl=dkl, warmup=True)
    sparse = run(api, case, dout=dout, dkl=dkl)
    assert_same("out", dense.out, sparse.out)
    assert_same("kl", dense.kl, sparse.kl)
    for name in dense.gradients:
        a, b = dense.gradients[name], sparse.gradients[name]
        assert_same(name, a[: case.real_tokens], b[: case.real_tokens])
