"""Writes the ledger of a training run: the sum of its last steps, and the entries of the last one."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from pyruntime.comm import Runtime
from pyruntime.overlap.account import total
from pyruntime.overlap.files import RankLedger
from pyruntime.overlap.record import Ledger, Stretch

KEPT_STEPS = 21
"""Number of steps that are kept; the first is not summed. Some 100 kB each for a model of four layers."""


class StepLedger:
    """This rank's ledger, with a stretch for each of the last steps and their checkpoints. The first of them
    is left out of the sum if there are others, because a run's first step opens groups and makes buffers."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._steps: deque[tuple[int, Stretch]] = deque(maxlen=KEPT_STEPS)
        self._saves: deque[tuple[int, Stretch]] = deque(maxlen=KEPT_STEPS)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records a step; to be entered around a step without validation and checkpoint."""
        self._ledger.take()
        yield
        self._steps.append((number, self._ledger.take()))

    @contextlib.contextmanager
    def saving(self, number: int) -> Iterator[None]:
        """Records the saving of a checkpoint after step `number`; to be entered around it."""
        self._ledger.take()
        yield
        self._saves.append((number, self._ledger.take()))

    def write(self, run_dir: Path, runtime: Runtime) -> RankLedger | None:
        """Writes this rank's ledger into the run folder and returns it; None if there was no step."""
        if not self._steps:
            return None
        steps = [stretch.read() for _, stretch in self._steps]
        accounts = [stretch.account() for stretch in steps]
        counted = accounts[1:] or accounts
        number, last = self._steps[-1][0], steps[-1]
        saves = [(step, stretch.read()) for step, stretch in self._saves if step >= self._steps[0][0]]
        entries = [*last.entries]
        for step, stretch in saves:
            entries += stretch.entries if step == number else ()
        kept = RankLedger(
            runtime.rank,
            runtime.coordinate._asdict(),
            len(counted),
            total(counted),
            number,
            last.begin,
            last.end,
            last.thread,
            tuple(entries),
            len(saves),
            total([stretch.account() for _, stretch in saves]) if saves else None,
        )
        kept.write(run_dir)
        return kept
