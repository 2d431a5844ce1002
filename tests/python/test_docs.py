"""The reference of the C++ API has no gaps, and its check would see one."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def doxygen(folder, include):
    if shutil.which("doxygen") is None:
        pytest.skip("needs doxygen (apt-get install doxygen)")
    settings = (ROOT / "docs" / "Doxyfile").read_text()
    settings += f"\nINPUT = {include}\nOUTPUT_DIRECTORY = {folder}\n"
    return subprocess.run(["doxygen", "-"], input=settings, capture_output=True, text=True)


def test_everything_public_is_documented(tmp_path):
    done = doxygen(tmp_path, ROOT / "include" / "thresher")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "gap",
    [
        "THRESHER_API void forgotten();",
        "struct Forgotten { int member; };",
        "/// One.\nstruct Known { int forgotten; };",
        "/// Adds.\nTHRESHER_API int forgotten(int argument);",
    ],
)
def test_a_gap_is_an_error(tmp_path, gap):
    include = tmp_path / "include"
    shutil.copytree(ROOT / "include" / "thresher", include)
    header = include / "msa.h"
    end = "} // namespace thresher"
    assert end in header.read_text()
    header.write_text(header.read_text().replace(end, f"{gap}\n{end}"))
    done = doxygen(tmp_path, include)
    assert done.returncode != 0
    assert "forgotten" in done.stderr.lower(), done.stderr
