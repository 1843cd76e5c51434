"""Limits the cost of first-tier files, as recorded by `make test-costs`, and tests how it is counted."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.costs import RECORDED, ROOT, Costs, processor_seconds

MOST_S = 40.0


def test_no_file_of_the_first_tier_costs_more_than_a_person_would_wait_for():
    recorded = json.loads(RECORDED.read_text())
    dear = {file: seconds for file, seconds in recorded.items() if seconds > MOST_S}
    assert not dear, f"over {MOST_S:g} processor seconds; mark cases of them second_tier (tests/tiers.py)"


def test_what_is_recorded_is_there_and_all_of_the_first_tier_is_recorded():
    recorded = json.loads(RECORDED.read_text())
    gone = [file for file in recorded if not (ROOT / file).exists()]
    assert not gone, "run `make test-costs`"
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--first-tier",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    new = sorted(files - recorded.keys())
    if new:  # second-tier files, or new ones
        shown = subprocess.run([*command, *new], cwd=ROOT, capture_output=True, text=True, timeout=120).stdout
        first = sorted({line.partition("::")[0] for line in shown.splitlines() if "::" in line})
        assert not first, "run `make test-costs`"


BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_processes_count_for_the_file_that_started_them_and_builds_do_not_while_they_run():
    costs = Costs()
    costs.begin(set())
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    costs.end("tests/test_a.py", set())
    costs.end("tests/test_b.py", set())
    assert costs.seconds["tests/test_a.py"] >= 0.25 > 0.2 > costs.seconds["tests/test_b.py"]

    program = f"{BUSY}\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as build:
        assert build.stdout is not None
        build.stdout.readline()
        with_it, without = processor_seconds(set()), processor_seconds({build.pid})
        build.communicate(b"\n")
    assert with_it - without >= 0.25
