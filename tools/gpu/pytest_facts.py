"""A pytest plugin that writes each test's outcome at once: `-p tools.gpu.pytest_facts --facts FILE`.

FILE gets one JSON object a line: {"begun": name}, then {"name", "verdict", "seconds", "text"}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LONGEST_TEXT = 4000  # characters kept from the end of a failure's text


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--facts", type=Path, help="file for the outcome of each test")


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
