"""Ends a run on Ctrl-C or SIGTERM at a step that all ranks agree on, or within seconds if a step is long."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pyruntime.comm import CommError

STEP_MAY_TAKE_S = 4.0
"""Seconds after the first signal until the process is ended, whatever it is doing."""
ENDING_MAY_TAKE_S = 0.5
"""Seconds after the second signal until the process is ended in any case."""


class Stopped(BaseException):
    """Raised when a signal ended the run. Like KeyboardInterrupt it is no Exception, so that no error handler
    swallows it.

    `signum` is the signal; the exit code is 128 + signum, as in shells. `where` completes the sentence
    "Stopped by SIGINT ...".
    """

    def __init__(self, signum: int, where: str = ""):
        self.signum, self.where = signum, where
        super().__init__(f"Stopped by {signal.Signals(signum).name}{' ' if where else ''}{where or '.'}")


class StopRequest:
    """Catches SIGINT and SIGTERM in this process.

    A rank that leaves in the middle of a step leaves its peers waiting. So inside `deferred()` the first
    signal is only noted in `signum`, which the ranks exchange in each step. A second signal, and any signal
    outside, raises `Stopped` where the program is. Python's handlers wait until C++ returns, which may take
    minutes. So a thread, which the signal wakes directly, ends the process by `end_process`: STEP_MAY_TAKE_S
    after the first signal unless a checkpoint is being written, and ENDING_MAY_TAKE_S after the second in any
    case. While a communication error propagates, and after `ending()`, signals are only noted, so that they
    cannot replace the reason: most are the launcher's SIGTERM because another rank failed.
    """

    def __init__(self, end_process: Callable[[Stopped], None] | None = None) -> None:
        self.signum = 0
        self.is_of_a_job = False
        """Whether the ranks are connected, so that one may report for all."""
        self._defer = False
        self._ending = False
        self._saving = False
        self._where: Callable[[], str] = lambda: ""
        self._end_process = end_process
        self._previous: dict[int, Any] = {}
        self._watch: _Watch | None = None

    def __enter__(self) -> StopRequest:
        if self._end_process is not None:
            self._watch = _Watch(self._is_over, self._cut_short)
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._watch is not None:
            self._watch.close()

    def says(self, where: str) -> None:
        """Sets `where`, which completes the sentence from now on."""
        self._where = lambda: where

    def where(self) -> str:
        """Returns where the program is, for the end of a sentence; empty if it is not known."""
        return self._where()

    @contextlib.contextmanager
    def deferred(self, where: Callable[[], str] | None = None) -> Iterator[None]:
        """Inside, the first signal waits for the end of a step. `where` completes the sentence if the step
        does not end in time, and afterwards."""
        self._defer = True
        self._where = where or self._where
        try:
            yield
        finally:
            self._defer = False
            said = self._where()
            self._where = lambda: said  # so that the caller's `where` can be freed
        if self.signum:
            raise Stopped(self.signum, said)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, the first signal waits for the checkpoint that is being written."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def ending(self) -> None:
        """From here on signals are only noted: the program is reporting its end."""
        self._ending = True

    def wait(self, seconds: float) -> None:
        """Returns when a signal was noted, at the latest after `seconds`."""
        end = time.monotonic() + seconds
        while not self.signum and time.monotonic() < end:
            time.sleep(0.02)  # a signal whose handler returns does not end the sleep

    def note(self, signum: int) -> None:
        """Ends the run at the next step, as if `signum` had been sent."""
        self.signum = self.signum or signum

    def _handle(self, signum: int, _frame: object) -> None:
        again, self.signum = bool(self.signum), self.signum or signum
        if self._ending or isinstance(sys.exception(), CommError):
            return
        if again or not self._defer:
            raise Stopped(self.signum, self._where())

    def _is_over(self, first: float, again: float | None) -> bool:
        """Whether the time is up, for signals at these moments."""
        now = time.monotonic()
        if self._ending:
            return False
        if again is not None and now - again > ENDING_MAY_TAKE_S:
            return True
        return now - first > STEP_MAY_TAKE_S and not self._saving

    def _cut_short(self, signum: int) -> None:
        if not self._ending and self._end_process is not None:
            self._end_process(Stopped(signum, self._where()))


def why_cut_off(took: tuple[int, float] | None, grace_s: float | None) -> str:
    """Returns a warning if a save as long as `took` (step, seconds) would not end within `grace_s` of a
    signal; else, or if either is unknown, an empty string."""
    if took is None or grace_s is None or took[1] <= grace_s:
        return ""
    step, seconds = took
    enough = 10 * math.ceil((2 * seconds + STEP_MAY_TAKE_S) / 10)
    return (
        f"saving step {step} took {seconds:.3g} s, and torchrun kills ranks {grace_s:g} s after SIGTERM, so "
        f"the save of a run that is stopped would be cut off; set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={enough} "
        f"for torchrun, and have SIGTERM sent {enough + 20} s before a time limit."
    )


class _Watch:
    """A thread that sleeps until the first signal, then enforces the time limits."""

    def __init__(self, is_over: Callable[[float, float | None], bool], cut_short: Callable[[int], None]):
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, args=(is_over, cut_short), daemon=True, name="pyr-signals"
        )
        self._thread.start()

    def _run(self, is_over: Callable[[float, float | None], bool], cut_short: Callable[[int], None]) -> None:
        came: list[tuple[float, int]] = []
        while not self._closed:
            if select.select([self._reading], [], [], 0.1 if came else None)[0]:
                for signum in os.read(self._reading, 64):
                    if signum in (signal.SIGINT, signal.SIGTERM):
                        came.append((time.monotonic(), signum))
            if came and is_over(came[0][0], came[1][0] if len(came) > 1 else None):
                cut_short(came[0][1])
                return

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        self._closed = True
        os.write(self._writing, b"\0")
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)
