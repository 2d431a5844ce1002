"""torch.library and torch.compile: api.md section 2, cases.md row 22."""

import pytest
import torch
import torch._dynamo
from torch.utils._python_dispatch import TorchDispatchMode

from .cases import NAMES, make_case, upstream
from .checks import assert_same
from .run import call, run

pytestmark = pytest.mark.usefixtures("thresher_only")


class Recorder(TorchDispatchMode):
    """Keeps the first call of every thresher operator and combination of given arguments."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(func).startswith("thresher."):
            given = tuple(a is not None for a in (*args, *kwargs.values()))
            self.calls.setdefault((str(func), given), (func, args, kwargs))
        return func(*args, **kwargs)


def recorded(api, device, dtype):
    """Every operator call of every mode of the public functions."""
    case = make_case(device, dtype, lengths=(40, 0, 25), heads=(4, 2, 2, 1), padding=2)
    for tensor in case.inputs:  # opcheck compares values, so no NaN
        tensor.nan_to_num_(0.0)
    dout, dkl = upstream(case)
    dout, dkl = dout.nan_to_num(0.0), dkl.nan_to_num(0.0)
    rows = torch.empty(67, 2, device=device)
    with Recorder() as recorder:
        for warmup in (False, True):
            run(api, case, dout=dout, dkl=dkl, warmup=warmup)
            run(api, case, dout=dout, warmup=warmup, kl=None)
            run(api, case, dout=dout, dkl=dkl, warmup=warmup, kl="backward", kl_buffer=rows)
        ids = run(api, case).block_indices
        run(api, case, dout=dout, block_indices=ids, check_indices=True)
        x = case.inputs
        api.select_blocks(x.q_proxy, x.k_proxy, block_size=32, top_k_blocks=3, **case.geometry())
        api.sparse_attention(x.q, x.k, x.v, ids, block_size=32, **case.geometry())
    return recorder.calls


def all_operators():
    names = torch._C._dispatch_get_all_op_names()
    return sorted({n.split(".")[0] for n in names if n.startswith("thresher::")})


def test_every_operator_passes_opcheck(api, device, main_dtype):
    calls = recorded(api, device, main_dtype)
    seen = set()
    for (name, _given), (func, args, kwargs) in calls.items():
        seen.add(name.split(".")[1])
        names = [a.name for a in func._schema.arguments]
        for grad in (False, True):

            def fresh(value, argument, grad=grad):
                if not isinstance(value, torch.Tensor):
                    return value
                value = value.detach().clone()
                wants = grad and argument in NAMES and "backward" not in name  # noqa: B023
                return value.requires_grad_(wants)

            fresh_args = tuple(fresh(a, n) for a, n in zip(args, names))
            fresh_kwargs = {n: fresh(a, n) for n, a in kwargs.items()}
            torch.library.opcheck(func, fresh_args, fresh_kwargs)
    missing = {n.removeprefix("thresher::") for n in all_operators()} - seen
    assert not missing, f"operators that this test never calls: {missing}"


# --- torch.compile ----------------------------------------------------------------------------
class Counter:
    """A backend that counts its graphs; they run through AOTAutograd without code generation."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer(api, warmup, **options):
    """Projected attention with both losses: the shape of a user's compiled step."""

    def step(q, k, v, q_proxy, k_proxy, cu_seqlens, dout):
        function = api.msa_warmup_attention if warmup else api.msa_attention
        r = function(q * 1.0, k, v, q_proxy, k_proxy, cu_seqlens=cu_seqlens, **options)
        return (r.out * dout).sum(dtype=torch.float32) + r.kl_loss

    return step


def gradients_of(step, case, dout):
    leaves = [t.requires_grad_() for t in case.arguments()]
    loss = step(*leaves, case.cu_seqlens, dout)
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_fullgraph_with_dynamic_lengths_compiles_once(api, device, main_dtype, warmup):
    """T and the number of documents change from batch to batch; nothing is compiled again."""
    options = {} if warmup else dict(block_size=32, top_k_blocks=3)
    step = layer(api, warmup, **options)
    counter = Counter()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for seed, lengths in enumerate([(60, 40), (31, 0, 90), (128,), (7, 7, 7, 50), (200, 3)]):
        case = make_case(device, main_dtype, lengths=lengths, seed=seed, heads=(4, 2, 2, 1))
        dout, _ = upstream(case)
        loss, gradients = gradients_of(compiled, case, dout)
        truth, expected = gradients_of(step, case, dout)
        assert_same("loss", loss, truth)
        for name, a, b in zip(NAMES, gradients, expected):
            assert_same(name, a, b)
        graphs.append(counter.graphs)
    assert graphs[-1] == graphs[1], f"compiled again for another batch: {graphs}"


