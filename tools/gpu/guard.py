"""Ends the processes that another program started when that program ends, even by SIGKILL.

Reads process groups from its input: "+123" when one has started and "-123" when one has ended. The input ends
when the program that writes it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

PATIENCE_S = 2.0
"""Seconds after SIGTERM in which ninja and pytest may end their own children; then SIGKILL follows."""


def end(groups: Iterable[int]) -> None:
    """Ends all processes of these groups."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        left = [group for group in groups if tell(group, how)]
        until = time.monotonic() + PATIENCE_S
        while how == signal.SIGTERM and time.monotonic() < until and any(tell(g, 0) for g in left):
            time.sleep(0.02)


def tell(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns whether the group exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


def main() -> None:
    running: set[int] = set()
    for line in sys.stdin:
        (running.add if line[0] == "+" else running.discard)(int(line[1:]))
    end(running)


if __name__ == "__main__":
    main()
