"""The figures of a step (loss, gradient norm, waiting, bytes), and when ranks exchange and read them.

With several ranks, or on a CPU, each step ends with one small exchange (`ExchangedFigures`). Replicas that
synchronize rarely exchange their figures only when the log wants them (`RoundFigures`). A single rank with a
GPU leaves loss and norm on the device until then (`LateFigures`): reading a number waits for all queued work,
and the GPU would idle while the host prepares the next step. If a step's loss or gradient is not finite,
neither it nor any later step updates anything: the device ensures that, and the reader raises.

`Guard` finds bad steps from figures that are the same on all ranks.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from pyruntime import comm, ops
from pyruntime.comm import Runtime
from pyruntime.train.device import Device


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """The figures of one step, the same on every rank except for its seconds."""

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
    expert_imbalance: dict[str, float] | None = None
    rank_imbalance: dict[str, float] | None = None
    router_entropy: dict[str, float] | None = None
    balance_loss: float | None = None
    router_z_loss: float | None = None
    rewards_chosen: float | None = None
    rewards_rejected: float | None = None
    rewards_margins: float | None = None
    rewards_accuracies: float | None = None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


AXES = ("tp", "cp", "pp", "dp", "ep", "checkpoint", "all")
"""Axes of `Runtime.exposed_by_axis`, in the order in which ranks exchange their seconds."""
COUNTED = ("dp", "tp", "pp", "cp")
"""Traffic classes whose bytes are counted for each step."""
SPIKE_OVER = 20
"""Steps whose mean gradient norm a spike is compared with."""
MOST_IN_A_ROW = 10
"""Skipped steps in a row at which the run ends."""


class Guard:
    """Finds bad steps: those whose loss or gradient is not finite, and spikes. A spike is a gradient norm
    above `spike_factor` times the mean of the last SPIKE_OVER steps that counted (0: never)."""

    def __init__(self, spike_factor: float):
        self._factor = spike_factor
        self._norms: collections.deque[float] = collections.deque(maxlen=SPIKE_OVER)
        self.skipped = 0
        """Steps so far that updated nothing."""
        self.in_a_row = 0
        """Skipped steps since the last that counted."""

    @property
    def norms(self) -> list[float]:
        """Gradient norms that the next step is compared with."""
        return list(self._norms)

    @property
    def is_lost(self) -> bool:
        """Whether too many steps in a row were skipped."""
        return self.in_a_row >= MOST_IN_A_ROW

    def resume(self, norms: Iterable[float], skipped: int, in_a_row: int) -> None:
        """Continues after steps with these norms, `skipped` skipped steps, and `in_a_row` skipped last."""
        self._norms.extend(norms)
        self.skipped, self.in_a_row = skipped, in_a_row

    def why_bad(self, figures: StepFigures) -> str:
        """Returns why the step is bad, in words that follow "Step 3: "; empty if it is not."""
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
        """Records a step that updated the weights."""
        self.in_a_row = 0
        if self._factor:
            self._norms.append(figures.grad_norm)

    def skip(self) -> None:
        """Records a step that updated nothing."""
        self.skipped += 1
        self.in_a_row += 1


class RankNumbers(Protocol):
    """Numbers that passes count for the figures of a step besides its loss."""

    def take(self) -> Tensor | None:
        """Returns this rank's numbers since the last call, fp64 [n]; None if there are none."""

    def figures(self, ranks: Tensor) -> dict[str, Any]:
        """Returns figures by name, from the numbers of all ranks [ranks, n]."""


class Figures(Protocol):
    """Collects the figures of steps. Each step calls `begin`, then `add`; `read` returns them."""

    signum: int
    """Signal that a rank received, the same on all ranks; 0: none."""

    @property
    def is_late(self) -> bool:
        """Whether `read` may wait for a later step, and then returns several."""

    def begin(self) -> None:
        """Marks the beginning of a step."""

    def forget_exposed(self) -> None:
        """Leaves the waiting up to now out of the next step's figures."""

    def add(self, step: int, lr: float, loss: Tensor, square: Tensor, signum: int) -> float | Tensor:
        """Records a step's figures. Returns the gradient norm; NaN if the step must not update."""

    def own(self) -> StepFigures:
        """Returns this rank's figures of the step added last."""

    def read(self) -> list[StepFigures]:
        """Returns all steps added since the last call, oldest first, up to the first that is not finite.
        Every rank calls it."""


