"""Runs bench/netlab once: starts the ranks, causes the faults, and finds the exit code."""

from __future__ import annotations

import errno
import heapq
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from bench.netlab.network import Host, Lab, NetworkError
from bench.netlab.plan import Fault, Plan

KILL_AFTER_S = 5.0  # from SIGTERM to SIGKILL
LOOK_EVERY_S = 0.02  # for the file of --ready


class CannotStart(Exception):
    """Raised if COMMAND could not be started; `code` is the exit code that a shell would give."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def say(sentence: str) -> None:
    print(f"netlab: {sentence}\n", end="", file=sys.stderr, flush=True)  # in one write: ranks write here too


class Interrupts:
    """Records SIGINT and SIGTERM in `received` without ending netlab at any line; `socket` wakes a wait."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    def __enter__(self) -> Interrupts:
        self.socket, self._wakes = socket.socketpair()
        for end in (self.socket, self._wakes):
            end.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._wakes.fileno())
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._handlers_before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def _note(self, number: int, _frame: Any) -> None:
        self.received.append(signal.Signals(number))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self.socket.close()
        self._wakes.close()


@dataclass(frozen=True)
class End:
    """How a rank ended."""

    rank: int
    code: int
    """Exit code as in subprocess: a signal is negative."""
    moment: float
    """Seconds of time.monotonic, which is one clock for all hosts."""
    reason: str
    """Why netlab sent the signal; empty if it did not."""

    @property
    def exit_code(self) -> int:
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        return f"was killed by {_name(-self.code)}" + (f" ({self.reason})" if self.reason else "")


