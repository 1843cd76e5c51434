"""Faults of hosts and links, on hosts that netlab makes: every rank that lives ends with a named error within
the deadline and a second, and a fault that is shorter than the deadline does no harm."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.netlab_network import missing

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 4.0
FAULT_AT_S = 12.0  # when torch is imported everywhere and the ops go round, also on a busy machine
RUN_S = 20.0
NOT_HERE = missing()

pytestmark = pytest.mark.skipif(bool(NOT_HERE), reason=NOT_HERE)


@dataclass(frozen=True)
class Told:
    error: str  # "" where the rank ended well
    seconds: float
    message: str


def run_job(fault: str, hosts: int = 3, ranks_per_host: int = 1) -> tuple[dict[int, Told], str, float]:
    """What each rank told, all output, and the seconds that the run took."""
    command = [sys.executable, ROOT / "bench/netlab.py", "--hosts", hosts, "--ranks-per-host", ranks_per_host]
    command += ["--rate", "1gbit", "--grace", "15s", "--fail", fault, "--"]
    command += [sys.executable, "-m", "tests.comm.fault_job", DEADLINE_S, RUN_S]
    start = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    seconds = time.monotonic() - start
    told = {int(rank): Told("", 0.0, "") for rank in re.findall(r"rank (\d+): done", done.stdout)}
    for rank, error, waited, message in re.findall(r"rank (\d+): (\w+) after ([\d.]+) s: (.*)", done.stdout):
        told[int(rank)] = Told(error, float(waited), message)
    return told, done.stdout + done.stderr, seconds


def left_over() -> str:
    return subprocess.run(["pgrep", "-f", "tests.comm.fault_job"], capture_output=True, text=True).stdout


def test_a_link_that_stays_down_ends_all_ranks():
    told, output, _ = run_job(f"link:1@{FAULT_AT_S}s")
    assert sorted(told) == [0, 1, 2], output
    for rank, one in told.items():
        assert one.error == "CommTimeout", (rank, output)
        assert one.seconds < DEADLINE_S + 1.0, (rank, output)
    # Those that can still talk name the one that cannot, with one voice; it knows only that nobody answers.
    causes = {told[rank].message.split(" reports: ")[-1] for rank in (0, 2)}
    assert len(causes) == 1 and "rank 1" in causes.pop(), output
    assert "does not answer" in told[1].message or "has not begun" in told[1].message, output
    assert left_over() == "", output


def test_a_link_that_comes_back_in_time_does_no_harm():
    told, output, _ = run_job(f"link:1@{FAULT_AT_S}s+1.5s")
    assert told == {rank: Told("", 0.0, "") for rank in range(3)}, output
    assert left_over() == "", output


def test_a_killed_rank_ends_all_hosts_at_once():
    told, output, _ = run_job(f"kill:rank3@{FAULT_AT_S}s", hosts=2, ranks_per_host=2)
    assert sorted(told) == [0, 1, 2], output
    for rank, one in told.items():
        assert one.error == "PeerLost" and one.seconds < 1.5, (rank, output)
    causes = {one.message.split(" reports: ")[-1] for one in told.values()}
    assert len(causes) == 1 and "rank 3" in causes.pop(), output
    assert left_over() == "", output
