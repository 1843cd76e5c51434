"""What a step has found out, and when the ranks read it.

With several ranks, or on a CPU, each step ends with one small exchange (`ExchangedFigures`). Replicas that
train alone for rounds of steps exchange their figures when the log wants them (`RoundFigures`). A rank that
is alone with its device does not wait for it in every step (`LateFigures`): reading a number would wait for
all that the device was given, and it would then idle while the host prepares the next step. So loss and norm
stay there until the log wants them. A step whose loss or gradient is not finite updates nothing, nor does any
after it: the device sees to that, and whoever reads raises.

`Guard` says which steps are bad, from figures that all ranks have alike.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from pyruntime import comm, ops
from pyruntime.comm import Runtime
from pyruntime.train.device import Device


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """One step, the same on every rank but for its seconds."""

    step: int
    lr: float
    loss: float
    grad_norm: float
    step_time_s: float
    exposed_comm_s: float | None
    memory_bytes: int
    exposed_by_axis_s: dict[str, float] | None = None
    outer_exposed_s: float | None = None
    outer_bytes: int | None = None
    dp_bytes: int | None = None
    tp_bytes: int | None = None
    pp_bytes: int | None = None
    cp_bytes: int | None = None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


AXES = ("tp", "cp", "pp", "dp", "checkpoint", "all")
"""Of `Runtime.exposed_by_axis`, in the order in which ranks tell each other what it says."""
COUNTED = ("dp", "tp", "pp", "cp")
"""Classes of traffic whose bytes a step has."""
SPIKE_OVER = 20
"""Steps, whose mean gradient norm a spike is measured by."""
MOST_IN_A_ROW = 10
"""Steps that may be skipped one after the other."""


class Guard:
    """Tells bad steps: those whose loss or gradient is not finite, and spikes, whose gradient norm is above
    `spike_factor` times the mean of the SPIKE_OVER before that counted (0: none is)."""

    def __init__(self, spike_factor: float):
        self._factor = spike_factor
        self._norms: collections.deque[float] = collections.deque(maxlen=SPIKE_OVER)
        self.skipped = 0
        """Steps so far that updated nothing."""
        self.in_a_row = 0
        """Those since the last that counted."""

    @property
    def norms(self) -> list[float]:
        """Of the steps that the next one is compared with."""
        return list(self._norms)

    @property
    def is_lost(self) -> bool:
        """Whether too many steps in a row were skipped."""
        return self.in_a_row >= MOST_IN_A_ROW

    def resume(self, norms: Iterable[float], skipped: int, in_a_row: int) -> None:
        """Goes on after steps with these norms, and so many that were skipped, the last ones in a row."""
        self._norms.extend(norms)
        self.skipped, self.in_a_row = skipped, in_a_row

    def why_bad(self, figures: StepFigures) -> str:
        """Why the step is bad, in words that follow "Step 3: "; empty where it is not."""
        if not figures.is_finite:
            return f"the loss is {figures.loss} and the gradient norm {figures.grad_norm}"
        if not self._factor or len(self._norms) < SPIKE_OVER:
            return ""
        mean = math.fsum(self._norms) / SPIKE_OVER
        if figures.grad_norm <= self._factor * mean:
            return ""
        return (
            f"the gradient norm {figures.grad_norm:.4g} is above optimizer.spike_factor={self._factor:g} "
            f"times the {mean:.4g} of the {SPIKE_OVER} steps before"
        )

    def counted(self, figures: StepFigures) -> None:
        """The step was taken."""
        self.in_a_row = 0
        if self._factor:
            self._norms.append(figures.grad_norm)

    def skip(self) -> None:
        """The step updated nothing."""
        self.skipped += 1
        self.in_a_row += 1


class Figures(Protocol):
    """Collects what steps find. Each step calls `begin`, then `add`; `read` returns what is known of them."""

    signum: int
    """Signal that a rank was sent, the same on all; 0: none."""

    @property
    def is_late(self) -> bool:
        """Whether `read` may be left for a later step, and then returns several."""

    def begin(self) -> None:
        """A step begins."""

    def forget_exposed(self) -> None:
        """What ranks have waited up to now is not the next step's."""

    def add(self, step: int, lr: float, loss: Tensor, square: Tensor, signum: int) -> float | Tensor:
        """Keeps a step's figures. Returns the gradient's norm, NaN where the step must not update."""

    def own(self) -> StepFigures:
        """Of the step that was added last, as this rank has it."""

    def read(self) -> list[StepFigures]:
        """All that were added since the last call, oldest first, up to the first that is not finite. Every
        rank calls it."""


