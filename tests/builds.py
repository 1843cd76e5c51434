"""Builds programs while other tests run, because these often wait and leave a core idle.

When a session has collected its tests, tests/cpp and tests/cuda name the builds that they need (conftest.py
there), and their fixtures wait for them. ninja compiles what changed since the last session.

A build ends with its session, even if that is interrupted or killed: the kernel signals ninja when pytest
ends, and ninja ends its compilers. If several workers need a recipe (tests/beside.py), each has ninja build
it, one after the other: the second finds it built.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rank_worker import die_with_parent
from tools.build_ninja import ROOT, find_ninja

FINISHES_S = 1500.0
"""A build is ended after so long a wait for it."""
STOPS_S = 30.0
"""A build that does not end in this time after its signal is killed."""
NICENESS = 10
"""Tests measure time, so compilers only take the cores that they leave idle."""


@dataclass(frozen=True)
class Recipe:
    what: str
    """Its name in messages: "the C++ tests"."""
    folder: Path
    """ninja's folder; another recipe's only if that has the same text."""
    text: str
    """The text of build.ninja."""
    target: str = ""
    """The file of it that is wanted; all of them by default. A folder has one recipe for each."""


class Builds:
    """All builds of a session; they share the cores, or MAX_JOBS jobs."""

    def __init__(self) -> None:
        self._wanted: list[Recipe] = []
        self._running: dict[Recipe, Build] = {}

    def want(self, recipe: Recipe) -> None:
        """Adds a recipe that `start` builds."""
        if recipe not in self._wanted:
            self._wanted.append(recipe)

    def start(self) -> None:
        """Starts all wanted builds."""
        jobs = jobs_at_once()
        for recipe in self._wanted:
            self._running[recipe] = Build(recipe, max(1, jobs // len(self._wanted)))

    def finish(self, recipe: Recipe) -> None:
        """Waits for a wanted build. Raises RuntimeError with the compiler's output if something does not
        compile, and if there is no ninja."""
        self._running[recipe].finish()

    def running(self) -> set[int]:
        """Returns the pids of builds that still run."""
        return {one.process for one in self._running.values() if one.process is not None}

    def stop(self) -> None:
        """Ends builds that still run."""
        for one in self._running.values():
            one.stop()


class Build:
    """One run of ninja."""

    def __init__(self, recipe: Recipe, jobs: int) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        name = f"build{worker}{Path(recipe.target).stem}"
        self._what, self._log = recipe.what, recipe.folder / f"{name}.log"
        self._ninja: subprocess.Popen[bytes] | None = None
        recipe.folder.mkdir(parents=True, exist_ok=True)
        written = recipe.folder / f"{name}.ninja"
        written.write_text(recipe.text)
        try:
            ninja = find_ninja()
        except RuntimeError as error:  # only the tests that need the build shall fail
            self._log.write_text(str(error))
            return
        command = [sys.executable, "-m", "tests.builds", str(os.getpid()), str(recipe.folder), ninja]
        command += ["-C", str(recipe.folder), "-f", written.name, "-j", str(jobs), *recipe.target.split()]
        with self._log.open("wb") as log:
            self._ninja = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C goes to pytest, which ends its builds itself
            )

    @property
    def process(self) -> int | None:
        """Its pid until it has been waited for, else None."""
        return None if self._ninja is None or self._ninja.returncode is not None else self._ninja.pid

    def finish(self) -> None:
        said = "is still compiling"
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._ninja is not None and self._ninja.wait(FINISHES_S) == 0:
                return
            said = "cannot be built"
        self.stop()
        raise RuntimeError(f"{self._what} {said}:\n{self._log.read_text(errors='replace')}")

    def stop(self) -> None:
        if self._ninja is None:
            return
        self._ninja.terminate()
        try:
            self._ninja.wait(STOPS_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._ninja.pid, signal.SIGKILL)
            self._ninja.wait()


BUILDS = pytest.StashKey[Builds]()
"""The builds of a session."""


def jobs_at_once() -> int:
    """Returns the jobs of all builds together: MAX_JOBS if it is a positive number, else one a core."""
    asked = os.environ.get("MAX_JOBS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else len(os.sched_getaffinity(0))


def main() -> None:
    """Becomes ninja with a lower priority, which ends with pytest and locks its folder against other workers.
    Arguments: pytest's pid, the folder, ninja's command."""
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.nice(NICENESS)
    folder = os.open(sys.argv[2], os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    os.set_inheritable(folder, True)  # keeps the lock while ninja and its compilers run
    os.execv(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()
