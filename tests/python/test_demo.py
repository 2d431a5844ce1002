"""examples/train_lm.py (what `make demo` runs) with a few tiny steps: report, resume, stop."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_lm.py"
SIZES = {
    "layers": 1, "width": 16, "heads": 2, "kv-heads": 1, "proxy-heads": 1, "head-dim": 8,
    "block-size": 16, "top-k-blocks": 2, "context": 128, "row": 256, "held-out": 2,
    "evaluations": 2,
}  # fmt: skip
# One thread: a model this small only waits in barriers with more.
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
PLOTS = ("loss", "kl", "recall", "choices", "times")


def arguments(out, data, steps, *more):
    sizes = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
    return [
        sys.executable, str(SCRIPT), "--device", "cpu", "--quiet", "--out", str(out),
        "--data", str(data), "--steps", str(steps), *sizes, *more,
    ]  # fmt: skip


def train(*args):
    return subprocess.run(arguments(*args), capture_output=True, text=True, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A handful of source files of this repository, some of which are held out by name."""
    folder = tmp_path_factory.mktemp("sources")
    files = sorted((ROOT / "python" / "thresher").glob("*.py"))
    for i in range(40):
        (folder / f"file_{i}.py").write_bytes(files[i % len(files)].read_bytes()[:2000])
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    out = tmp_path_factory.mktemp("report")
    done = train(out, data, 6)
    assert done.returncode == 0, done.stderr
    return out, done


def history(out):
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    return {name: run["history"] for name, run in state["runs"].items()}


def test_report_is_one_page_with_its_plots_and_its_data(finished):
    out, _ = finished
    page = (out / "index.html").read_text()
    for name in PLOTS:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    assert page.count("data:image/png;base64,") == len(PLOTS), "the page holds its plots"
    assert 'src="http' not in page and 'href="http' not in page, "nothing is loaded from outside"
    report = json.loads((out / "report.json").read_text())
    assert set(report["runs"]) == {"msa", "dense"}
    assert report["runs"]["msa"]["step"] == [1, 2, 3, 4, 5, 6]


def test_summary_is_printed_and_there_is_no_progress_bar_when_quiet(finished):
    _, done = finished
    for text in ("held-out loss, MSA", "held-out loss, dense", "recall", "tokens/s", "report:"):
        assert text in done.stdout, text
    assert "tokens/s  warmup" not in done.stdout
    assert not done.stderr


def test_both_runs_start_alike_and_msa_warms_up_before_it_is_sparse(finished):
    runs = history(finished[0])
    msa, dense = runs["msa"], runs["dense"]
    assert msa["loss"][0] == pytest.approx(dense["loss"][0], rel=1e-5)
    assert all(x == x and x < 7 for run in (msa, dense) for x in run["loss"])
    assert set(msa["seconds"]) == {"warmup", "sparse"} and set(dense["seconds"]) == {"dense"}
    assert all(len(k) == 1 and k[0] >= 0 for k in msa["kl"]) and not any(dense["kl"])
    for recall in msa["recall"]:
        best, selected = recall["best"][0], recall["selected"][0]
        assert 0 <= selected <= best + 1e-6 and best <= 1 + 1e-6


def test_a_run_that_is_stopped_and_resumed_ends_like_one_that_was_not(tmp_path, data):
    """Ctrl-C saves and reports; --resume goes on. Then the same losses as without the stop."""
    steps = 400
    process = subprocess.Popen(
        arguments(tmp_path, data, steps), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT,
    )  # fmt: skip
    while not process.stdout.readline().startswith("training"):
        assert process.poll() is None, process.stderr.read()
    time.sleep(0.5)  # some steps; all of them take seconds
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "--resume" in stdout
    before = {name: run["loss"] for name, run in history(tmp_path).items()}
    assert sum(map(len, before.values())) < 2 * steps
    if before["msa"]:
        assert (tmp_path / "index.html").exists(), "there is a report of what there is"

    done = train(tmp_path, data, steps, "--resume")
    assert done.returncode == 0, done.stderr
    resumed = {name: run["loss"] for name, run in history(tmp_path).items()}
    for name, losses in resumed.items():
        assert len(losses) == steps and losses[: len(before[name])] == before[name]
    whole = tmp_path / "whole"
    assert train(whole, data, steps, "--no-dense").returncode == 0
    assert history(whole)["msa"]["loss"] == resumed["msa"]
    assert resumed["msa"][-1] < resumed["msa"][0] - 1, "it learns"


def test_resume_refuses_another_configuration_and_a_missing_checkpoint(finished, tmp_path, data):
    done = train(tmp_path, data, 6, "--resume")
    assert done.returncode == 2 and "checkpoint.pt" in done.stderr
    done = train(finished[0], data, 7, "--resume")
    assert done.returncode != 0 and "another configuration" in done.stderr


def test_wrong_arguments_are_refused_with_a_text(tmp_path, data):
    assert "--steps" in train(tmp_path, data, 0).stderr
    done = train(tmp_path, tmp_path, 1)
    assert done.returncode != 0 and "held-out" in done.stderr
