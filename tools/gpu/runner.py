"""Runs stages, which are processes with a time limit, and passes their facts to a report while they run.

A stage starts when those that it needs are over, in the order of the list. Builds run beside other stages;
other stages run one at a time. A stage that fails or reaches its limit is recorded, and the next one runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tools.gpu import guard

LAST_LINES = 25
POLL_S = 0.05
LEAST_S = 2.0
"""Nothing is started with less time left than this."""


@dataclass(frozen=True)
class Stage:
    """A command with a time limit."""

    name: str
    kind: str
    """Its name for --only: build, test, bench or sanitize."""
    command: tuple[str, ...]
    limit_s: float
    needs: tuple[str, ...] = ()
    """Stages that must have passed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""
    """Why it cannot run here, which is no failure; empty if it can."""
    facts: Path | None = None
    """File for its facts, one JSON object a line: outcomes of tests (tools/gpu/pytest_facts.py), or rows of
    the benchmark."""
    tests: bool = False
    """Whether pytest writes the facts."""
    library: str = "whole"
    """The kernels that must be in place: only "portable" ones, or the "whole" library."""

    @property
    def builds(self) -> bool:
        return self.kind == "build"

    @property
    def wants_quiet(self) -> bool:
        """Whether it measures, so that no compiler may run beside it."""
        return self.kind in ("bench", "sanitize")


class Record(Protocol):
    """The interface of a report that receives facts; after each call it is complete on disk."""

    def begin(self, stage: Stage) -> None: ...

    def add(self, stage: Stage, fact: dict[str, Any]) -> None:
        """Adds a fact of a running stage."""

    def end(self, stage: Stage, outcome: Outcome) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """The outcome of a stage. `verdict`: passed, failed, timed out (at the stage's own limit), cut (by the
    end of the call), absent or not run. `text` says more. `begun`: the test that ran when the process was
    ended."""

    verdict: str
    text: str = ""
    seconds: float = 0.0
    code: int | None = None
    last_lines: tuple[str, ...] = ()
    begun: str = ""


def last_lines(log: Path, count: int = LAST_LINES) -> tuple[str, ...]:
    """Returns the last lines of a file that may be long and contain bytes that are no text."""
    if not log.exists():
        return ()
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200 * 400))
        return tuple(file.read().decode(errors="replace").splitlines()[-count:])