class ExchangedFigures:
    """Exchanges [loss, square, memory, stop request, bytes, exposed shares] between all ranks in every step.
    A step's exposed communication and bytes are those since the previous exchange. watched: whether the waits
    of a device's stream are counted; else their seconds are not known."""

    is_late = False

    def __init__(self, runtime: Runtime, device: Device, watched: bool, load: RankNumbers):
        self._runtime, self._device, self._load = runtime, device, load
        self._knows_exposed = watched or not device.is_gpu
        self.signum = 0
        self._memory_bytes, self._started = 0, 0.0
        self._since, self._exposed_s = time.perf_counter(), _no_seconds()
        self._bytes_read = [0] * len(COUNTED)
        self._found: StepFigures | None = None
        self._shares = _no_seconds()
        """Exposed shares by axis, of the step added last."""

    def begin(self) -> None:
        self._started = time.perf_counter()

    def forget_exposed(self) -> None:
        self._since, self._exposed_s = time.perf_counter(), _exposed(self._runtime)
        self._bytes_read = [comm.bytes_read(each) for each in COUNTED]

    def add(self, step: int, lr: float, loss: Tensor, square: Tensor, signum: int) -> float | Tensor:
        """Returns the norm over all ranks; NaN if the loss is not finite."""
        # First: a device has then done what its waits are counted of.
        *own, loads = _on_host(loss, square, self._load.take())
        until, exposed_s = time.perf_counter(), _exposed(self._runtime)
        # The kernel's figure of a CPU process is not exact, so keep the largest.
        self._memory_bytes = max(self._memory_bytes, self._device.peak_memory_bytes())
        bytes_read = [comm.bytes_read(each) for each in COUNTED]
        shares = (exposed_s - self._exposed_s) / (until - self._since)
        self._since, self._exposed_s = until, exposed_s
        read = [now - before for now, before in zip(bytes_read, self._bytes_read, strict=True)]
        self._bytes_read = bytes_read
        mine = [*own, self._memory_bytes, signum, *read, *shares.tolist()]
        told, loads = exchange([*mine, *loads], self._runtime).split([len(mine), len(loads)], -1)
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
            **self._load.figures(loads.flatten(0, -2)),
        )
        return self._found.grad_norm if math.isfinite(self._found.loss) else math.nan

    def own(self) -> StepFigures:
        assert self._found is not None
        seconds = time.perf_counter() - self._started
        found = dataclasses.replace(self._found, step_time_s=seconds)
        if not self._knows_exposed:
            return found
        exposed_s = self._shares * seconds
        by_axis = _by_axis(exposed_s, self._runtime)
        return dataclasses.replace(found, exposed_comm_s=float(exposed_s.sum()), exposed_by_axis_s=by_axis)

    def read(self) -> list[StepFigures]:
        """Returns the step's figures; its seconds run up to this call."""
        return [self.own()]


class RoundFigures:
    """Figures of replicas that synchronize rarely. The ranks of one replica exchange loss and square in every
    step. The figures of all replicas are exchanged when they are read, at the same steps on all ranks. Loss
    and norm are means over the replicas, memory and bytes maxima, seconds rank 0's.

    inner: the ranks over which a replica's gradients are summed; None: this rank only. outer_stats: seconds
    and bytes of synchronization since the start. counts_apart: `comm` does not count those seconds.
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
        """Number of times that the sum over a replica's ranks counts its loss."""
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
        """Completes the figures of the step added last, unless they are complete."""
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

    def add(self, step: int, lr: float, loss: Tensor, square: Tensor, signum: int) -> float:
        """Returns the norm of this replica's gradient; NaN if its loss is not finite."""
        told = torch.tensor(_on_host(loss, square)[:2], dtype=torch.float64)
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
        """Combines `ranks`, float64 [ranks, NUMBERS]."""
        loss, norm, seconds, since, memory, outer, nbytes = ranks[:, : -len(AXES)].unbind(-1)
        shares = ranks[:, -len(AXES) :] / since[:, None]
        most, step_time_s = _most_exposed(shares), float(seconds[0])
        exposed_s = shares[most] * step_time_s
        found = StepFigures(
            step,
            lr,
            loss=math.fsum(loss.tolist()) / len(ranks),
            grad_norm=math.fsum(norm.tolist()) / len(ranks),
            step_time_s=step_time_s,
            exposed_comm_s=None,
            memory_bytes=int(memory.max()),
            outer_bytes=int(nbytes.max()),
        )
        if self._device.is_gpu:  # its waits are not the host's
            return found
        return dataclasses.replace(
            found,
            exposed_comm_s=float(exposed_s.sum()),
            exposed_by_axis_s=_by_axis(exposed_s, self._runtime),
            outer_exposed_s=float(outer[most] / since[most]) * step_time_s,
        )


