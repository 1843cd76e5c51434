"""bench/clock_torch: PyTorch's own parallelism in virtual time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

FLAGS = ["--config", "tiny", "--train.batch_size", "4", "--train.micro_batch_size", "2"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.clock_torch", *FLAGS, *flags]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.usefixtures("simulated")
@pytest.mark.second_tier
def test_weights_that_are_freed_are_gathered_again(tmp_path):
    kept = tmp_path / "kept.json"
    mesh = "--gpus", "4", "--parallel.tp", "2", "--parallel.dp", "2", "--json", str(kept)
    for zero in ("1", "3"):
        done = run(*mesh, "--parallel.zero", zero)
        assert done.returncode == 0, done.stderr
    keeps, frees = json.loads(kept.read_text())["results"]
    assert set(keeps["waits_s"]) == set(frees["waits_s"]) == {"tp", "dp"}
    assert frees["step_s"] > keeps["step_s"]
    assert frees["waits_s"]["tp"] == pytest.approx(keeps["waits_s"]["tp"])


def test_axes_that_it_does_not_cut_are_refused():
    done = run("--gpus", "2", "--parallel.pp", "2")
    assert done.returncode == 2
    assert "only dp and tp are cut here" in done.stderr
