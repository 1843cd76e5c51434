"""Ctrl-C and SIGTERM end a run at a step that all ranks agree on."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from pyruntime.comm import CommError


class Stopped(BaseException):
    """A signal ended the run. Like KeyboardInterrupt it is no Exception, so that no handler of errors
    swallows it.

    `signum` is the signal; the exit code is 128 + signum, as shells have it. `where` completes the sentence
    "Stopped by SIGINT ...".
    """

    def __init__(self, signum: int, where: str = ""):
        self.signum = signum
        super().__init__(f"Stopped by {signal.Signals(signum).name}{' ' if where else ''}{where or '.'}")


class StopRequest:
    """Catches SIGINT and SIGTERM in this process.

    Between ranks a signal may not act at once: a rank that leaves in the middle of a step leaves its peers
    waiting. So inside `deferred()` the first signal is only noted in `signum`, which the ranks exchange with
    each step's metrics; a second one, and any signal outside, raises `Stopped` where the program stands.
    A rank that is ending already goes on ending: where a communication error is on its way out, or after
    `ending()`, a signal (the launcher's SIGTERM, as a rule, because another rank failed too) is only noted,
    so that it cannot replace the reason.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._defer = False
        self._ending = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """While inside, the first signal waits for the end of a step."""
        self._defer = True
        try:
            yield
        finally:
            self._defer = False
        if self.signum:
            raise Stopped(self.signum)

    def ending(self) -> None:
        """From here on signals are only noted: the program is saying its last words."""
        self._ending = True

    def wait(self, seconds: float) -> None:
        """Returns when a signal was noted, at the latest after so long."""
        end = time.monotonic() + seconds
        while not self.signum and time.monotonic() < end:
            time.sleep(0.02)  # a signal does not end the sleep: its handler returns

    def note(self, signum: int) -> None:
        """Ends the run at the next step, as if `signum` had been sent."""
        self.signum = self.signum or signum

    def _handle(self, signum: int, _frame: object) -> None:
        again, self.signum = bool(self.signum), self.signum or signum
        if self._ending or isinstance(sys.exception(), CommError):
            return
        if again or not self._defer:
            raise Stopped(self.signum)
