"""The learning rate of every step."""

from __future__ import annotations

import math

from pyruntime.train.config import Optimizer, warmup_steps


def learning_rate(step: int, steps: int, optimizer: Optimizer) -> float:
    """Learning rate of step `step` (from 1 to `steps`): linear warm-up to the peak, then half a cosine
    downwards.

        step <= warmup:   lr * step / warmup
        later:            lr * (f + (1 - f) * (1 + cos(pi * (step - warmup) / (steps - warmup))) / 2)

    with f = min_lr_fraction, so that step `warmup` has the peak and step `steps` has f times the peak.
    (Loshchilov and Hutter 2017, equation 5, without restarts.)
    """
    warmup = warmup_steps(optimizer, steps)
    if step <= warmup:
        return optimizer.lr * step / warmup
    progress = (step - warmup) / (steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return optimizer.lr * (optimizer.min_lr_fraction + (1 - optimizer.min_lr_fraction) * cosine)
