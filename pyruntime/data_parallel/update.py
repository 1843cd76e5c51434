"""AdamW's arithmetic on this rank's rows: at once, or before it is known whether the step counts.

    update      takes the step of moments, masters and rows
    ahead       writes only what the rows would become, beside them
    keep        makes that step count: the rows become that. If they have a master, moments and master follow
                later, with the next `ahead` in one pass, or in `catch_up`
    forget      makes it not count: nothing has changed

A state that follows later keeps the gradient of its last step: as many bytes as this rank's rows take.

Where states lie, `Resident` says, or `Offloaded` (offload.py), which hands them out a run of elements at a
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from pyruntime.choices import Rounding
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.buckets import Bucket, BucketPart
from pyruntime.ops.attention import statistics_dtype
from pyruntime.ops.layers import adamw_, adamw_ahead_, random_rounding

if TYPE_CHECKING:
    from pyruntime.data_parallel.muon import Matrix

Decay: TypeAlias = float | dict[str, float]


class Resident:
    """Optimizer states in the memory of the rows' device."""

    is_in_file = False

    def zeros(self, rows: Tensor) -> Tensor:
        """Returns memory for one state of these rows, zeros of their shape."""
        return torch.zeros_like(rows, dtype=statistics_dtype(rows))

    def add(self, state: PartState) -> None:
        """Is told of each state whose memory it has made."""

    def runs(self, gradients: Own, writes: bool = True) -> Iterator[list[Run]]:
        """Yields what kernels update at once, of all these parts. writes: whether they change the states."""
        yield [Run.of(state, rows) for state, rows in gradients]

    def settle(self) -> None:
        """Returns when other code may read and write the states."""

    def release(self) -> None:
        """Gives back memory that the states take because other code has read or written them."""


class PartState:
    """One part's rows on this rank, and what they are updated with. moments: names of its running means.
    home: has the memory of its states."""

    def __init__(
        self,
        bucket: Bucket,
        part: BucketPart,
        rows: Tensor,
        decay: Decay,
        with_master: bool,
        moments: Sequence[str] = ("exp_avg", "exp_avg_sq"),
        home: Resident | None = None,
    ):
        self.parameter, self.part, self.rows = bucket.parameters[part.owner], part, rows
        self.axes = bucket.axes
        home = Resident() if home is None else home
        self.moments = {name: home.zeros(rows) for name in moments}
        self.numbers: dict[str, Tensor] = {}
        """Values that a torch optimizer keeps beside moments, the same on every rank."""
        self.matrices: tuple[Matrix, ...] = ()
        """The matrix, or the experts' ones, if Muon updates these rows in place of AdamW."""
        self.first = self.axes.shard.rank * part.lines * bucket.width
        """Index of the rows' first element in the whole part."""
        self.has_master = with_master and rows.dtype != statistics_dtype(rows)
        self.master = rows.new_empty(0, dtype=torch.float32)
        if self.has_master:
            self.master = home.zeros(rows).copy_(rows)
        if isinstance(decay, dict):
            self.decay = decay.get(part.key, 0.0)
        else:
            self.decay = decay if self.parameter.dim() >= 2 else 0.0
        self.steps = 0
        """Steps in which some rank had a gradient."""
        self.ahead: Tensor | None = None
        """The values of the rows if the step under way counts."""
        self.behind: tuple[Tensor, float] | None = None
        """Gradient and learning rate of the last step, if moments and master do not have it yet."""
        layout = getattr(self.parameter, "tp_layout", None)
        self.tp_groups: tuple[str, ...] = () if layout is None else layout.cut_over
        """Groups that the parameter is cut over; empty: every tensor-parallel rank holds it whole."""
        self.is_counted_elsewhere = layout is not None and not layout.is_first


Own: TypeAlias = list[tuple[PartState, Tensor]]
"""Parts of a bucket, and this rank's rows of their gradients, summed over all ranks."""


@dataclass(frozen=True)
class Run:
    """A part's rows, or a run of their elements, with gradient and states, as the kernels take them."""

    state: PartState
    rows: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor
    """Empty without one."""
    ahead: Tensor | None
    earlier: Tensor | None
    """The gradient that is behind."""
    first: int
    """Index of the first element in the whole part."""

    @classmethod
    def of(cls, state: PartState, gradient: Tensor) -> Run:
        moments = state.moments
        earlier = None if state.behind is None else state.behind[0]
        return cls(
            state, state.rows, gradient, moments["exp_avg"], moments["exp_avg_sq"], state.master, state.ahead,
            earlier, state.first,
        )  # fmt: skip