class Guard:
    """Ends the running processes when this one ends, by whatever signal (tools/gpu/guard.py)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", guard.__file__], stdin=subprocess.PIPE, process_group=0
        )

    def note(self, sign: str, group: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{sign}{group}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Running:
    """A started stage, whose output goes to a file."""

    def __init__(self, stage: Stage, root: Path, logs: Path, left_s: float, watch: Guard) -> None:
        self.stage, self._watch = stage, watch
        self._is_cut = left_s < stage.limit_s
        self.limit_s = min(left_s, stage.limit_s)
        self.log = logs / f"{stage.name}.txt"
        self._read = 0
        self._begun = ""
        if stage.facts is not None:
            stage.facts.unlink(missing_ok=True)
        self._start = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._error = ""
        with self.log.open("wb") as file:
            file.write(f"$ {' '.join(stage.command)}\n".encode())
            file.flush()
            try:
                # The same session, so that they end with it; a new group, so that it can be ended.
                self._process = subprocess.Popen(
                    stage.command,
                    cwd=root,
                    env=os.environ | dict(stage.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
                watch.note("+", self._process.pid)
            except OSError as error:
                self._error = str(error)

    def new_facts(self) -> list[dict[str, Any]]:
        """Returns the facts written since the last call; an incomplete line waits for the next one."""
        if self.stage.facts is None or not self.stage.facts.exists():
            return []
        with self.stage.facts.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        found = [json.loads(line) for line in whole.splitlines()]
        for fact in found:
            self._begun = fact.get("begun", "" if fact.get("name") == self._begun else self._begun)
        return [fact for fact in found if "begun" not in fact]

    def is_over(self) -> bool:
        return (
            self._process is None
            or self._process.poll() is not None
            or time.monotonic() - self._start > self.limit_s
        )

    def outcome(self) -> Outcome:
        """Ends the process if it still runs, and returns the outcome. Call it after the last new_facts()."""
        seconds = time.monotonic() - self._start
        code = 127 if self._process is None else self._process.poll()
        self.stop()
        if code is None:
            verdict = "cut" if self._is_cut else "timed out"
            text = "the call's time was over" if self._is_cut else f"no end within {self.limit_s:.0f} s"
            if self._begun:
                text += f", in {self._begun}"
        else:
            verdict = "passed" if code == 0 else "failed"
            text = f"exit code {code}{': ' + self._error if self._error else ''}"
        return Outcome(verdict, text, round(seconds, 2), code, last_lines(self.log), self._begun)

    def stop(self) -> None:
        """Ends the process and its whole group."""
        if self._process is None:
            return
        for how, patience_s in ((signal.SIGTERM, guard.PATIENCE_S), (signal.SIGKILL, 10)):
            if self._process.poll() is None:
                guard.tell(self._process.pid, how)
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may be waiting for the device
                    self._process.wait(timeout=patience_s)
        guard.tell(self._process.pid, signal.SIGKILL)  # children that it left behind
        self._watch.note("-", self._process.pid)


def run_stages(
    stages: Sequence[Stage],
    report: Record,
    *,
    root: Path,
    logs: Path,
    budget_s: float,
    put_in_place: Callable[[Stage], None] = lambda stage: None,
) -> dict[str, Outcome]:
    """Runs all stages within `budget_s` seconds. `put_in_place` is called before each.

    A needed stage that is not among the `stages` counts as passed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + budget_s
    waiting, running, over = list(stages), list[Running](), dict[str, Outcome]()
    watch = Guard()

    def record(stage: Stage, outcome: Outcome) -> None:
        over[stage.name] = outcome
        report.end(stage, outcome)
        show(stage.name, outcome)

    try:
        while waiting or running:
            for one in list(running):
                is_over = one.is_over()
                for fact in one.new_facts():
                    report.add(one.stage, fact)
                if is_over:
                    running.remove(one)
                    record(one.stage, one.outcome())
            for stage in list(waiting):
                left = end - time.monotonic()
                never = why_not(stage, over, left)
                if never is not None:
                    waiting.remove(stage)
                    record(stage, never)
                elif may_start(stage, [one.stage for one in running], waiting):
                    waiting.remove(stage)
                    put_in_place(stage)
                    report.begin(stage)
                    running.append(Running(stage, root, logs, left, watch))
            time.sleep(POLL_S if running else 0)
    finally:
        for one in running:
            one.stop()
        watch.close()
    return over


def why_not(stage: Stage, over: Mapping[str, Outcome], left_s: float) -> Outcome | None:
    """Returns the outcome of a stage that cannot start any more; None if it still can."""
    if stage.absent:
        return Outcome("absent", stage.absent)
    for name in stage.needs:
        if name in over and over[name].verdict != "passed":
            verdict = "absent" if over[name].verdict == "absent" else "not run"
            return Outcome(verdict, f"it needs {name!r}: {over[name].verdict}, {over[name].text}")
    return Outcome("not run", "no time was left") if left_s < LEAST_S else None


def may_start(stage: Stage, running: Sequence[Stage], waiting: Sequence[Stage]) -> bool:
    """Whether the stages that it needs are over and the running ones allow it beside them."""
    if any(other.name in stage.needs for other in [*running, *waiting]):
        return False
    if stage.builds:
        return True
    if stage.wants_quiet and any(other.builds for other in waiting):
        return False
    return all(other.builds and not stage.wants_quiet for other in running)


def show(name: str, outcome: Outcome) -> None:
    print(f"{name:24} {outcome.verdict:10} {outcome.seconds:6.1f} s  {outcome.text}", flush=True)
    if outcome.verdict in ("failed", "timed out"):
        print("\n".join(f"    | {line}" for line in outcome.last_lines), flush=True)
