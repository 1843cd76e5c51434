"""Lists skipped tests with one line a reason; pytest's own summary has one for each place in the sources."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest


def lines(skipped: Iterable[pytest.TestReport]) -> list[str]:
    """Returns lines like "12 in tests/cuda: no GPU.", the most frequent reason first."""
    folders: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for report in skipped:
        _, _, reason = report.longrepr
        folder = str(PurePosixPath(report.nodeid.partition("::")[0]).parent)
        folders[reason.removeprefix("Skipped: ")][folder] += 1
    by_number = sorted(folders.items(), key=lambda item: -item[1].total())
    return [f"{where.total()} in {', '.join(sorted(where))}: {reason}" for reason, where in by_number]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if found := lines(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section("skipped", yellow=True)
        for line in found:
            terminalreporter.line(line)
