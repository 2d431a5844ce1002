"""Random problems: hypothesis draws shapes, the float64 reference judges everything.

random_problems.py draws more kinds of problems from numbers; `make nightly` takes 100,000 of them.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from .cases import make_case
from .checks import verify
from .random_problems import judge, problem

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@st.composite
def problems(draw, gpu=False):
    """Any legal combination of heads, sizes, lengths, forced blocks, layout."""
    multiple = st.integers(1, 3)
    proxy_kv = draw(st.integers(1, 2))
    proxy = proxy_kv * draw(multiple)
    heads = proxy * draw(multiple)
    kv = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    block_size = draw(st.sampled_from([32, 64]) if gpu else st.sampled_from([1, 3, 8, 16, 33]))
    top_k = draw(st.integers(1, 5))
    init = draw(st.integers(0, top_k))
    local = draw(st.integers(0, top_k - init))
    size = st.sampled_from([64, 128]) if gpu else st.integers(1, 24)
    options = dict(
        heads=(heads, kv, proxy, proxy_kv),
        dim=draw(size),
        proxy_dim=draw(size),
        block_size=block_size,
        top_k_blocks=top_k,
        init_blocks=init,
        local_blocks=local,
        seed=draw(st.integers(0, 2**16)),
    )
    if draw(st.booleans()):
        options["softmax_scale"] = draw(st.floats(0.01, 2.0))
        options["proxy_scale"] = draw(st.floats(0.01, 2.0))
    if draw(st.integers(0, 3)) == 0:
        options["batch"] = draw(st.integers(1, 3))
        options["lengths"] = draw(st.integers(1, 90))
        options["layout"] = draw(st.sampled_from(["bshd", "bhsd", None]))
    else:
        options["lengths"] = tuple(draw(st.lists(st.integers(0, 90), max_size=6)))
        options["padding"] = draw(st.integers(0, 4))
    return options


DTYPE = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@settings(max_examples=60, suppress_health_check=RELAXED)
@given(options=problems(), dtype_drawn=DTYPE, warmup=st.booleans())
def test_random_problem_is_right_on_the_cpu(api, options, dtype_drawn, warmup):
    verify(api, make_case("cpu", dtype_drawn, **options), warmup=warmup)


@pytest.mark.slow
@settings(max_examples=1500, suppress_health_check=RELAXED)
@given(options=problems(), dtype_drawn=DTYPE, warmup=st.booleans())
def test_many_random_problems_are_right_on_the_cpu(api, options, dtype_drawn, warmup):
    verify(api, make_case("cpu", dtype_drawn, **options), warmup=warmup)


# 5605: a small KL, whose rows were all off to one side (the rounding of their normalisers).
@pytest.mark.parametrize("number", [*range(40), 5605])
def test_numbered_problem_is_right_on_the_cpu(api, number, thresher_only):
    judge(api, number, "cpu")


def test_numbered_problem_is_a_function_of_its_number():
    for number in range(50):
        (kind, a, _), (again, b, _) = problem(number, "cpu"), problem(number, "cpu")
        assert kind == again and a.options == b.options and a.problem == b.problem
        for x, y in zip(a.inputs, b.inputs):
            assert torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.gpu
def test_numbered_problems_are_right_on_the_gpu(api, device, thresher_only):
    for number in range(40):
        judge(api, number, device)


@pytest.mark.gpu
@settings(max_examples=150, suppress_health_check=RELAXED)
@given(
    options=problems(gpu=True),
    dtype_drawn=st.sampled_from([torch.bfloat16, torch.float16]),
    warmup=st.booleans(),
)
def test_random_problem_is_right_on_the_gpu(api, device, options, dtype_drawn, warmup):
    verify(api, make_case(device, dtype_drawn, **options), warmup=warmup)
