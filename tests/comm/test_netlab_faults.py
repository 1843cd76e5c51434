"""Faults of hosts and links, on hosts that netlab makes: every rank that lives ends with a named error within
the deadline and a second, and a fault that is shorter than the deadline does no harm.

Nothing is assumed of how fast this machine starts ranks: faults come when the ops go round. And how late an
error may be grows with the slowest op before it, a few milliseconds where nothing else runs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.netlab.network import missing

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 4.0
FAULT_AT_S = 0.5  # from when the ops go round
RUN_S = 5.0
NOT_HERE = missing()

pytestmark = [pytest.mark.skipif(bool(NOT_HERE), reason=NOT_HERE), pytest.mark.second_tier]


@dataclass(frozen=True)
class Told:
    error: str  # "" where the rank ended well
    seconds: float  # of the op that failed
    slowest: float  # seconds of an op before
    message: str

    def came_within(self, seconds: float) -> bool:
        return self.seconds < seconds + 3 * self.slowest


def run_job(ready: Path, fault: str, hosts: int = 3, ranks_per_host: int = 1) -> tuple[dict[int, Told], str]:
    """What each rank told, and all output."""
    command = [sys.executable, "-m", "bench.netlab", "--hosts", hosts, "--ranks-per-host", ranks_per_host]
    command += ["--rate", "1gbit", "--grace", "15s", "--fail", fault, "--ready", ready, "--"]
    command += [sys.executable, "-m", "tests.comm.fault_job", DEADLINE_S, RUN_S, ready]
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    told = {int(rank): Told("", 0.0, 0.0, "") for rank in re.findall(r"rank (\d+): done", done.stdout)}
    failed = re.compile(r"rank (\d+): (\w+) after ([\d.]+) s, before ([\d.]+) s: (.*)")
    for rank, error, waited, slowest, message in failed.findall(done.stdout):
        told[int(rank)] = Told(error, float(waited), float(slowest), message)
    return told, done.stdout + done.stderr


def left_over() -> str:
    return subprocess.run(["pgrep", "-f", "tests.comm.fault_job"], capture_output=True, text=True).stdout


def test_a_link_that_stays_down_ends_all_ranks(tmp_path):
    told, output = run_job(tmp_path / "ready", f"link:1@{FAULT_AT_S}s")
    assert sorted(told) == [0, 1, 2], output
    for rank, one in told.items():
        assert one.error == "CommTimeout", (rank, output)
        assert one.came_within(DEADLINE_S + 1.0), (rank, output)
    # Those that can still talk name the one that cannot, with one voice; it knows only that nobody answers.
    causes = {told[rank].message.split(" reports: ")[-1] for rank in (0, 2)}
    assert len(causes) == 1 and "rank 1" in causes.pop(), output
    assert "does not answer" in told[1].message or "has not begun" in told[1].message, output
    assert left_over() == "", output


def test_a_link_that_comes_back_in_time_does_no_harm(tmp_path):
    told, output = run_job(tmp_path / "ready", f"link:1@{FAULT_AT_S}s+1.5s")
    assert told == {rank: Told("", 0.0, 0.0, "") for rank in range(3)}, output
    assert left_over() == "", output


def test_a_killed_rank_ends_all_hosts_at_once(tmp_path):
    told, output = run_job(tmp_path / "ready", f"kill:rank3@{FAULT_AT_S}s", hosts=2, ranks_per_host=2)
    assert sorted(told) == [0, 1, 2], output
    for rank, one in told.items():
        assert one.error == "PeerLost" and one.came_within(1.5), (rank, output)
    causes = {one.message.split(" reports: ")[-1] for one in told.values()}
    assert len(causes) == 1 and "rank 3" in causes.pop(), output
    assert left_over() == "", output