def test_same_shapes_with_other_cu_seqlens_compile_once(api, device, main_dtype):
    """Static shapes: the values of cu_seqlens are data, not a guard."""
    step = layer(api, False, block_size=32, top_k_blocks=3)
    counter = Counter()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=counter)
    for lengths in ((50, 50), (99, 1), (0, 100), (33, 67)):
        case = make_case(device, main_dtype, lengths=lengths, heads=(4, 2, 2, 1))
        dout, _ = upstream(case)
        loss, _ = gradients_of(compiled, case, dout)
        assert_same("loss", loss, gradients_of(step, case, dout)[0])
    assert counter.graphs == 1


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_batched_layouts_compile(api, device, main_dtype, layout):
    case = make_case(device, main_dtype, batch=2, lengths=50, layout=layout)

    def step(*x):
        r = call(api, case, x)
        return r.out, r.kl

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*case.arguments()), step(*case.arguments())):
        assert_same("result", a, b)


@pytest.mark.parametrize("kl", ["backward", None])
def test_other_kl_modes_compile(api, device, main_dtype, kl):
    case = make_case(device, main_dtype, lengths=(80,))
    dout, dkl = upstream(case)

    def step(rows, *x):
        extra = {"kl_buffer": rows} if kl == "backward" else {}
        r = call(api, case, x, kl=kl, **extra)
        loss = (r.out * dout).sum()
        return loss if kl is None else loss + (r.kl * dkl).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for f in (compiled, step):
        leaves = [t.requires_grad_() for t in case.arguments()]
        rows = torch.zeros(80, 4, device=device)
        f(rows, *leaves).backward()
        results.append([rows, *[leaf.grad for leaf in leaves if leaf.grad is not None]])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results):
        assert_same("gradient", a, b)
    if kl == "backward":
        assert (results[0][0] != 0).any(), "the buffer was not filled"


def test_decomposed_functions_compile(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(80, 20))

    def step(q, k, v, q_proxy, k_proxy):
        ids = api.select_blocks(q_proxy, k_proxy, block_size=32, top_k_blocks=3, **case.geometry())
        return api.sparse_attention(q, k, v, ids, block_size=32, **case.geometry())

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same("out", compiled(*case.arguments()), step(*case.arguments()))


def test_compiled_with_grad_disabled(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(80, 20))

    def step(*x):
        return call(api, case, x).out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same("out", compiled(*case.arguments()), step(*case.arguments()))


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_inductor_compiles_forward_and_backward(api, device, main_dtype, warmup):
    """The default backend, code generation included."""
    options = {} if warmup else dict(block_size=32, top_k_blocks=3)
    step = layer(api, warmup, **options)
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for lengths in ((60, 40), (31, 0, 90)):
        case = make_case(device, main_dtype, lengths=lengths, heads=(4, 2, 2, 1))
        dout, _ = upstream(case)
        loss, gradients = gradients_of(compiled, case, dout)
        truth, expected = gradients_of(step, case, dout)
        assert (loss - truth).abs() <= 1e-5 * truth.abs() + 1e-5
        for name, a, b in zip(NAMES, gradients, expected):
            assert_same(name, a, b)


def test_fake_tensors_flow_through(api, device, main_dtype):
    """Shape propagation without data, as torch.export and memory planners do it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = make_case(device, main_dtype, lengths=(30, 20))
    with FakeTensorMode() as mode:
        x = [mode.from_tensor(t) for t in case.inputs]
        cu = mode.from_tensor(case.cu_seqlens)
        r = api.msa_attention(*x, cu_seqlens=cu, block_size=32, top_k_blocks=3)
    truth = run(api, case)
    for name in ("out", "lse", "kl", "block_indices"):
        fake, real = getattr(r, name), getattr(truth.raw, name)
        assert fake.shape == real.shape and fake.dtype == real.dtype, name
        assert fake.stride() == real.stride() and fake.device == real.device, name
