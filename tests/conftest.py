"""Settings of every test run: import paths, threads, and which devices are judged."""

import os
import sys
from pathlib import Path

# Before anything starts OpenMP: small problems on a many-core machine only lose time in barriers.
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, os.cpu_count() or 1)))
# Threads that wait sleep instead of spinning: beside another busy process the thousands of small
# calls of this suite otherwise take four times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Lets cuBLAS (only used by the comparisons) run in deterministic mode.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

TESTS = Path(__file__).resolve().parent
for folder in (TESTS.parent / "python", TESTS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
# Tests that start a Python of their own find the package in the same place.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TESTS.parent / "python"), os.environ.get("PYTHONPATH", "")]
).rstrip(os.pathsep)

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))

# Compiling, first calls and a busy machine make single examples slow: no deadlines.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default=os.environ.get("THRESHER_TEST_DEVICE", "auto"),
        choices=("auto", "cpu", "cuda"),
        help="device of the contract suite; auto: cpu, and cuda where there is a GPU",
    )
    parser.addoption(
        "--implementation",
        default=os.environ.get("THRESHER_TEST_IMPLEMENTATION", "thresher"),
        choices=("thresher", "reference"),
        help="judge the package, or its plain PyTorch definition (thresher.reference)",
    )


def pytest_configure(config):
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: no NVIDIA GPU was found")
