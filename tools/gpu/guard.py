"""Ends what another program started when that program ends, however it ends: SIGKILL leaves it no time to.

Reads process groups from its input, "+123" when one has started and "-123" when one has ended. The input ends
with the program that writes it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

PATIENCE_S = 2.0
"""ninja and pytest end what they started when they are asked to end; who has not by then is killed."""


def end(groups: Iterable[int]) -> None:
    """Ends all processes of these groups."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        left = [group for group in groups if tell(group, how)]
        until = time.monotonic() + PATIENCE_S
        while how == signal.SIGTERM and time.monotonic() < until and any(tell(g, 0) for g in left):
            time.sleep(0.02)


def tell(group: int, number: int) -> bool:
    """Sends a signal to a process group; whether there is one."""
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