class ExchangedFigures:
    """Every rank tells all others its [loss, square, memory, stop request, bytes] in every step, and what it
    has waited of the time since it told them last: with that ends what counts as the step's exposed
    communication and bytes."""

    is_late = False

    def __init__(self, runtime: Runtime, device: Device):
        self._runtime, self._device = runtime, device
        self.signum = 0
        self._memory_bytes, self._started = 0, 0.0
        self._since, self._exposed_s = time.perf_counter(), _no_seconds()
        self._bytes_read = [0] * len(COUNTED)
        self._found: StepFigures | None = None
        self._shares = _no_seconds()
        """Of the step that was added last, what was exposed by axis."""

    def begin(self) -> None:
        self._started = time.perf_counter()

    def forget_exposed(self) -> None:
        self._since, self._exposed_s = time.perf_counter(), _exposed(self._runtime)
        self._bytes_read = [comm.bytes_read(each) for each in COUNTED]

    def add(self, step: int, lr: float, loss: Tensor | float, square: Tensor, signum: int) -> float | Tensor:
        """Returns the norm over all ranks, NaN where the loss is not finite."""
        until, exposed_s = time.perf_counter(), _exposed(self._runtime)
        # The kernel's figure of the CPU is not exact.
        self._memory_bytes = max(self._memory_bytes, self._device.peak_memory_bytes())
        bytes_read = [comm.bytes_read(each) for each in COUNTED]
        shares = (exposed_s - self._exposed_s) / (until - self._since)
        self._since, self._exposed_s = until, exposed_s
        read = [now - before for now, before in zip(bytes_read, self._bytes_read, strict=True)]
        self._bytes_read = bytes_read
        mine = [float(loss), float(square), self._memory_bytes, signum, *read, *shares.tolist()]
        told = exchange(mine, self._runtime)
        losses, squares, memory, stops, *reads = told[..., : -len(AXES)].unbind(-1)
        of_ranks = told[..., -len(AXES) :].flatten(0, -2)
        self._shares = of_ranks[_most_exposed(of_ranks)]
        of_dp, of_tp, of_pp, of_cp = (int(each.max()) for each in reads)
        self.signum = int(stops.max())
        sizes = self._runtime.sizes
        self._found = StepFigures(
            step,
            lr,
            loss=math.fsum(losses[..., 0].flatten().tolist()) / (sizes.dp * sizes.cp),
            grad_norm=math.sqrt(math.fsum(squares.flatten().tolist())),
            step_time_s=0.0,
            exposed_comm_s=None,
            memory_bytes=int(memory.max()),
            dp_bytes=of_dp if sizes.dp * sizes.cp > 1 else None,
            tp_bytes=of_tp if sizes.tp > 1 else None,
            pp_bytes=of_pp if sizes.pp > 1 else None,
            cp_bytes=of_cp if sizes.cp > 1 else None,
        )
        return self._found.grad_norm if math.isfinite(self._found.loss) else math.nan

    def own(self) -> StepFigures:
        assert self._found is not None
        seconds = time.perf_counter() - self._started
        found = dataclasses.replace(self._found, step_time_s=seconds)
        if self._device.is_cuda:
            return found
        exposed_s = self._shares * seconds
        by_axis = _by_axis(exposed_s, self._runtime)
        return dataclasses.replace(found, exposed_comm_s=float(exposed_s.sum()), exposed_by_axis_s=by_axis)

    def read(self) -> list[StepFigures]:
        """With the seconds that the step has taken up to now."""
        return [self.own()]


