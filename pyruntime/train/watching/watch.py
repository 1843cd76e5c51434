"""Completes the metrics of a step: MFU, prediction, time left."""

from __future__ import annotations

import dataclasses
import time

from pyruntime.train.metrics import StepMetrics
from pyruntime.train.watching.peak import Peak


class Watch:
    """Completes the metrics of a run of `steps` on `ranks` ranks. flops_per_token: as MFU counts them, see
    `LlamaConfig.flops_per_token`. peak: None if unknown. predicted_step_s: the planner's seconds of a step;
    None if it was not asked."""

    def __init__(
        self,
        steps: int,
        ranks: int,
        flops_per_token: float,
        peak: Peak | None = None,
        predicted_step_s: float | None = None,
    ):
        self._steps, self._ranks, self._predicted_step_s = steps, ranks, predicted_step_s
        self._mfu_of_one = None if peak is None else flops_per_token / peak.flops
        """MFU at one token per second."""
        self._first_step, self._started = 0, 0.0

    def complete(self, measured: StepMetrics, newest: int) -> StepMetrics:
        """Returns the metrics with MFU, prediction and time left. Call it in order of the steps. `newest`:
        the last step that has ended, which may be later, since several steps may be read at once."""
        now = time.monotonic()
        if not self._first_step:
            self._first_step = measured.step
            self._started = now - measured.step_time_s * (newest - measured.step + 1)
        done = newest - self._first_step + 1
        per_second = measured.tokens_per_second
        return dataclasses.replace(
            measured,
            tokens_per_second_per_device=per_second / self._ranks,
            mfu=None if self._mfu_of_one is None else per_second * self._mfu_of_one,
            predicted_step_s=self._predicted_step_s,
            # The pace of this process so far, with validation and checkpoints.
            eta_s=(now - self._started) / done * (self._steps - measured.step),
        )
