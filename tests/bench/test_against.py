"""One tree against another: here against itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.against", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.second_tier
def test_both_trees_train_in_turns(tmp_path):
    cases = ["tp-dim256", "import"]
    done = run(str(ROOT), "--rounds", "2", "--json", str(tmp_path / "found.json"), "--cases", *cases)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [each["case"] for each in found] == cases
    for each in found:
        assert len(each["this_s"]) == len(each["other_s"]) == 2 and min(each["this_s"]) > 0
        assert each["case"] in done.stdout


@pytest.mark.second_tier
def test_a_folder_that_is_not_built_is_refused(tmp_path):
    done = run(str(tmp_path))
    assert done.returncode == 2 and "is not a built checkout" in done.stderr
