"""Traces single steps with torch.profiler, for ui.perfetto.dev: RUN_DIR/profile/rank-N.json on each rank.

A trace shows the named ranges of layers and axes (`pyruntime.comm.ranges`), and under them torch's operators
and, on a GPU, kernels and copies. A second process in the trace shows the ledger of the same steps: a row
for each axis with its open chunks, and one with waits, copies and sums.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from pyruntime.comm import Runtime
from pyruntime.overlap.account import EntryKind
from pyruntime.overlap.files import RankLedger
from pyruntime.overlap.record import Ledger, Stretch, ledger
from pyruntime.overlap.trace import chrome_trace
from pyruntime.train.errors import TrainingError
from pyruntime.train.ranks import on_every_rank

FOLDER = "profile"


class StepProfile:
    """Records those steps of this rank that are in `steps`, all in one trace."""

    def __init__(self, runtime: Runtime, run_dir: Path, steps: range):
        self._runtime, self._steps = runtime, steps
        self.path = run_dir / FOLDER / f"rank-{runtime.rank}.json"
        self._held = contextlib.ExitStack()
        self._profiler: Any = None
        self._ledger: Ledger | None = None
        self._first, self._began = 0, 0.0

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds a step, on every rank. After the last step to record, all ranks write their trace at the
        same time."""
        if number in self._steps and self._profiler is None:
            self._begin(number)
        yield
        if number == self._steps[-1]:
            on_every_rank(self._runtime.world, "Writing the profile", self.write)

    def _begin(self, number: int) -> None:
        kind = self._runtime.device.type
        self._ledger = self._held.enter_context(ledger(device=self._runtime.device))
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (kind == "cuda")
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._first, self._began = number, time.monotonic()

    def write(self) -> None:
        """Ends the recording, if one is open, and writes it. Raises TrainingError if it cannot be written."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        with self._held:
            profiler.stop()
            stretch = None if self._ledger is None else self._ledger.take().read()
        new = self.path.with_name("new-" + self.path.name)  # torch looks at the suffix
        try:
            self.path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(new))
            trace = json.loads(new.read_text(encoding="utf-8"))
            for event in trace["traceEvents"]:
                if event.get("name") == "process_name" and event["pid"] == os.getpid():
                    event["args"]["name"] = f"rank {self._runtime.rank}"
            if stretch is not None:
                trace["traceEvents"] += self._communication(stretch, trace["traceEvents"])
            new.write_text(json.dumps(trace), encoding="utf-8")
            new.replace(self.path)
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be written: {error.strerror}.") from error

    def _communication(self, stretch: Stretch, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The ledger's entries except operators, which torch records, on the clock of `events`."""
        runtime = self._runtime
        own = RankLedger(
            runtime.rank,
            runtime.coordinate._asdict(),
            len(self._steps),
            stretch.account(),
            self._first,
            self._began,
            stretch.end,
            stretch.thread,
            tuple(entry for entry in stretch.entries if entry.kind is not EntryKind.OP),
        )
        # The first range begins with the recording, up to microseconds.
        name = f"step {self._first}"
        began = next(event["ts"] for event in events if event.get("name") == name)
        process = f"rank {runtime.rank}: communication"
        named = {"ph": "M", "pid": process, "name": "process_name", "args": {"name": process}}
        return [named] + [
            {**event, "pid": process, "ts": event["ts"] + began}
            for event in chrome_trace([own])["traceEvents"]
            if "ts" in event
        ]
