"""Checks the models of the communication protocol with spin (https://spinroot.com): what is checked, and how.

python -m tests.model.spin           prints what test_model.py checks: states explored, and seconds
python -m tests.model.spin --large   prints what takes minutes and gigabytes, too
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 120.0
LARGE_TIMEOUT_S = 3600.0

ASSERTION = "assertion violated"
DEADLOCK = "invalid end state"  # a thread waits and nothing can happen any more


@dataclass(frozen=True)
class Case:
    """A model and its macros, and what spin must find: ASSERTION, DEADLOCK or "" for nothing."""

    model: str
    macros: str
    error: str = ""
    large: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.macros}"


@dataclass(frozen=True)
class Outcome:
    error: str  # the first that spin found
    states: int
    seconds: float  # of the search alone
    output: str


SOUND = [
    # Two hosts: messages take their time, parts are written one by one.
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 OP=GATHER"),
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 OP=SCATTER"),
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 OP=ALL_REDUCE"),
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 OP=ALL_REDUCE PIECES=2 WINDOW=1"),
    Case("ring", "PROGRAM=BUCKETS HOSTS=2 OP=SCATTER"),
    Case("ring", "PROGRAM=ANY_ORDER HOSTS=2 WINDOW=1"),
    Case("ring", "PROGRAM=LATE_PUBLISH HOSTS=2"),
    Case("ring", "PROGRAM=BACKWARD HOSTS=2"),
    Case("ring", "PROGRAM=TWO_GROUPS HOSTS=2 WINDOW=1"),
    Case("ring", "PROGRAM=TWO_GROUPS HOSTS=2 WINDOW=1 PRIORITY=1"),
    # Three: chunks travel on, first in one direction, then in both.
    Case("ring", "PROGRAM=IN_TURN HOSTS=3 STREAMS=1 OP=GATHER"),
    Case("ring", "PROGRAM=ONE HOSTS=3 STREAMS=1 OP=ALL_REDUCE"),
    Case("ring", "PROGRAM=CROSSED HOSTS=3 STREAMS=1 COARSE=1"),
    Case("ring", "PROGRAM=BACKWARD HOSTS=3 STREAMS=1 COARSE=1"),
    Case("ring", "PROGRAM=ONE_BUCKET HOSTS=3 STREAMS=1 WINDOW=1 COARSE=1"),
    Case("ring", "PROGRAM=ONE_BUCKET HOSTS=3 STREAMS=1 PRIORITY=1 COARSE=1"),
    Case("ring", "PROGRAM=IN_TURN HOSTS=3 OP=GATHER COARSE=1"),
    Case("ring", "PROGRAM=IN_TURN HOSTS=3 OP=ALL_REDUCE COARSE=1"),
    Case("ring", "PROGRAM=LATE_PUBLISH HOSTS=3 COARSE=1"),
    # Four.
    Case("ring", "PROGRAM=IN_TURN HOSTS=4 STREAMS=1 OP=GATHER COARSE=1"),
    Case("ring", "PROGRAM=IN_TURN HOSTS=4 STREAMS=1 OP=ALL_REDUCE COARSE=1"),
    Case("ring", "PROGRAM=LATE_PUBLISH HOSTS=4 STREAMS=1 COARSE=1"),
    # Two hosts of two ranks.
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 LOCAL=2 OP=GATHER COARSE=1"),
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 LOCAL=2 OP=SCATTER COARSE=1"),
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 LOCAL=2 OP=ALL_REDUCE COARSE=1"),
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 LOCAL=2 SLOTS=1 OP=SCATTER COARSE=1"),
    # Inside a host.
    Case("host", "PROGRAM=IN_TURN RANKS=2"),
    Case("host", "PROGRAM=IN_TURN RANKS=3"),
    Case("host", "PROGRAM=IN_TURN RANKS=4 FLIGHTS=2 SLOTS=1"),
    Case("host", "PROGRAM=CROSSED RANKS=2"),
    Case("host", "PROGRAM=CROSSED RANKS=3"),
    Case("wake", "WAKERS=3"),
]

MUTANTS = [
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 OP=GATHER MUTANT_NO_CREDIT", ASSERTION),
    Case("ring", "PROGRAM=BUCKETS HOSTS=2 OP=SCATTER MUTANT_EARLY_REUSE", ASSERTION),
    Case("ring", "PROGRAM=BUCKETS HOSTS=2 OP=SCATTER COARSE=1 MUTANT_EARLY_REUSE", ASSERTION),
    Case("ring", "PROGRAM=LATE_PUBLISH HOSTS=2 MUTANT_INORDER_RECEIVE", DEADLOCK),
    Case("ring", "PROGRAM=CROSSED HOSTS=3 STREAMS=1 COARSE=1 MUTANT_INORDER_RECEIVE", DEADLOCK),
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 OP=GATHER MUTANT_EARLY_BEGIN_LOST", DEADLOCK),
    Case("ring", "PROGRAM=IN_TURN HOSTS=2 OP=GATHER MUTANT_FINISH_UNREAD", ASSERTION),
    Case(
        "ring",
        "PROGRAM=IN_TURN HOSTS=2 LOCAL=2 SLOTS=1 OP=SCATTER COARSE=1 MUTANT_FINISH_WITHOUT_ARBITER",
        ASSERTION,
    ),
    Case("ring", "PROGRAM=TWO_GROUPS HOSTS=2 PRIORITY=1 MUTANT_NO_PRIORITY", ASSERTION),
    Case("host", "PROGRAM=CROSSED RANKS=2 MUTANT_SLOT_NOT_AWAITED", ASSERTION),
    Case("host", "PROGRAM=CROSSED RANKS=2 MUTANT_FLAGS_WITHOUT_NUMBERS", ASSERTION),
    Case("host", "PROGRAM=CROSSED RANKS=2 MUTANT_PUBLISHED_BEFORE_WRITTEN", ASSERTION),
    Case("wake", "WAKERS=2 MUTANT_CLEARED_AFTER_LOOKING", DEADLOCK),
]

LARGE = [
    Case("ring", "PROGRAM=TWO_GROUPS HOSTS=2 WINDOW=2", large=True),
    Case("ring", "PROGRAM=TWO_GROUPS HOSTS=2 WINDOW=2 PRIORITY=1", large=True),
    Case("ring", "PROGRAM=ONE HOSTS=3 OP=GATHER", large=True),
    Case("ring", "PROGRAM=CROSSED HOSTS=3 STREAMS=1", large=True),
    Case("ring", "PROGRAM=ANY_ORDER HOSTS=3 STREAMS=1 COARSE=1", large=True),
    Case("ring", "PROGRAM=ONE HOSTS=4 OP=ALL_REDUCE COARSE=1", large=True),
    Case("ring", "PROGRAM=IN_TURN HOSTS=4 OP=GATHER COARSE=1", large=True),
    Case("ring", "PROGRAM=CROSSED HOSTS=4 STREAMS=1 COARSE=1", large=True),
    Case("ring", "PROGRAM=BUCKETS HOSTS=2 LOCAL=2 OP=SCATTER COARSE=1", large=True),
    Case("ring", "PROGRAM=BUCKETS HOSTS=2 LOCAL=2 WINDOW=1 OP=SCATTER COARSE=1", large=True),
    Case("host", "PROGRAM=IN_TURN RANKS=4", large=True),
    Case("host", "PROGRAM=CROSSED RANKS=4", large=True),
]


def compiler() -> str:
    return next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "cc")


def why_not() -> str:
    """What is missing on this machine, in words; "" where nothing is."""
    missing = [tool for tool in ("spin", compiler()) if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found; apt-get install spin gcc" if missing else ""


def check(case: Case, folder: Path) -> Outcome:
    """Searches all states of the model, in `folder`. Raises RuntimeError where the search did not end."""
    macros = [f"-D{macro}" for macro in case.macros.split()]
    run(["spin", *macros, "-a", str(FOLDER / f"{case.model}.pml")], folder, TIMEOUT_S)
    # SAFETY: no cycles are looked for. COLLAPSE: states are kept compressed; none is left out.
    options = ["-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=2048", "-DMEMLIM=8000", "-O2" if case.large else "-O0"]
    run([compiler(), "-w", *options, "-o", "pan", "pan.c"], folder, TIMEOUT_S)
    start = time.monotonic()
    search = ["./pan", "-m100000", "-w26" if case.large else "-w20"]
    output = run(search, folder, LARGE_TIMEOUT_S if case.large else TIMEOUT_S)
    seconds = time.monotonic() - start
    states = re.search(r"([\d.e+]+) states, stored", output)
    found = re.search(r"^pan:\d+: (.*?) *\(at depth", output, re.MULTILINE)
    complete = "errors: 0" in output and "Search not completed" not in output
    if states is None or "max search depth too small" in output or not (found or complete):
        raise RuntimeError(f"{case.name}: the search did not end.\n{output}")
    return Outcome(found[1] if found else "", int(float(states[1])), seconds, output)


def run(command: list[str], folder: Path, timeout_s: float) -> str:
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    output = ran.stdout + ran.stderr
    if ran.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {ran.returncode}\n{output}")
    return output


def main() -> None:
    if why_not():
        sys.exit(why_not())
    print(f"{'configuration':96} {'states':>12} {'seconds':>8}  found")
    for case in SOUND + MUTANTS + (LARGE if "--large" in sys.argv[1:] else []):
        with tempfile.TemporaryDirectory() as folder:
            outcome = check(case, Path(folder))
        found = next((kind for kind in (ASSERTION, DEADLOCK) if kind in outcome.error), outcome.error)
        print(f"{case.name:96} {outcome.states:12,} {outcome.seconds:8.1f}  {found or 'nothing'}", flush=True)


if __name__ == "__main__":
    main()
