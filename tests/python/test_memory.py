"""Memory that cannot be had is an error that says so, and the process goes on."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch, thresher

g = torch.Generator().manual_seed(0)
q = torch.randn(16_384, 8, 64, generator=g)
k, v = (torch.randn(16_384, 2, 64, generator=g) for _ in range(2))
ids = torch.zeros(2, 16_384, 16, dtype=torch.int32)
ids[:, :, 1:] = -1

def attend(tokens):
    parts = (t[:tokens] for t in (q, k, v))
    return thresher.sparse_attention(*parts, ids[:, :tokens], block_size=64)

truth = attend(256)  # threads and everything that is loaded lazily
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
for room in (8 << 20, 80 << 20):  # not enough for out (32 MiB), for out but not for the workspace
    resource.setrlimit(resource.RLIMIT_AS, (used + room, hard))
    try:
        attend(16_384)
    except (RuntimeError, MemoryError) as error:
        print(type(error).__name__, str(error).splitlines()[0])
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    assert torch.equal(attend(256), truth)
assert attend(16_384).isfinite().all()
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_allocations_that_fail_are_clear_errors_and_leave_the_process_usable():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results, workspace, end = done.stdout.splitlines()
    assert "allocate" in results and end == "done", done.stdout
    assert workspace.startswith("MemoryError workspace: "), workspace
    assert int(workspace.split()[2]) > 50 << 20, "the size is not said"
