"""Tests beside each other: `make test` has pytest-xdist run them in two workers, each file of tests in one.

A test that is marked `alone` has the machine to itself: it waits until the tests of other workers have ended,
and holds new ones back. Without workers tests come one after the other, and nothing is locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


class Turns:
    """What the workers of a session agree on by locks of two files: who runs now. The kernel opens the locks
    of a worker that dies."""

    def __init__(self, folder: str) -> None:
        self._stays = False
        self._gate, self._running = (
            os.open(Path(folder, name), os.O_CREAT | os.O_RDWR) for name in ("gate", "running")
        )

    def begin(self, alone: bool) -> None:
        """Waits until a test may run, `alone` or beside others."""
        if self._stays:
            return
        fcntl.flock(self._gate, fcntl.LOCK_EX)  # who waits to be alone holds it: no other test begins
        fcntl.flock(self._running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def end(self, stay: bool) -> None:
        """Lets others begin, unless this worker is to `stay` alone for its next test."""
        self._stays = stay
        if not stay:
            fcntl.flock(self._running, fcntl.LOCK_UN)


FOLDER = pytest.StashKey[str]()  # of the session that has workers
TURNS = pytest.StashKey[Turns]()  # of a worker


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[TURNS] = Turns(config.workerinput["turns"])
    else:
        config.stash[FOLDER] = tempfile.mkdtemp(prefix="pyruntime-turns-")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["turns"] = node.config.stash[FOLDER]


def pytest_unconfigure(config: pytest.Config) -> None:
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER])


def is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    turns = item.config.stash.get(TURNS, None)
    if turns is None:
        return (yield)
    turns.begin(is_alone(item))
    try:
        return (yield)
    finally:
        turns.end(stay=is_alone(item) and is_alone(nextitem))