class Run:
    """Starts the ranks, causes the faults, and waits until every rank has ended."""

    def __init__(self, plan: Plan, lab: Lab, interrupts: Interrupts) -> None:
        self._plan, self._lab, self._interrupts = plan, lab, interrupts
        self._running = set(range(plan.world_size))
        self._stopped_for_good: set[int] = set()
        self._sent: dict[tuple[int, int], str] = {}  # (rank, signal): why
        self._ends: list[End] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap: when, a tie-break, what
        self._tie_break = itertools.count()
        self._grace_began = False
        self._faults_from: float | None = None  # the moment from which their times count

    def execute(self) -> int:
        """Runs everything and returns netlab's exit code. Raises CannotStart and NetworkError."""
        if self._interrupts.received:
            say(f"{self._interrupts.received[0].name}: no rank had been started yet.")
            return 128 + self._interrupts.received[0]
        before = self._lab.counters()
        self._start()
        self._began = time.monotonic()
        self._look_for_ready()
        self._wait()
        self._say_how_it_ended()
        if self._plan.counters is not None:
            self._write_counters(before)
        if self._interrupts.received:
            return 128 + self._interrupts.received[0]
        return next((end.exit_code for end in self._ends if end.code), 0)

    def _start(self) -> None:
        logs = None if self._plan.log_dir is None else str(self._plan.log_dir)
        for rank in range(self._plan.world_size):
            environment = self._plan.environment(rank, os.environ)
            host = self._lab.hosts[self._plan.host_of(rank)]
            host.order("start", rank, list(self._plan.command), environment, logs)
        for host in self._lab.hosts:
            awaited = self._plan.ranks_per_host
            while awaited:
                match self._next_report(host):
                    case ("started", _):
                        awaited -= 1
                    case ("not started", rank, number, reason):
                        code = 127 if number == errno.ENOENT else 126
                        raise CannotStart(f"rank {rank} could not be started: {reason}.", code)
                    case ("ended", rank, code, moment):
                        self._note_end(rank, code, moment)
                    case None:
                        raise NetworkError(f"host {host.index} was gone before its ranks had started.")

    def _wait(self) -> None:
        connections = {host.connection: host for host in self._lab.hosts}
        interrupted = 0
        while self._running:
            until_due = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for ready in wait([*connections, self._interrupts.socket], until_due):
                if ready is self._interrupts.socket:
                    self._interrupts.socket.recv(4096)
                elif not self._hear(connections[ready]):
                    del connections[ready]
            for number in self._interrupts.received[interrupted:]:
                self._interrupt(number, again=interrupted > 0)
                interrupted += 1
            while self._running and self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            if self._running and self._running <= self._stopped_for_good:
                self._send(signal.SIGKILL, "stopped for good by --fail, and all other ranks had ended")
                self._stopped_for_good.clear()

    def _hear(self, host: Host) -> bool:
        """Handles one report of a host; returns False if the host is gone."""
        report = self._next_report(host)
        if report is not None:
            self._note_end(*report[1:])
            return True
        lost = self._running & set(self._plan.ranks_of(host.index))
        if lost:
            say(f"host {host.index} is gone: its first process was killed, and with it {_ranks(lost)}.")
        for rank in lost:
            self._note_end(rank, -signal.SIGKILL, time.monotonic())
        return False

    @staticmethod
    def _next_report(host: Host) -> tuple[Any, ...] | None:
        try:
            return host.connection.recv()
        except (EOFError, ConnectionError):
            return None

    def _note_end(self, rank: int, code: int, moment: float) -> None:
        self._running.discard(rank)
        self._ends.append(End(rank, code, moment, self._sent.get((rank, -code), "")))
        # Hosts report on separate connections, so an earlier end may be reported later.
        self._ends.sort(key=lambda end: end.moment)
        if code:
            self._begin_grace()

    def _begin_grace(self) -> None:
        if not self._grace_began:
            self._grace_began = True
            self._at(time.monotonic() + self._plan.grace_s, self._terminate)

    def _terminate(self) -> None:
        say(f"{_ranks(self._running)} did not end within {self._plan.grace_s:g} s (--grace): sent SIGTERM.")
        self._send(signal.SIGTERM, "sent by netlab after --grace")
        kill = "sent by netlab, 5 s after SIGTERM"
        self._at(time.monotonic() + KILL_AFTER_S, lambda: self._send(signal.SIGKILL, kill))

    def _interrupt(self, number: signal.Signals, again: bool) -> None:
        if again:
            say(f"{number.name} again: all ranks are killed.")
            self._send(signal.SIGKILL, f"sent by netlab after {number.name}")
            return
        say(f"{number.name}: passed to all ranks, which have {self._plan.grace_s:g} s (--grace) to end.")
        self._send(number, "passed on by netlab")
        self._begin_grace()

    def _look_for_ready(self) -> None:
        """Starts the clock of the faults if the file of --ready exists; otherwise looks again soon."""
        now = time.monotonic()
        if self._plan.ready is not None and not self._plan.ready.exists():
            self._at(now + LOOK_EVERY_S, self._look_for_ready)
            return
        self._faults_from = now
        for fault in self._plan.faults:
            self._at(now + fault.at_s, partial(self._inject, fault))

    def _inject(self, fault: Fault) -> None:
        if fault.kind != "link" and fault.target not in self._running:
            self._tell(f"rank {fault.target} had already ended, so --fail {fault.text} does nothing.")
            return
        if fault.kind == "link":
            self._lab.set_link(fault.target, up=False)
            self._tell(f"the link of host {fault.target} is down.")
        elif fault.kind == "kill":
            self._send(signal.SIGKILL, "asked for by --fail", [fault.target])
            self._tell(f"rank {fault.target} is killed.")
        else:
            self._send(signal.SIGSTOP, "asked for by --fail", [fault.target])
            self._tell(f"rank {fault.target} is stopped.")
            if fault.for_s is None:
                self._stopped_for_good.add(fault.target)
        if fault.for_s is not None:
            assert self._faults_from is not None
            self._at(self._faults_from + fault.at_s + fault.for_s, partial(self._mend, fault))

    def _mend(self, fault: Fault) -> None:
        if fault.kind == "link":
            self._lab.set_link(fault.target, up=True)
            self._tell(f"the link of host {fault.target} is up again.")
        else:
            self._send(signal.SIGCONT, "asked for by --fail", [fault.target])
            self._tell(f"rank {fault.target} goes on.")

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (moment, next(self._tie_break), action))

    def _send(self, number: signal.Signals, why: str, ranks: Iterable[int] | None = None) -> None:
        """Sends a signal to those of `ranks` (or of all ranks) that still run."""
        for rank in self._running.intersection(self._running if ranks is None else ranks):
            self._sent[rank, number] = why
            self._lab.hosts[self._plan.host_of(rank)].order("signal", int(number), rank)

    def _tell(self, event: str) -> None:
        say(f"{time.monotonic() - self._began:.2f} s: {event}")

    def _say_how_it_ended(self) -> None:
        now = time.monotonic()
        for fault in self._plan.faults:
            if self._faults_from is None or fault.at_s > now - self._faults_from:
                say(f"all ranks had ended before --fail {fault.text}.")
        failed = [
            f"rank {end.rank} on host {self._plan.host_of(end.rank)} {end}" for end in self._ends if end.code
        ]
        if failed:
            say("; then ".join(failed) + ".")

    def _write_counters(self, before: list[tuple[int, int] | None]) -> None:
        """Writes one object a host with the bytes of its interface while the ranks ran."""
        hosts = []
        for host, (start, end) in enumerate(zip(before, self._lab.counters(), strict=True)):
            sent, received = (
                (b - a for a, b in zip(start, end, strict=True)) if start and end else (None, None)
            )
            rate = self._plan.rates[host]
            hosts.append(
                {"host": host, "rate_bits_per_s": rate, "sent_bytes": sent, "received_bytes": received}
            )
        document = {"seconds": time.monotonic() - self._began, "hosts": hosts}
        assert self._plan.counters is not None
        self._plan.counters.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal has no name


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