class LateFigures:
    """Figures of a single rank, kept on the device until read() is called."""

    is_late = True

    def __init__(self, device: Device, load: RankNumbers):
        self._device, self._load = device, load
        self.signum = 0
        self._stopped = torch.zeros((), dtype=torch.bool, device=device.device)
        self._steps: list[tuple[int, float]] = []
        self._figures: list[Tensor] = []
        self._started = 0.0

    def begin(self) -> None:
        if not self._steps:
            self._started = time.perf_counter()

    def forget_exposed(self) -> None:
        """Does nothing: a single rank waits for no other."""

    def add(self, step: int, lr: float, loss: Tensor, square: Tensor, signum: int) -> Tensor:
        """Returns the norm on the device; NaN from the first step on whose loss or norm is not finite."""
        norm = square.sqrt()
        figures = torch.stack([loss.double(), norm])
        self._stopped = self._stopped | figures.isfinite().all().logical_not()
        self._steps.append((step, lr))
        load = self._load.take()
        self._figures.append(figures if load is None else torch.cat([figures, load]))
        self.signum = signum
        return norm.masked_fill(self._stopped, math.nan)

    def own(self) -> StepFigures:
        """The figures of the step added last, or of the first non-finite one. Waits for the device."""
        return self.read()[-1]

    def read(self) -> list[StepFigures]:
        """Returns the steps since the last call. Waits for the device."""
        if not self._steps:
            return []
        figures = torch.stack(self._figures).tolist()
        seconds = (time.perf_counter() - self._started) / len(self._steps)
        memory = self._device.peak_memory_bytes()
        found = [
            StepFigures(
                step, lr, loss, norm, seconds, 0.0, memory, **self._load.figures(torch.tensor([load]))
            )
            for (step, lr), (loss, norm, *load) in zip(self._steps, figures, strict=True)
        ]
        self._steps, self._figures = [], []
        return _up_to_bad(found)


def _up_to_bad(found: list[StepFigures]) -> list[StepFigures]:
    bad = next((index for index, each in enumerate(found) if not each.is_finite), len(found))
    return found[: bad + 1]


def _on_host(loss: Tensor, square: Tensor, load: Tensor | None = None) -> tuple[float, float, list[float]]:
    """Returns the numbers. Waits for their device, once."""
    both = torch.stack([loss.double(), square])
    loss_, square_, *more = (both if load is None else torch.cat([both, load])).tolist()
    return loss_, square_, more


def _no_seconds() -> Tensor:
    return torch.zeros(len(AXES), dtype=torch.float64)


def _exposed(runtime: Runtime) -> Tensor:
    """Returns this rank's exposed seconds since the start, float64 [AXES]."""
    seconds = runtime.exposed_by_axis()
    return torch.tensor([seconds.get(axis, 0.0) for axis in AXES], dtype=torch.float64)


def _most_exposed(shares: Tensor) -> int:
    """The rank that waited for the largest share of its own time, of [ranks, AXES]. Seconds do not compare:
    steps of ranks begin and end at other times, as on the rank that writes the log."""
    return int(shares.sum(-1).argmax())


def _by_axis(exposed_s: Tensor, runtime: Runtime) -> dict[str, float] | None:
    """Returns the seconds of the axes in use; None if there are none."""
    sizes = {**runtime.sizes._asdict(), "all": runtime.world.size() if runtime.mesh.ndim > 1 else 1}
    seconds = dict(zip(AXES, exposed_s.tolist(), strict=True))
    return {axis: each for axis, each in seconds.items() if each or sizes.get(axis, 1) > 1} or None


def exchange(mine: list[float], runtime: Runtime) -> Tensor:
    """Returns the numbers of every rank on every rank, float64 [pp, dp, cp, tp, n]."""
    told = ops.all_gather_stats(torch.tensor(mine, dtype=torch.float64), comm.group_name(runtime.world))
    return runtime.by_axes(told)