class Update:
    """AdamW's arithmetic. mean: the factor from a gradient's sum to its mean; steps ahead take no other.
    home: where the states lie."""

    goes_ahead = True
    home = Resident()

    def __init__(
        self,
        betas: tuple[float, float],
        eps: float,
        rounding: Rounding,
        mean: float,
        home: Resident | None = None,
    ):
        self._betas, self._eps, self._rounding, self._mean = betas, eps, rounding, mean
        if home is not None:
            self.home = home

    @torch.no_grad()
    def update(self, gradients: Own, lr: float, scale: float | Tensor) -> None:
        """Takes the step. scale: factor of the sum over all ranks."""
        self.catch_up(state for state, _ in gradients)
        for state, _ in gradients:
            state.steps += 1
        for steps, group in _alike(gradients):
            for runs in self.home.runs(group):
                with marked("dp update"):
                    adamw_(
                        [run.rows for run in runs],
                        [run.gradient for run in runs],
                        *_moments(runs),
                        [run.master for run in runs],
                        weight_decay=[run.state.decay for run in runs],
                        step=steps,
                        grad_scale=scale,
                        rounding=self._rounding_of(runs, steps),
                        **self._options(lr),
                    )

    @torch.no_grad()
    def ahead(self, gradients: Own, lr: float) -> None:
        """Writes into `state.ahead` what the rows become if the step counts and nothing is clipped."""
        for state, _ in gradients:
            state.ahead = torch.empty_like(state.rows)
        for steps, group in _alike(gradients):
            earlier = {state.behind[1] for state, _ in group if state.behind is not None}
            states = [state for state, _ in group]
            if len(earlier) > 1 or any(state.behind is None for state in states):
                self.catch_up(states)  # one pass catches up one step only
                earlier = set()
            earlier_lr = earlier.pop() if earlier else 0.0
            for runs in self.home.runs(group, writes=states[0].behind is not None):
                with marked("dp update"):
                    adamw_ahead_(
                        [run.ahead for run in runs if run.ahead is not None],
                        [run.rows for run in runs],
                        [run.gradient for run in runs],
                        *_moments(runs),
                        [run.master for run in runs],
                        [run.earlier for run in runs if run.earlier is not None],
                        weight_decay=[run.state.decay for run in runs],
                        step=steps + 1,
                        grad_scale=self._mean,
                        earlier_lr=earlier_lr,
                        rounding=self._rounding_of(runs, steps + 1),
                        **self._options(lr),
                    )
            for state in states:
                state.behind = None

    @torch.no_grad()
    def keep(self, gradients: Own, lr: float) -> None:
        """Makes the step count that was taken ahead with these gradients."""
        without_master = [each for each in gradients if not each[0].has_master]
        self.update(without_master, lr, self._mean)  # rows that are their own masters
        for state, rows in gradients:
            if state.has_master and state.ahead is not None:
                state.rows.copy_(state.ahead)
                state.behind = rows, lr
                state.steps += 1
        self.forget(state for state, _ in gradients)

    def forget(self, states: Iterable[PartState]) -> None:
        """Forgets the step that was taken ahead."""
        for state in states:
            state.ahead = None

    @torch.no_grad()
    def catch_up(self, states: Iterable[PartState]) -> None:
        """Brings moments and masters up to all steps that count."""
        late: dict[float, Own] = {}
        for state in states:
            if state.behind is not None:
                rows, lr = state.behind
                late.setdefault(lr, []).append((state, rows))
                state.behind = None
        for lr, gradients in late.items():
            for steps, group in _alike(gradients):
                for runs in self.home.runs(group):
                    with marked("dp update"):  # a master is updated as any fp32 parameter
                        adamw_(
                            [run.master for run in runs],
                            [run.gradient for run in runs],
                            *_moments(runs),
                            weight_decay=[run.state.decay for run in runs],
                            step=steps,
                            grad_scale=self._mean,
                            **self._options(lr),
                        )

    def settle(self, states: Iterable[PartState]) -> None:
        """Brings moments and masters up to all steps that count, for other code to read and write."""
        self.catch_up(states)
        self.home.settle()

    def make_states(self) -> None:
        """Does nothing: they exist from the beginning."""

    def loaded(self) -> None:
        """Is told that something was loaded into the states."""

    def _options(self, lr: float) -> dict[str, float]:
        return {"lr": lr, "beta1": self._betas[0], "beta2": self._betas[1], "eps": self._eps}

    def _rounding_of(self, runs: Sequence[Run], steps: int) -> list[tuple[int, int]]:
        if self._rounding == "nearest":
            return []
        return [random_rounding(run.state.part.key, steps, run.first) for run in runs]


class AfterTheNorm(Update):
    """The updates of other optimizers: none is taken ahead of its norm, so nothing is ever behind."""

    goes_ahead = False

    def catch_up(self, states: Iterable[PartState]) -> None:
        """Does nothing: nothing is behind."""

    def settle(self, states: Iterable[PartState]) -> None:
        """Does nothing: states lie in memory."""

    def forget(self, states: Iterable[PartState]) -> None:
        """Does nothing: nothing was taken ahead."""


def _moments(runs: Sequence[Run]) -> tuple[list[Tensor], list[Tensor]]:
    return [run.exp_avg for run in runs], [run.exp_avg_sq for run in runs]


def _alike(gradients: Own) -> Iterable[tuple[int, Own]]:
    """Groups by the steps taken, without parts of which this rank holds no row."""
    groups: dict[int, Own] = {}
    for state, rows in gradients:
        if rows.numel() > 0:
            groups.setdefault(state.steps, []).append((state, rows))
    return groups.items()
