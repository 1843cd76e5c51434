"""The ledger of a training run: the sum of its last steps and the entries of the last, in the run folder."""

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
"""Of which the first is left out of the sum; some 100 kB each for a model of four layers."""


class StepLedger:
    """This rank's ledger, a stretch for each of the last steps and of their checkpoints. A run's first step
    opens groups and makes buffers: it is left out of the sum where there are others."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._steps: deque[tuple[int, Stretch]] = deque(maxlen=KEPT_STEPS)
        self._saves: deque[tuple[int, Stretch]] = deque(maxlen=KEPT_STEPS)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, without validation and checkpoint."""
        self._ledger.take()
        yield
        self._steps.append((number, self._ledger.take()))

    @contextlib.contextmanager
    def saving(self, number: int) -> Iterator[None]:
        """Around the saving of a checkpoint after a step."""
        self._ledger.take()
        yield
        self._saves.append((number, self._ledger.take()))

    def write(self, run_dir: Path, runtime: Runtime) -> RankLedger | None:
        """Keeps this rank's ledger in the run folder; None where no step was taken."""
        if not self._steps:
            return None
        accounts = [stretch.account() for _, stretch in self._steps]
        counted = accounts[1:] or accounts
        number, last = self._steps[-1]
        saves = [stretch for step, stretch in self._saves if step >= self._steps[0][0]]
        entries = [*last.entries]
        for step, stretch in self._saves:
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
            total([stretch.account() for stretch in saves]) if saves else None,
        )
        kept.write(run_dir)
        return kept
