"""Counts the processor seconds of each file of tests, including its ranks and other child processes.

A session ends with a list of its ten most expensive files. `make test-costs` writes the costs of all files to
tests/costs.json, and tests/test_costs.py limits those of the first tier. A build (tests/builds.py) counts for
the file that waits for it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.builds import BUILDS

ROOT = Path(__file__).resolve().parent.parent
RECORDED = Path(__file__).with_suffix(".json")
SHOWN = 10
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(without: set[int]) -> float:
    """Returns the processor seconds of this process and all its descendants, ended ones too, but not those
    below the running children `without`."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            # pid (name) state parent ...: fields 14 to 17 are ticks of the process and of its ended children.
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # the process ended meanwhile
            continue
        ticks[int(entry)] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(int(entry))
    found, stack = 0, [os.getpid()]
    while stack:
        process = stack.pop()
        found += ticks.get(process, 0)
        stack += [child for child in children.get(process, []) if child not in without]
    return found / TICKS


class Costs:
    """The processor seconds of each file that this process has run."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._before = 0.0

    def begin(self, builds: set[int]) -> None:
        self._before = processor_seconds(builds)

    def end(self, file: str, builds: set[int]) -> None:
        """Counts the time since the last call for `file`."""
        now = processor_seconds(builds)
        self.seconds[file] += max(0.0, now - self._before)
        self._before = now


COSTS = pytest.StashKey[Costs]()


def file_of(item: pytest.Item | None) -> str:
    return "" if item is None else item.nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-costs", action="store_true", help=f"record what each file costs in {RECORDED.name}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    costs = item.config.stash.get(COSTS, None)
    builds = item.config.stash[BUILDS].running()
    if costs is None:
        costs = item.config.stash[COSTS] = Costs()
        costs.begin(builds)
    try:
        return (yield)
    finally:
        if file_of(item) != file_of(nextitem):
            costs.end(file_of(item), builds)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = dict(session.config.stash.get(COSTS, Costs()).seconds)


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_testnodedown(node: Any, error: object) -> None:
    costs = node.config.stash.setdefault(COSTS, Costs())
    costs.seconds.update(getattr(node, "workeroutput", {}).get("costs", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    costs = config.stash.get(COSTS, Costs()).seconds
    if not costs:
        return
    if config.option.write_costs:
        rounded = {file: round(seconds, 1) for file, seconds in sorted(costs.items())}
        RECORDED.write_text(json.dumps(rounded, indent=1) + "\n")
    terminalreporter.section(f"processor seconds: {costs.total():.0f} in all")
    for file, seconds in costs.most_common(SHOWN):
        terminalreporter.line(f"{seconds:7.1f} {file}")
