"""bench/compare.py measures, and the README shows what it found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import compare

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_the_readme_is_that_of_the_last_run():
    runs = json.loads((ROOT / compare.RESULT).read_text())
    assert runs and runs.keys() <= compare.TASKS.keys()
    begin, end = compare.MARKS
    shown = (ROOT / "README.md").read_text().split(begin)[1].split(end)[0].strip()
    assert shown == compare.table(runs)


@pytest.mark.alone
def test_one_command_measures_everybody_in_turns_and_shows_them(tmp_path):
    wrote, readme = tmp_path / "compare.json", tmp_path / "README.md"
    readme.write_text("\n".join(["above", *compare.MARKS, "below"]))
    options = ["--tiny", "--only", "linear", "--places", "host", "--json", wrote, "--readme", readme]
    done = subprocess.run(
        [sys.executable, "-m", "bench.compare", *map(str, options)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[3:]] == ["| pyruntime", "| DTensor (`parallelize_module`)"]
    assert all(float(row[1]) > 0 and 0 <= float(row[2]) < 10 for row in rows[3:])
    run = json.loads(wrote.read_text())["linear"]["host"]
    assert re.match(
        r"python -m torch.distributed.run --nproc-per-node 2 -m bench.linear.run ", run["command"]
    )
    assert run["results"][-1]["rounds"]["dtensor"]
    above, below = readme.read_text().split(done.stdout.strip())
    assert above.startswith("above") and below.endswith("below")
