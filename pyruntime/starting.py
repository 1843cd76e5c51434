"""Handles Ctrl-C and SIGTERM while the program still imports torch (seconds): prints one line and exits."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from types import FrameType
from typing import Any


def is_program() -> bool:
    """Whether this process is the program `pyruntime` (`python -m` too), not one that imports it."""
    started = os.path.basename(sys.argv[0]) if sys.argv else ""
    # Python sets argv[0] to "-m" while it looks for the module and imports its package.
    by_name = started == "-m" and ("-m", "pyruntime") in itertools.pairwise(sys.orig_argv)
    return by_name or started == "pyruntime"


def catch_signals() -> None:
    for signum, default in _DEFAULTS.items():
        if signal.getsignal(signum) == default:  # not one that nohup ignores
            signal.signal(signum, _end)


def leave_signals() -> None:
    """Restores the default handlers; the program installs its own from here on."""
    for signum, default in _DEFAULTS.items():
        if signal.getsignal(signum) == _end:
            signal.signal(signum, default)


_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


def _end(signum: int, _: FrameType | None) -> None:
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    name = signal.Signals(signum).name
    os.write(2, f"pyruntime: {rank}Stopped by {name} before the program began; nothing was saved.\n".encode())
    os._exit(128 + signum)
