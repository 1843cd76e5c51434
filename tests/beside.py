"""Keeps a test marked `alone` from running beside others, which pytest-xdist runs in several workers.

Such a test has the machine to itself: it waits until the tests of other workers have ended, and new ones wait
for it. Without workers tests run one after the other, and nothing is locked.
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
    """The turns of a session's workers, by locks of two files. The kernel releases a dead worker's locks."""

    def __init__(self, folder: str) -> None:
        self._stays = False
        self._gate, self._running = (
            os.open(Path(folder, name), os.O_CREAT | os.O_RDWR) for name in ("gate", "running")
        )

    def begin(self, alone: bool) -> None:
        """Waits until a test may run, `alone` or beside others."""
        if self._stays:
            return
        fcntl.flock(self._gate, fcntl.LOCK_EX)  # held while a test waits to be alone: no other begins
        fcntl.flock(self._running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def end(self, stay: bool) -> None:
        """Lets others begin, unless this worker must `stay` alone for its next test."""
        self._stays = stay
        if not stay:
            fcntl.flock(self._running, fcntl.LOCK_UN)


FOLDER = pytest.StashKey[str]()  # in the session that has workers
TURNS = pytest.StashKey[Turns]()  # in a worker


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[TURNS] = Turns(config.workerinput["turns"])
    else:
        config.stash[FOLDER] = tempfile.mkdtemp(prefix="pyruntime-turns-")


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
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
