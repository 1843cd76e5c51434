"""AdamW on shards: every rank updates the rows it holds, as soon as their gradients are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.comm import Group
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import Axes
from pyruntime.data_parallel.shared import Shared
from pyruntime.data_parallel.states import as_dtensor
from pyruntime.data_parallel.units import Part, Unit
from pyruntime.data_parallel.weights import Gatherer, UnitWeights
from pyruntime.ops.attention import statistics_dtype
from pyruntime.ops.layers import adamw_, random_rounding, sum_of_squares

Rounding = Literal["nearest", "stochastic"]
NonFinite = Literal["raise", "skip", "ignore"]


class NonFiniteGradient(RuntimeError):
    """A gradient holds NaN or infinity; `parameters` names them, the same on every rank that has the same
    part of the model."""

    def __init__(self, parameters: Sequence[str]):
        super().__init__(
            f"The gradient of {', '.join(parameters)} is not finite, and nothing was updated; lower the "
            'learning rate, or skip such steps with nonfinite="skip".'
        )
        self.parameters = tuple(parameters)


@dataclass(frozen=True)
class StepReport:
    """What a step found, the same on every rank."""

    grad_norm: float
    """Norm of the whole model's mean gradient before clipping; NaN where nothing asked for it."""
    skipped: bool
    """Whether the gradient was not finite and nothing was updated."""


