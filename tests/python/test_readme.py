"""What the README prints must run as it is printed, and what it points at must be there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_there_is_a_snippet():
    assert SNIPPETS


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs_as_printed(number, tmp_path):
    """In a fresh Python and an empty folder."""
    done = subprocess.run(
        [sys.executable, "-c", SNIPPETS[number]], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a reader would see warnings"


def test_first_snippet_prints_shapes_and_a_loss(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SNIPPETS[0]], cwd=tmp_path, capture_output=True, text=True
    )
    assert "torch.Size([1024, 8, 64]) torch.Size([2, 1024, 4])" in done.stdout
    assert float(done.stdout.split()[-1]) > 0


def test_commands_of_the_readme_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    commands = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(re.findall(r"`[^`]+`", README))))
    commands |= set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= commands <= targets


def test_files_that_the_readme_links_to_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [x for x in links if "://" not in x and not (ROOT / x).exists()]
    assert not missing


def test_names_that_the_readme_uses_exist():
    import thresher

    for path in set(re.findall(r"thresher((?:\.[A-Za-z_]\w*)+)", README)):
        found = thresher
        for name in path.strip(".").split("."):
            if not hasattr(found, name):
                pytest.fail(f"thresher{path}")
            found = getattr(found, name)
