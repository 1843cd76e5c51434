"""Records every step while a run continues: metrics, ledger and trace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pyruntime.comm import Runtime
from pyruntime.comm.launcher import grace_s
from pyruntime.overlap.record import ledger
from pyruntime.overlap.steps import StepLedger
from pyruntime.train.config import RunConfig, steps_of
from pyruntime.train.disk import writing
from pyruntime.train.loop import Trainer
from pyruntime.train.metrics import StepMetrics
from pyruntime.train.progress import Progress
from pyruntime.train.ranks import told_to_all
from pyruntime.train.signals import Stopped, why_cut_off
from pyruntime.train.watching.sinks import Sink
from pyruntime.train.watching.step_profile import StepProfile
from pyruntime.train.watching.watch import Watch


class StepLog:
    """Shows every step and writes it to `sinks`, completed by `watch`. Every rank has one; only rank 0's has
    sinks and prints what `say` gets."""

    def __init__(self, watch: Watch, progress: Progress, say: Callable[[str], None], sinks: Sequence[Sink]):
        self._watch, self._progress, self._say, self._sinks = watch, progress, say, sinks
        self._of_replicas, self._cut_off, self._grace = "", "", grace_s(os.environ)

    def add(self, measured: StepMetrics, trainer: Trainer) -> None:
        """Adds one step. Raises TrainingError, on all ranks, if a sink cannot be written."""
        step, said = self._watch.complete(measured, trainer.step), self._of_replicas
        self._of_replicas = "" if trainer.outer is None else trainer.outer.describe()
        if self._of_replicas != said:
            self._say(self._of_replicas)
        if not self._cut_off and (cut_off := why_cut_off(trainer.save_took, self._grace)):
            self._cut_off = cut_off
            self._say(cut_off)
        for sink in self._sinks:
            with told_to_all(), writing(sink.path, trainer.what_is_saved()):
                sink.write(step)
        self._progress.show(step)
        for news in (*(step.slow or ()), *filter(None, (step.moved,))):
            self._say(f"step {step.step}: {news['sentence']}")


@contextlib.contextmanager
def recorded(
    config: RunConfig, runtime: Runtime, run_dir: Path
) -> Iterator[tuple[StepLedger | None, StepProfile | None]]:
    """Yields the ledger of train.ledger and the profile of train.profile, or None. A stopped run writes
    both."""
    with contextlib.ExitStack() as held:
        steps = StepLedger(held.enter_context(ledger(device=runtime.device))) if config.train.ledger else None
        asked = config.train.profile
        profile = StepProfile(runtime, run_dir, steps_of(asked)) if asked else None
        try:
            yield steps, profile
        except Stopped:
            if profile is not None:
                profile.write()
            if steps is not None:
                steps.write(run_dir, runtime)
            raise
