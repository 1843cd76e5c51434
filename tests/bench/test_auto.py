"""bench.training.auto runs, and its ratios follow from its rounds."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from bench.training import auto as bench

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_all_lines_run_and_the_ratios_follow_from_their_rounds(tmp_path):
    file = tmp_path / "auto.json"
    script = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "bench.training.auto",
    ]
    options = ["--json", str(file), "--shapes", "tiny", "--dtypes", "fp32", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, *script, *options, "--peers", bench.THEIRS],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]
    assert [result["kind"] for result in results] == list(bench.KINDS)
    for result in results:
        rounds = result["rounds"]
        assert result["activations"].startswith("norms and residuals on a rank's rows")
        assert all(name in done.stdout for name in rounds)
        for name, of_auto in result["of_auto"].items():
            auto = rounds[bench.BARE_AUTO if name == bench.BARE_OURS else bench.AUTO]
            ratios = [a / b for a, b in zip(rounds[name], auto, strict=True)]
            assert of_auto["median"] == pytest.approx(statistics.median(ratios))
        for name, alone in bench.LIMITS.items():
            shares = [a / b / 2 for a, b in zip(rounds[alone], rounds[name], strict=True)]
            assert result["of_limit"][name]["median"] == pytest.approx(statistics.median(shares))
