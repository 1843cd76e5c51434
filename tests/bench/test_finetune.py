"""bench/training/finetune runs, and its figures follow their definitions."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


@pytest.mark.second_tier
def test_two_ranks_report_figures_that_follow_their_definitions(tmp_path):
    """Without TRL, which is not among the packages of tests."""
    file = tmp_path / "finetune.json"
    options = ["--shapes", "tiny", "--rounds", "3", "--seconds", "0", "--json", str(file)]
    options += ["--contenders", "pyruntime, ZeRO 1", "pyruntime, ZeRO 3"]
    done = subprocess.run(
        [sys.executable, *LAUNCH, "bench.training.finetune", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text())["results"]
    assert {line["name"] for line in result["lines"]} == {
        f"pyruntime, ZeRO {zero}, {mode}" for zero in (1, 3) for mode in ("full", "lora")
    }
    for line in result["lines"]:
        assert line["name"] in done.stdout
        assert line["step_s"] == pytest.approx(statistics.median(line["rounds"]))
        assert line["targets_per_second"] == pytest.approx(result["targets_per_step"] / line["step_s"])
        assert line["memory_bytes"] > 1e6
    assert max(result["losses"].values()) - min(result["losses"].values()) < 0.02
