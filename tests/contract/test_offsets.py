"""Offsets beyond 2^31 elements and bytes, in every tensor and every stride (spec section 9).

The tensors lie in address space that is reserved but, except for the rows in use, never touched:
a few megabytes of memory hold a view that spans tens of gigabytes.
"""

import contextlib
import mmap

import pytest
import torch

from .cases import NAMES, make_case, upstream
from .run import call, run

BEYOND = 2**31 + 2**27  # elements
_maps = []  # an mmap lives as long as a view of it may


def sparse_view(shape, strides, dtype, device):
    """Zeros of this shape and these strides, without memory for what lies between the rows."""
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
    if torch.device(device).type == "cuda":
        return torch.zeros(span, dtype=dtype, device=device).as_strided(shape, strides)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    store = mmap.mmap(-1, span * dtype.itemsize, flags=flags)
    _maps.append(store)
    return torch.frombuffer(store, dtype=dtype).as_strided(shape, strides)


@pytest.fixture(autouse=True)
def release_address_space():
    yield
    while _maps:
        with contextlib.suppress(BufferError):  # a tensor still looks at it: it goes with that
            _maps.pop().close()


def far(tensor, axis):
    """A copy whose stride along `axis` makes its last index lie beyond 2^31 elements."""
    shape = tensor.shape
    step = -(-BEYOND // (shape[axis] - 1))
    step += -step % 8  # 16-byte aligned rows are read in place
    strides = [0] * tensor.dim()
    strides[axis] = step
    inner = 1
    for d in reversed([d for d in range(tensor.dim()) if d != axis]):
        strides[d] = inner
        inner *= shape[d]
    view = sparse_view(shape, strides, tensor.dtype, tensor.device)
    view.copy_(tensor)
    assert (shape[axis] - 1) * step > 2**31
    return view


def judge(api, case, name, axis, kwargs):
    dout, dkl = upstream(case)
    truth = run(api, case, dout=dout, dkl=dkl, deterministic=True, **kwargs)
    leaves = case.arguments()
    out_gradient, kl_gradient = case.to_caller(dout), case.to_caller(dkl)
    if name == "dout":
        out_gradient = far(out_gradient, axis)
    elif name == "dkl":
        kl_gradient = far(kl_gradient, axis)
    else:
        i = NAMES.index(name)
        leaves[i] = far(leaves[i], axis)
    leaves = [t.requires_grad_() for t in leaves]
    r = call(api, case, leaves, deterministic=True, **kwargs)
    assert torch.equal(case.to_packed(r.out.detach()), truth.out)
    gradients = torch.autograd.grad([r.out, r.kl], leaves, [out_gradient, kl_gradient])
    for other, gradient in zip(NAMES, gradients):
        assert torch.equal(case.to_packed(gradient), truth.gradients[other]), other


@pytest.mark.parametrize("axis", [0, 1], ids=["token stride", "head stride"])
@pytest.mark.parametrize("name", [*NAMES, "dout", "dkl"])
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_packed_tensors_with_strides_beyond_two_to_31(api, device, main_dtype, name, axis, warmup):
    heads = (4, 2, 2, 2)
    judge(
        api,
        make_case(device, main_dtype, lengths=(40, 23), heads=heads),
        name,
        axis,
        {"warmup": warmup},
    )


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", [*NAMES, "dout"])
def test_batched_tensors_with_a_batch_stride_beyond_two_to_31(
    api, device, main_dtype, name, layout
):
    case = make_case(device, main_dtype, batch=2, lengths=40, layout=layout, heads=(4, 2, 2, 2))
    judge(api, case, name, 0, {})


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["head stride", "token stride", "slot stride"])
def test_block_indices_with_strides_beyond_two_to_31(api, device, main_dtype, axis):
    case = make_case(device, main_dtype, lengths=(150,), heads=(4, 2, 2, 2))
    ids = run(api, case).block_indices
    dense = run(api, case, block_indices=ids)
    given = run(api, case, block_indices=far(ids, axis))
    assert torch.equal(given.out, dense.out)


def test_kl_buffer_with_a_stride_beyond_two_to_31(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(60, 4), heads=(4, 2, 2, 2))
    dout, dkl = upstream(case)
    rows = far(torch.zeros(64, 2, device=device), 0)
    try:
        run(api, case, dout=dout, dkl=dkl, kl="backward", kl_buffer=rows)
    except ValueError as error:
        assert "kl_buffer" in str(error)
        return
    truth = run(api, case)
    torch.testing.assert_close(rows, truth.kl, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_tensor_with_more_than_two_to_31_real_elements(api, device, main_dtype):
    """q alone has 2^31 + elements on a GPU; the CPU does it with rows that share memory."""
    tokens, heads, dim = 65_537, 16, 2048 if device == "cpu" else 64
    if device == "cpu":
        pytest.skip(
            "needs 8 GiB of real memory for each of q, out and dq; the views above stand in"
        )
    tokens = 2**31 // (heads * dim) + 1000
    lengths = (500,) * (tokens // 500)
    case = make_case(
        device, main_dtype, lengths=lengths, heads=(heads, 1, 1, 1), dim=dim, block_size=64,
        top_k_blocks=2,
    )  # fmt: skip
    dout, dkl = upstream(case, tokens=torch.tensor([0, case.tokens - 1]))
    outcome = run(api, case, dout=dout, dkl=dkl)
    assert (outcome.gradients["q"][-1] != 0).any() and outcome.out[-1].isfinite().all()


@pytest.mark.parametrize("shape", [(2**31,), (2**33,), (2**16, 2**15)], ids=str)
def test_token_counts_beyond_the_limit_are_refused_before_anything_is_allocated(
    api, shape, thresher_only
):
    """Stride-0 rows of one number: no memory for the inputs, and none could hold the results."""

    def rows(heads):
        return torch.zeros(1, dtype=torch.float32).expand(*shape, heads, 1)

    q, k, v, q_proxy, k_proxy = (rows(heads) for heads in (2, 1, 1, 1, 1))
    ids = torch.zeros(1, dtype=torch.int32).expand(*shape[:-1], 1, shape[-1], 1)
    options = dict(block_size=1024, top_k_blocks=1)
    for refused, name in (
        (lambda: api.msa_attention(q, k, v, q_proxy, k_proxy, **options), "q"),
        (lambda: api.msa_warmup_attention(q, k, v, q_proxy, k_proxy), "q"),
        (lambda: api.select_blocks(q_proxy, k_proxy, **options), "q_proxy"),
        (lambda: api.sparse_attention(q, k, v, ids, block_size=1024), "q"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: .*tokens.*{2**31 - 1}"):
            refused()