class RoundFigures:
    """Of replicas that do not meet in every step: the ranks of one tell each other loss and square in every
    step; what all replicas found is exchanged when it is read, at the same steps on all ranks. A loss or norm
    is the mean over the replicas, memory and bytes are the maximum, seconds rank 0's.

    inner: the ranks over which a replica's gradients are summed; None: this one alone. outer_stats: seconds
    and bytes of the replicas' meetings since the start; counts_apart: `comm` does not count those seconds.
    """

    is_late = True
    NUMBERS = 7 + len(AXES)

    def __init__(
        self,
        runtime: Runtime,
        device: Device,
        inner: comm.Group | None,
        outer_stats: Callable[[], tuple[float, int]],
        counts_apart: bool = False,
    ):
        self._runtime, self._device, self._outer_stats = runtime, device, outer_stats
        self._counts_apart = counts_apart
        axes = [
            axis for axis in (runtime.tp.mesh, runtime.tp_y.mesh, inner, runtime.pp.mesh) if axis is not None
        ]
        self._axes = [axis for axis in axes if comm.group_size(axis) > 1]
        self._sums = (1 if inner is None else comm.group_size(inner)) * runtime.sizes.tp
        """Ranks whose losses add up to that of a replica, as often."""
        self.signum = 0
        self._signal = 0
        self._steps: list[tuple[int, float]] = []
        self._found: list[list[float]] = []
        self._since, self._before = time.perf_counter(), (_no_seconds(), 0.0, 0)
        self._started = 0.0

    def begin(self) -> None:
        self._end_step()
        self._started = time.perf_counter()

    def _end_step(self) -> None:
        """Enters what the step that was added last has taken, unless that is done."""
        if not self._found or len(self._found[-1]) == self.NUMBERS:
            return
        until, memory = time.perf_counter(), self._device.peak_memory_bytes()
        exposed, outer, nbytes = now = self._counted()
        before, self._before = self._before, now
        since, self._since = self._since, until
        self._found[-1] += [
            until - self._started, until - since, memory, outer - before[1], nbytes - before[2],
            *(exposed - before[0]).tolist(),
        ]  # fmt: skip

    def _counted(self) -> tuple[Tensor, float, int]:
        seconds, nbytes = self._outer_stats()
        exposed = _exposed(self._runtime)
        if self._counts_apart:
            exposed[AXES.index("dp")] += seconds
        return exposed, seconds, nbytes

    def forget_exposed(self) -> None:
        self._since, self._before = time.perf_counter(), self._counted()

    def add(self, step: int, lr: float, loss: Tensor | float, square: Tensor, signum: int) -> float:
        """Returns the norm of this replica's gradient, NaN where its loss is not finite."""
        told = torch.tensor([float(loss), float(square)], dtype=torch.float64)
        for axis in self._axes:
            told = ops.all_gather_stats(told, comm.group_name(axis)).sum(0)
        loss, norm = float(told[0]) / self._sums, math.sqrt(float(told[1]))
        self._steps.append((step, lr))
        self._found.append([loss, norm])
        self._signal = signum
        return norm if math.isfinite(loss) else math.nan

    def own(self) -> StepFigures:
        self._end_step()
        return self._figures(*self._steps[-1], torch.tensor(self._found[-1], dtype=torch.float64)[None])

    def read(self) -> list[StepFigures]:
        self._end_step()
        mine = [number for found in self._found for number in found]
        told = exchange([*mine, self._signal], self._runtime).flatten(0, -2)
        self.signum = int(told[:, -1].max())
        of_steps = told[:, :-1].unflatten(1, (len(self._steps), self.NUMBERS)).unbind(1)
        found = [self._figures(*step, each) for step, each in zip(self._steps, of_steps, strict=True)]
        self._steps, self._found = [], []
        return _up_to_bad(found)

    def _figures(self, step: int, lr: float, ranks: Tensor) -> StepFigures:
        """ranks: float64 [ranks, NUMBERS]."""
        loss, norm, seconds, since, memory, outer, nbytes = ranks[:, : -len(AXES)].unbind(-1)
        shares = ranks[:, -len(AXES) :] / since[:, None]
        most, step_time_s = _most_exposed(shares), float(seconds[0])
        exposed_s = shares[most] * step_time_s
        return StepFigures(
            step,
            lr,
            loss=math.fsum(loss.tolist()) / len(ranks),
            grad_norm=math.fsum(norm.tolist()) / len(ranks),
            step_time_s=step_time_s,
            exposed_comm_s=float(exposed_s.sum()),
            memory_bytes=int(memory.max()),
            exposed_by_axis_s=_by_axis(exposed_s, self._runtime),
            outer_exposed_s=float(outer[most] / since[most]) * step_time_s,
            outer_bytes=int(nbytes.max()),
        )


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
        if not self._steps:
            self._started = time.perf_counter()

    def forget_exposed(self) -> None:
        """A rank alone waits for none."""

    def add(self, step: int, lr: float, loss: Tensor, square: Tensor, signum: int) -> Tensor:
        """Returns the norm on the device; NaN from the first step on whose loss or norm is not finite."""
        norm = square.sqrt()
        figures = torch.stack([loss.double(), norm])
        self._stopped = self._stopped | figures.isfinite().all().logical_not()
        self._steps.append((step, lr))
        self._figures.append(figures)
        self.signum = signum
        return norm.masked_fill(self._stopped, math.nan)

    def own(self) -> StepFigures:
        """Of the step that was added last, or the first that is not finite. Waits for the device."""
        return self.read()[-1]

    def read(self) -> list[StepFigures]:
        """Waits for the device."""
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
        return _up_to_bad(found)


def _up_to_bad(found: list[StepFigures]) -> list[StepFigures]:
    """Up to the first that is not finite."""
    bad = next((index for index, each in enumerate(found) if not each.is_finite), len(found))
    return found[: bad + 1]


def _no_seconds() -> Tensor:
    """Of each of AXES."""
    return torch.zeros(len(AXES), dtype=torch.float64)


def _exposed(runtime: Runtime) -> Tensor:
    """Seconds of this rank since the start, float64 [AXES]."""
    seconds = runtime.exposed_by_axis()
    return torch.tensor([seconds.get(axis, 0.0) for axis in AXES], dtype=torch.float64)


def _most_exposed(shares: Tensor) -> int:
    """The rank that has waited for most of its own time, of [ranks, AXES]. Seconds would not do: one rank's
    are not those of another's step, which may begin later, as that of who writes the log."""
    return int(shares.sum(-1).argmax())


def _by_axis(exposed_s: Tensor, runtime: Runtime) -> dict[str, float] | None:
    """Of the axes that there are; None where none is."""
    sizes = {**runtime.sizes._asdict(), "all": runtime.world.size() if runtime.mesh.ndim > 1 else 1}
    seconds = dict(zip(AXES, exposed_s.tolist(), strict=True))
    return {axis: each for axis, each in seconds.items() if each or sizes.get(axis, 1) > 1} or None


def exchange(mine: list[float], runtime: Runtime) -> Tensor:
    """The numbers of every rank, float64 [pp, dp, cp, tp, n], on every rank."""
    told = ops.all_gather_stats(torch.tensor(mine, dtype=torch.float64), comm.group_name(runtime.world))
    return runtime.by_axes(told)
