"""What a step has found out, and when the ranks read it.

With several ranks, or on a CPU, each step ends with one small exchange (`ExchangedFigures`). A rank that is
alone with its device does not wait for it in every step (`LateFigures`): reading a number would wait for all
that the device was given, and it would then idle while the host prepares the next step. So loss and norm stay
there until the log wants them. A step whose loss or gradient is not finite updates nothing, nor does any
after it: the device sees to that, and whoever reads raises.
"""

from __future__ import annotations

import dataclasses
import math
import time

import torch
from torch import Tensor

from pyruntime import comm, ops
from pyruntime.comm import Runtime
from pyruntime.train.device import Device


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """One step, the same on every rank."""

    step: int
    lr: float
    loss: float
    grad_norm: float
    step_time_s: float
    exposed_comm_s: float | None
    memory_bytes: int
    dp_bytes: int | None = None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class ExchangedFigures:
    """Every rank tells all others its [loss, square, exposed seconds, memory, stop request, bytes] in every
    step; with that ends what counts as the step's exposed communication and bytes."""

    is_late = False

    def __init__(self, runtime: Runtime, device: Device):
        self._runtime, self._device = runtime, device
        self.signum = 0
        """Signal that a rank was sent, the same on all; 0: none."""
        self._memory_bytes, self._exposed_s, self._started = 0, 0.0, 0.0
        self._bytes_read = 0
        self._found: StepFigures | None = None

    def begin(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def forget_exposed(self) -> None:
        """What ranks have waited up to now is not the next step's."""
        self._exposed_s = comm.exposed_s()
        self._bytes_read = comm.bytes_read("dp")

    def add(self, step: int, lr: float, loss: Tensor | float, square: Tensor, signum: int) -> float | Tensor:
        """Keeps a step's figures. Returns the gradient's norm, NaN where the loss is not finite."""
        exposed_s = comm.exposed_s()
        # The kernel's figure of the CPU is not exact.
        self._memory_bytes = max(self._memory_bytes, self._device.peak_memory_bytes())
        bytes_read = comm.bytes_read("dp")
        exposed_s, self._exposed_s = exposed_s - self._exposed_s, exposed_s
        read, self._bytes_read = bytes_read - self._bytes_read, bytes_read
        mine = [float(loss), float(square), exposed_s, self._memory_bytes, signum, read]
        told = exchange(mine, self._runtime)
        losses, squares, exposed, memory, stops, reads = told.unbind(-1)
        self.signum = int(stops.max())
        sizes = self._runtime.sizes
        self._found = StepFigures(
            step,
            lr,
            loss=math.fsum(losses[..., 0].flatten().tolist()) / (sizes.dp * sizes.cp),
            grad_norm=math.sqrt(math.fsum(squares.flatten().tolist())),
            step_time_s=0.0,
            exposed_comm_s=None if self._device.is_cuda else float(exposed.max()),
            memory_bytes=int(memory.max()),
            dp_bytes=int(reads.max()) if sizes.dp * sizes.cp > 1 else None,
        )
        return self._found.grad_norm if math.isfinite(self._found.loss) else math.nan

    def read(self) -> list[StepFigures]:
        """The step that was added, with the seconds that it has taken up to now."""
        assert self._found is not None
        return [dataclasses.replace(self._found, step_time_s=time.perf_counter() - self._started)]


class LateFigures:
    """Of a rank that is alone: the steps since the last read() stay on the device."""

    is_late = True

    def __init__(self, device: Device):
        self._device = device
        self.signum = 0
        self._stopped = torch.zeros((), dtype=torch.bool, device=device.device)
        self._steps: list[tuple[int, float]] = []
        self._figures: list[Tensor] = []
        self._started = 0.0

    def begin(self) -> None:
        """A step begins."""
        if not self._steps:
            self._started = time.perf_counter()

    def forget_exposed(self) -> None:
        """A rank alone waits for none."""

    def add(self, step: int, lr: float, loss: Tensor, square: Tensor, signum: int) -> Tensor:
        """Keeps a step's figures. Returns the gradient's norm on the device; NaN from the first step on whose
        loss or norm is not finite."""
        norm = square.sqrt()
        figures = torch.stack([loss.double(), norm])
        self._stopped = self._stopped | figures.isfinite().all().logical_not()
        self._steps.append((step, lr))
        self._figures.append(figures)
        self.signum = signum
        return norm.masked_fill(self._stopped, math.nan)

    def read(self) -> list[StepFigures]:
        """All of them, oldest first, up to the first that is not finite. Waits for the device."""
        if not self._steps:
            return []
        figures = torch.stack(self._figures).tolist()
        seconds = (time.perf_counter() - self._started) / len(self._steps)
        memory = self._device.peak_memory_bytes()
        found = [
            StepFigures(step, lr, loss, norm, seconds, 0.0, memory)
            for (step, lr), (loss, norm) in zip(self._steps, figures, strict=True)
        ]
        self._steps, self._figures = [], []
        bad = next((index for index, each in enumerate(found) if not each.is_finite), len(found))
        return found[: bad + 1]


def exchange(mine: list[float], runtime: Runtime) -> Tensor:
    """The numbers of every rank, float64 [pp, dp, cp, tp, n], on every rank."""
    told = ops.all_gather_stats(torch.tensor(mine, dtype=torch.float64), comm.group_name(runtime.world))
    return runtime.by_axes(told)
