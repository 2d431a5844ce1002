"""Devices and dtypes of the suite, and memory that is never innocently zero.

`device` alone, or `device` with `dtype`, are parametrised here. `main_dtype` is the one dtype in
which a promise that does not depend on the dtype is checked. A test marked `gpu` exists for CUDA
only and is skipped, with the reason, on a machine without a GPU.
"""

import pytest
import torch

from .tolerances import DTYPES, MAIN_DTYPE

SHORT = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def devices(config) -> list[str]:
    chosen = config.getoption("--device")
    if chosen != "auto":
        return [chosen]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_generate_tests(metafunc):
    if "device" not in metafunc.fixturenames:
        return
    only_gpu = metafunc.definition.get_closest_marker("gpu") is not None
    names = ["cuda"] if only_gpu else devices(metafunc.config)
    if "dtype" in metafunc.fixturenames:
        pairs = [(name, dtype) for name in names for dtype in DTYPES[name]]
        ids = [f"{name}-{SHORT[dtype]}" for name, dtype in pairs]
        metafunc.parametrize("device,dtype", pairs, ids=ids)
    else:
        metafunc.parametrize("device", names)


def pytest_collection_modifyitems(config, items):
    found = devices(config)
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="only a GPU can show this fault; none here"))
        elif "cuda" not in found:
            item.add_marker(pytest.mark.skip(reason="only a GPU can show this fault: --device cpu"))


@pytest.fixture
def main_dtype(device):
    return MAIN_DTYPE[device]


@pytest.fixture(scope="session")
def api(request):
    """The functions under test: the package, or with --implementation its definition."""
    import thresher

    if request.config.getoption("--implementation") == "reference":
        import thresher.reference

        return thresher.reference
    return thresher


@pytest.fixture(scope="session")
def thresher_only(request):
    """For promises that the plain definition does not make."""
    if request.config.getoption("--implementation") == "reference":
        pytest.skip("a promise of the package, not of thresher.reference")


@pytest.fixture(scope="package", autouse=True)
def poisoned_memory():
    """torch.empty returns NaN (ids: the largest integer): what a kernel forgets to write is seen.

    PyTorch fills fresh memory in deterministic mode. The calls in run.py say `deterministic`
    themselves, so the mode that this sets is not what they run in.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
