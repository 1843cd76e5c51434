"""Steps whose figures are still on the device.

Reading a number from a device waits for all that the device was given, and it would then idle while the host
prepares the next step. So a rank that steps alone leaves loss and norm where they are and reads them all
once per interval of the log. A step whose loss or gradient is not finite updates nothing, nor does any after
it: the device sees to that, and whoever reads raises.
"""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import Tensor

from pyruntime.train.optimizer import clip_on_device


@dataclasses.dataclass(frozen=True)
class ReadStep:
    step: int
    lr: float
    loss: float
    grad_norm: float
    seconds: float
    """Of the interval, over its steps."""


class Unread:
    """Figures of the steps since the last read()."""

    def __init__(self, device: torch.device):
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)
        self._steps: list[tuple[int, float]] = []
        self._figures: list[Tensor] = []
        self._since = 0.0

    def begin(self) -> None:
        """A step begins."""
        if not self._steps:
            self._since = time.perf_counter()

    def add(self, step: int, lr: float, loss: Tensor, squared_norm: Tensor, max_norm: float) -> Tensor:
        """Keeps a step's figures. Returns the factor on its gradients, float32 on the device; NaN from the
        first step on whose loss or norm is not finite."""
        norm = squared_norm.sqrt()
        figures = torch.stack([loss.double(), norm.double()])
        self._stopped = self._stopped | figures.isfinite().all().logical_not()
        self._steps.append((step, lr))
        self._figures.append(figures)
        return clip_on_device(norm, max_norm).masked_fill(self._stopped, float("nan"))

    def read(self) -> list[ReadStep]:
        """All of them, oldest first. Waits for the device."""
        if not self._steps:
            return []
        figures = torch.stack(self._figures).tolist()
        seconds = (time.perf_counter() - self._since) / len(self._steps)
        found = [
            ReadStep(step, lr, loss, norm, seconds)
            for (step, lr), (loss, norm) in zip(self._steps, figures, strict=True)
        ]
        self._steps, self._figures = [], []
        return found
