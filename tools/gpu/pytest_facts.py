"""A plugin of pytest that writes what became of each test as soon as it is known: `-p tools.gpu.pytest_facts
--facts FILE`. One JSON object a line: {"begun": name}, then {"name", "verdict", "seconds", "text"}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LONGEST_TEXT = 4000  # characters of a failure that are kept, its end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--facts", type=Path, help="write what becomes of each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Facts(config.getoption("--facts")))


class Facts:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seconds = 0.0
        self._write({"begun": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.when != "call" and report.passed:
            return
        if report.when == "teardown" and report.skipped:
            return
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        fact = {"name": report.nodeid, "verdict": report.outcome, "seconds": round(self._seconds, 3)}
        self._write({**fact, "text": text[-LONGEST_TEXT:]})

    def _write(self, fact: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fact) + "\n")