class _State:
    """One part's rows on this rank: what they are updated with."""

    def __init__(self, unit: Unit, part: Part, rows: Tensor, first: int, with_master: bool):
        self.parameter, self.part, self.rows = unit.parameters[part.owner], part, rows
        self.exp_avg = torch.zeros_like(rows, dtype=statistics_dtype(rows))
        self.exp_avg_sq = torch.zeros_like(rows, dtype=statistics_dtype(rows))
        self.first = first
        """Index of the first element in the whole part."""
        self.has_master = with_master and rows.dtype != statistics_dtype(rows)
        self.master = rows.float() if self.has_master else torch.empty(0)
        self.steps = 0
        """Steps in which some rank had a gradient."""


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter 2019) over the shards of a model, with fp32 moments and, for parameters of
    lower precision, fp32 master weights, or none and stochastic rounding. Made by `Sharded.adamw`.

    A parameter without a gradient on any rank is left alone, as torch.optim does. With max_norm=0 and
    nonfinite="ignore" a unit is updated as soon as its gradient is reduced, during the backward pass;
    otherwise the norm of all gradients comes first.

    finish_gradients() has handed all gradients of the step to take(); `gatherer` is told what has been
    updated. lr is the learning rate of the next step; where units are updated during the backward pass, it is
    read then.
    """

    def __init__(
        self,
        weights: Sequence[UnitWeights],
        axes: Axes,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float | dict[str, float],
        max_norm: float,
        nonfinite: NonFinite,
        rounding: Rounding,
        finish_gradients: Callable[[], None],
        gatherer: Gatherer,
        parts: Group | None,
        shared: Shared,
    ):
        if nonfinite not in ("raise", "skip", "ignore"):
            raise ValueError(f'nonfinite={nonfinite!r} is none of "raise", "skip" and "ignore".')
        self.lr, self.max_norm = lr, max_norm
        self._betas, self._eps, self._decay, self._nonfinite = betas, eps, weight_decay, nonfinite
        self._axes, self._finish_gradients, self._gatherer = axes, finish_gradients, gatherer
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f'rounding={rounding!r} is neither "nearest" nor "stochastic".')
        for each in weights if rounding == "stochastic" else ():
            if each.unit.dtype not in (torch.bfloat16, torch.float32) or each.unit.device.type != "cpu":
                raise ValueError(
                    f"{each.unit.name} is {each.unit.dtype} on {each.unit.device}, and stochastic rounding "
                    'is of bfloat16 weights on the CPU; use rounding="nearest".'
                )
        self._rounding = rounding
        self._parts, self._shared = parts, dict(shared)
        if self._shared and self.at_once:
            raise ValueError(
                "Units are updated during the backward pass, where the gradients of parameters that other "
                'parts of the model share cannot be summed; set max_norm, or nonfinite to "raise" or "skip".'
            )
        self._states = {
            id(each.unit): [
                _State(
                    each.unit,
                    part,
                    rows,
                    first=axes.shard.rank * part.lines * each.unit.width,
                    with_master=rounding == "nearest",
                )
                for part, rows in zip(each.unit.parts, each.local_views(), strict=True)
            ]
            for each in weights
        }
        self._reduced: list[tuple[Unit, Tensor]] = []

    @property
    def at_once(self) -> bool:
        """Whether a unit is updated as soon as it is reduced."""
        return self.max_norm == 0 and self._nonfinite == "ignore"

    def take(self, unit: Unit, gradient: Tensor) -> None:
        """The sum over all ranks of this rank's rows has come."""
        if self.at_once:
            self._update(unit, gradient, unit.got(gradient).tolist(), 1.0)
        else:
            self._reduced.append((unit, gradient))

    @torch.no_grad()
    def step(self) -> StepReport:
        """Reduces what is left of the gradients, updates the shards and sends the new weights on their way.
        Every rank calls it.

        Raises NonFiniteGradient on every rank, having updated nothing, where nonfinite="raise"; CommTimeout
        or PeerLost.
        """
        self._finish_gradients()
        reduced, self._reduced = self._reduced, []
        if self.at_once:
            for unit in self._gatherer.update_order():
                self._gatherer.updated(unit)
            self._gatherer.end_update()
            return StepReport(math.nan, False)
        self._sum_shared(reduced)
        squares = self._squares(reduced)
        norm = math.sqrt(self._of_all_parts(math.fsum(squares.values())))
        if self._nonfinite != "ignore" and not math.isfinite(norm):
            if self._nonfinite == "raise":
                own = [key for key, square in squares.items() if not math.isfinite(square)]
                raise NonFiniteGradient(own or ["a parameter of another stage"])
            return StepReport(norm, True)
        scale = min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm else 1.0
        got = _read_marks(reduced)
        gradients = {id(unit): gradient for unit, gradient in reduced}
        del reduced
        for unit in self._gatherer.update_order():
            self._update(unit, gradients.pop(id(unit)), got[id(unit)], scale)
            self._gatherer.updated(unit)  # its new rows leave while the next unit is updated
        self._gatherer.end_update()
        return StepReport(norm, False)

    def _sum_shared(self, reduced: Iterable[tuple[Unit, Tensor]]) -> None:
        if not self._shared:
            return
        for unit, gradient in reduced:
            for part, rows in zip(unit.parts, self._rows(unit, gradient), strict=True):
                holders = self._shared.get(unit.parameters[part.owner])
                if holders is not None and rows.numel() > 0:
                    rows.copy_(holders.sum(rows))

    def _is_counted(self, parameter: nn.Parameter) -> bool:
        """Whether the norm of all parts counts it here."""
        holders = self._shared.get(parameter)
        return holders is None or holders.counts

    def _of_all_parts(self, square: float) -> float:
        if self._parts is None:
            return square
        mine = torch.tensor([square], dtype=torch.float64)
        return math.fsum(ops.all_gather_stats(mine, self._parts).flatten().tolist())

    def _squares(self, reduced: Iterable[tuple[Unit, Tensor]]) -> dict[str, float]:
        """Sum of squares of the mean gradient of every part of the model, by its name in a state dict."""
        states, own = [], []
        for unit, gradient in reduced:
            for state, rows in zip(self._states[id(unit)], self._rows(unit, gradient), strict=True):
                if self._is_counted(state.parameter):
                    states.append(state)
                    own.append(sum_of_squares([rows]))
        total = torch.stack(own) if own else torch.zeros(0, dtype=torch.float64)
        if self._axes.shard.size > 1:
            total = ops.all_gather_stats(total, self._axes.shard.name).sum(0)
        total = _sum_over_tp(total, states) / self._axes.size**2
        return {state.part.key: value for state, value in zip(states, total.tolist(), strict=True)}

    def _rows(self, unit: Unit, gradient: Tensor) -> list[Tensor]:
        return unit.views(gradient, self._axes.shard.rank)

    @torch.no_grad()
    def _update(self, unit: Unit, gradient: Tensor, got: Sequence[bool], scale: float) -> None:
        by_steps: dict[int, list[tuple[_State, Tensor]]] = {}
        for state, rows in zip(self._states[id(unit)], self._rows(unit, gradient), strict=True):
            if got[state.part.owner]:
                state.steps += 1
                if rows.numel() > 0:  # a rank may hold no row of a small parameter
                    by_steps.setdefault(state.steps, []).append((state, rows))
        for steps, group in by_steps.items():
            self._update_group(steps, group, scale)

    def _update_group(self, steps: int, group: Sequence[tuple[_State, Tensor]], scale: float) -> None:
        states = [state for state, _ in group]
        with marked("dp update"):
            adamw_(
                [state.rows for state in states],
                [rows for _, rows in group],
                [state.exp_avg for state in states],
                [state.exp_avg_sq for state in states],
                [state.master for state in states],
                lr=self.lr,
                beta1=self._betas[0],
                beta2=self._betas[1],
                eps=self._eps,
                weight_decay=[self._decay_of(state) for state in states],
                step=steps,
                grad_scale=scale / self._axes.size,
                rounding=()
                if self._rounding == "nearest"
                else [random_rounding(state.part.key, steps, state.first) for state in states],
            )

    def _decay_of(self, state: _State) -> float:
        if isinstance(self._decay, dict):
            return self._decay.get(state.part.key, 0.0)
        return self._decay if state.parameter.dim() >= 2 else 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """Moments, fp32 master weights and step counts, as DTensors over this rank's state: what is loaded
        into them is loaded into the state. Keys: exp_avg.NAME, exp_avg_sq.NAME, master.NAME, steps.NAME."""
        result: dict[str, Tensor] = {}
        for state in self._all_states():
            key = state.part.key
            tensors = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq, "master": state.master}
            for kind, tensor in tensors.items():
                if kind != "master" or state.has_master:
                    result[f"{kind}.{key}"] = as_dtensor(tensor, state.parameter, state.part, self._axes)
            result[f"steps.{key}"] = torch.tensor(state.steps)
        return result

    def loaded(self, state: Mapping[str, Tensor]) -> None:
        """Something was loaded into the tensors of `state_dict()`, `state`: takes up the step counts too."""
        for one in self._all_states():
            one.steps = int(state[f"steps.{one.part.key}"])

    def resume(self, steps: int) -> None:
        """Every parameter has taken so many steps."""
        for one in self._all_states():
            one.steps = steps

    def _all_states(self) -> Iterator[_State]:
        for states in self._states.values():
            yield from states


def _read_marks(reduced: Sequence[tuple[Unit, Tensor]]) -> dict[int, list[bool]]:
    """By unit, which of its parameters some rank had a gradient for. A device is waited for once."""
    if not reduced:
        return {}
    flags = iter(torch.cat([unit.got(gradient) for unit, gradient in reduced]).tolist())
    return {id(unit): [next(flags) for _ in unit.parameters] for unit, _ in reduced}


def _sum_over_tp(squares: Tensor, states: Sequence[_State]) -> Tensor:
    """What is cut over tensor-parallel ranks is summed over them; what they all hold counts once."""
    groups: dict[str, list[int]] = {}
    for index, state in enumerate(states):
        if getattr(state.parameter, "tp_dim", None) is not None and state.parameter.tp_group_name:
            groups.setdefault(state.parameter.tp_group_name, []).append(index)
    for name, indices in groups.items():
        squares[indices] = ops.all_gather_stats(squares[indices], name).sum(0)
    return squares
