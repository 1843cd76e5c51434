"""Optimizers over shards: every rank updates the rows that it holds, as soon as their gradients arrive.

Clipping needs the norm of all gradients before any weight may change. If the step before was not clipped,
this one is taken ahead of its norm (Qi et al. 2023, arXiv 2401.10241, "bypassing optimizer synchronization").
When a bucket is reduced, its rows without clipping are computed and leave for the other ranks. step() has the
norm. If it is finite and does not clip, those rows become the weights. Otherwise nothing has changed on this
rank, and the other ranks are sent the right rows again.

On devices the marks that say which parameters got a gradient are read only in step(): the host would wait for
every bucket. A step is taken ahead as if the parameters of the step before had got theirs again, and taken
back if not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.choices import NonFinite, check_value, values
from pyruntime.comm import Group
from pyruntime.data_parallel.axes import Axes
from pyruntime.data_parallel.bucket_weights import BucketWeights
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.data_parallel.muon import MuonUpdate
from pyruntime.data_parallel.one_group import OneGroup
from pyruntime.data_parallel.states import as_dtensor
from pyruntime.data_parallel.update import Own, PartState, Resident, Update
from pyruntime.data_parallel.weight_gathers import Gatherers
from pyruntime.data_parallel.written import Handed, load_into
from pyruntime.ops.layers import sum_of_squares


@dataclass(frozen=True)
class Holders:
    """The ranks that hold a parameter. Each takes the same steps, from the sum of their gradients."""

    group: Group
    """The group of these ranks, as `pyruntime.ops` takes it."""
    counts: bool
    """Whether this rank counts the parameter in the norm of all parts; one of them does."""


Shared = Mapping[nn.Parameter, Holders]
"""Parameters that several parts of a model hold, such as tied embeddings in a pipeline's end stages."""


class NonFiniteGradient(RuntimeError):
    """A gradient holds NaN or infinity. `parameters` names them, the same on every rank with the same part of
    the model."""

    def __init__(self, parameters: Sequence[str]):
        super().__init__(
            f"The gradient of {', '.join(parameters)} is not finite, and nothing was updated; lower the "
            'learning rate, or skip such steps with nonfinite="skip".'
        )
        self.parameters = tuple(parameters)


@dataclass(frozen=True)
class StepReport:
    """The findings of a step, the same on every rank."""

    grad_norm: float
    """Norm of the whole model's mean gradient before clipping; NaN if nothing needed it."""
    skipped: bool
    """Whether the gradient was not finite and nothing was updated."""


Kind: TypeAlias = tuple[Axes, tuple[str, ...]]
"""The axes that cut and replicate rows, and the groups that the parameter is cut over."""
Arrived: TypeAlias = dict[int, tuple[Own, Tensor | None]]
"""The parts of each bucket with their gradients, and marks if these have yet to say which are there."""


@dataclass(frozen=True)
class Shards:
    """A sharded model as its optimizer sees it."""

    weights: Sequence[BucketWeights]
    axes: Axes
    """The model's, over whose ranks gradients are averaged."""
    finish_gradients: Callable[[], None]
    """Waits until all gradients of the step have been handed to `take()`."""
    gatherer: Gatherers
    """Is told which buckets were updated."""
    drop: Callable[[], None]
    """Drops gradients."""

    def states(self, with_master: bool) -> dict[int, list[PartState]]:
        """Makes states without moments, for optimizers that keep their own; by id of the bucket."""
        return {
            id(each.bucket): [
                PartState(each.bucket, part, rows, 0.0, with_master, moments=())
                for part, rows in zip(each.bucket.parts, each.rows, strict=True)
            ]
            for each in self.weights
        }


class ShardedOptimizer(OneGroup):
    """Steps over the shards of a model. It handles gradients, their norm and new weights for all optimizers;
    `Update` has the arithmetic.

    A parameter without a gradient on any rank is not changed, as in torch.optim. Clipping is a factor on all
    gradients. With max_norm=0 and nonfinite="ignore" no norm is computed.

    states: by id of the bucket. momentum: Muon's. group: options that torch's tools see.
    Options:

        lr: learning rate of the next step. Set it before the backward pass: if it is set later, what was
            computed ahead is discarded.
        max_norm: largest norm of the whole model's gradient, clipped as torch.nn.utils.clip_grad_norm_ clips;
            0: no clipping.
        nonfinite: what a step does if its gradient holds NaN or infinity: "raise" NonFiniteGradient, "skip"
            the step, or "ignore" it.
        parts: the ranks, this one among them, whose models are parts of one model (the stages of a
            pipeline); the norm is that of all parts.
        shared: parameters that another part has too (tied embeddings). Their gradients are summed over their
            holders, and the norm counts them once.

    Raises ValueError for another `nonfinite`, and for shared parameters if buckets are updated during the
    backward pass.
    """

    def __init__(
        self,
        shards: Shards,
        update: Update,
        states: dict[int, list[PartState]],
        *,
        group: dict[str, Any],
        momentum: float = 0.0,
        max_norm: float = 0.0,
        nonfinite: NonFinite = "raise",
        parts: Group | None = None,
        shared: Shared | None = None,
    ):
        check_value("nonfinite", nonfinite, values(NonFinite))
        self._buckets = [each.bucket for each in shards.weights]
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        super().__init__(parameters, shards.drop, **group)
        self.handed = Handed()
        """The tensors that `state_dict()` returned."""
        self.max_norm = max_norm
        self._nonfinite = nonfinite
        self._axes, self._gatherer = shards.axes, shards.gatherer
        self._finish_gradients = shards.finish_gradients
        self._update, self._states = update, states
        self._parts, self._shared = parts, dict(shared or {})
        self._muon = MuonUpdate(self._states, momentum)
        if self._shared and self.at_once:
            raise ValueError(
                "Gradients of shared parameters (tied weights) are summed after the backward pass, so no "
                'bucket may be updated during it; set max_norm, or nonfinite to "raise" or "skip".'
            )
        self._device = self._buckets[0].device
        self._kinds = dict.fromkeys([(self._axes, ()), *(_kind(state) for state in self._all_states())])
        self._is_cut = any(bucket.axes.shard.size > 1 for bucket in self._buckets)
        self._arrived: Arrived = {}
        self._was_plain = False
        """Whether the last step counted, unclipped; then the next one is taken ahead."""
        self._got: dict[int, list[bool]] = {}
        """Which parameters got a gradient in the last step, by id of the bucket, if its marks are on a
        device."""
        self._ahead_lr: float | None = None
        """The learning rate of buckets that were taken ahead in this step; None: there are none."""
        self._held_back = {id(bucket) for bucket in self._buckets if self._has_shared(bucket)}

    def _has_shared(self, bucket: Bucket) -> bool:
        """Whether gradients of other parts of the model are still to be added to the bucket's."""
        return any(parameter in self._shared for parameter in bucket.parameters)

    @property
    def home(self) -> Resident:
        """Where the states lie."""
        return self._update.home

    @property
    def at_once(self) -> bool:
        """Whether nothing is asked for that needs the norm. Then a bucket is updated as soon as it is
        reduced; if its marks are on a device, its step is taken ahead."""
        asks_for_norm = self.max_norm > 0 or self._nonfinite != "ignore" or self._muon
        return self._update.goes_ahead and not asks_for_norm

    def take(self, bucket: Bucket, rows: Sequence[Tensor | None], marks: Tensor | None = None) -> None:
        """Takes a bucket's gradient, summed over all ranks: this rank's rows of each part. Rows without a
        gradient are None, or `marks` says which parameters got one on some rank (bool, on that device)."""
        states = self._states[id(bucket)]
        own = [(state, part) for state, part in zip(states, rows, strict=True) if part is not None]
        if self.at_once and _can_read(marks):
            self._update.update(with_gradients({0: (own, marks)})[0], self.lr, 1.0 / self._axes.size)
            self._gatherer.ahead(bucket, [state.rows for state in states])
        elif self._muon.has(bucket) and self._was_plain:
            if bucket.device.type == "cpu":  # to read marks, the host would wait for a device
                own, marks = with_gradients({0: (own, marks)})[0], None
            self._arrived[id(bucket)] = own, marks
            self._muon.begin(id(bucket), own, 1.0 / self._axes.size)
        elif self._goes_ahead(bucket) and (_can_read(marks) or id(bucket) in self._got):
            got = None if _can_read(marks) else {0: self._got[id(bucket)]}
            now = with_gradients({0: (own, marks)}, got)[0]
            self._arrived[id(bucket)] = (now, None) if got is None else (own, marks)
            self._ahead_lr = self.lr if self._ahead_lr is None else self._ahead_lr
            self._update.ahead(now, self._ahead_lr)
            rows = [state.rows if state.ahead is None else state.ahead for state in states]
            self._gatherer.ahead(bucket, rows)
        else:
            self._arrived[id(bucket)] = own, marks

    def _goes_ahead(self, bucket: Bucket) -> bool:
        """Whether a bucket's step is taken before it is known to count; the same on all ranks."""
        return (
            self._update.goes_ahead
            and self._was_plain
            and bucket.axes.shard.size > 1
            and id(bucket) not in self._held_back
            and not self._muon.has(bucket)
        )

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """Returns this rank's part of the square of the norm that `step` takes, float64 on the gradients'
        device: the parts of all ranks of the job add up to it. Reduces the remaining gradients. Every rank
        calls it, and then step() with the norm."""
        self._finish()
        squares = self._squares(lambda state: not state.is_counted_elsewhere)
        counted = [
            square if axes.replicate.rank == 0 else torch.zeros_like(square)
            for (axes, _), square in squares.items()
        ]
        return torch.stack(counted).sum()

    @torch.no_grad()
    def step(self, grad_norm: float | Tensor | None = None, **others: Any) -> StepReport:
        """Reduces the remaining gradients, updates the shards and sends the new weights. Every rank calls it.

        grad_norm: norm of the whole model's mean gradient, if the caller has exchanged `squared_norm()` among
            all ranks; by default the ranks exchange it here. A Tensor is not read, so that the host does not
            wait for its device; if it is not finite, nothing is updated.

        Raises NonFiniteGradient on every rank, with nothing updated, if nonfinite="raise"; TypeError for a
        closure; CommTimeout or PeerLost."""
        if callable(grad_norm) or others:
            raise TypeError(
                "step() takes no closure: gradients come during the backward pass and are updated once; run "
                "the backward pass before it."
            )
        self.check_group()
        if grad_norm is None:
            self._finish()
            if self.at_once:
                arrived, self._arrived = self._arrived, {}
                self._take_step(arrived, 1.0)  # most buckets were updated when they arrived
                return StepReport(math.nan, False)
            grad_norm = math.sqrt(self._of_all_ranks(self._squares(lambda state: True)))
        arrived, self._arrived = self._arrived, {}
        if isinstance(grad_norm, Tensor):
            self._take_step(arrived, clip_on_device(grad_norm, self.max_norm))
            return StepReport(math.nan, False)
        if self._nonfinite != "ignore" and not math.isfinite(grad_norm):
            self.take_back()
            if self._nonfinite == "raise":
                raise NonFiniteGradient(self._nonfinite_keys(arrived) or ["a parameter of another stage"])
            return StepReport(grad_norm, True)
        scale = min(1.0, self.max_norm / (grad_norm + 1e-6)) if self.max_norm else 1.0
        self._take_step(arrived, scale)
        return StepReport(grad_norm, False)

    def drop_gradients(self) -> None:
        """Drops the gradients that were reduced. Raises RuntimeError if they have been used already."""
        if self.at_once:
            raise RuntimeError(
                "The gradients of this step have updated weights as they came, because nothing needs their "
                'norm; to drop some, set max_norm, or nonfinite to "raise" or "skip".'
            )
        self._arrived = {}
        self.take_back()

    def _finish(self) -> None:
        """Waits for all gradients, and sums those of shared parameters over their holders."""
        self._finish_gradients()
        self._muon.bring()
        if not self._shared:
            return
        for state, rows in self.arrived_rows():
            holders = self._shared.get(state.parameter)
            if holders is not None and rows.numel() > 0:
                rows.copy_(ops.all_reduce(rows.contiguous(), holders.group))

    def arrived_rows(self) -> Iterator[tuple[PartState, Tensor]]:
        """Yields parts and this rank's rows of their gradients, until step() uses them. The order is that of
        the buckets, so that the norm does not depend on arrival."""
        for number in self._states:
            own, _ = self._arrived.get(number, ([], None))
            yield from own

    def _is_counted(self, state: PartState) -> bool:
        """Whether this rank counts the parameter in the norm of all parts."""
        holders = self._shared.get(state.parameter)
        return holders is None or holders.counts

    def _squares(self, counts: Callable[[PartState], bool]) -> dict[Kind, Tensor]:
        """Returns sums of squares of this rank's rows of the mean gradient, by how they are cut."""
        rows_of: dict[Kind, list[Tensor]] = {kind: [] for kind in self._kinds}
        for state, rows in self.arrived_rows():
            if counts(state) and self._is_counted(state):
                rows_of[_kind(state)].append(rows)
        sums = {kind: sum_of_squares(rows, self._device) for kind, rows in rows_of.items()}
        return {kind: square / self._axes.size**2 for kind, square in sums.items()}

    def _of_all_ranks(self, squares: dict[Kind, Tensor]) -> float:
        """Returns the square of the norm of the whole model's gradient."""
        kinds = list(squares)
        total = self._over_shards(torch.stack(list(squares.values())), [axes for axes, _ in kinds])
        found = []
        for (_, names), square in zip(kinds, total, strict=True):
            for name in names:
                square = ops.all_gather_stats(square, name).sum()
            found.append(square)
        whole = sum(torch.stack(found).tolist())  # waits for a device once
        if self._parts is None:
            return whole
        mine = torch.tensor([whole], dtype=torch.float64)
        return math.fsum(ops.all_gather_stats(mine, self._parts).flatten().tolist())

    def _over_shards(self, sums: Tensor, axes: Sequence[Axes]) -> Tensor:
        """Returns the sums of all ranks that share the rows; axes: of each of `sums`."""
        every = list(dict.fromkeys(axes))
        totals = [
            ops.all_gather_stats(sums, each.shard.name).sum(0) if each.shard.size > 1 else sums
            for each in every
        ]
        if len(every) == 1:
            return totals[0]
        return torch.stack([totals[every.index(each)][place] for place, each in enumerate(axes)])

    def _nonfinite_keys(self, arrived: Arrived) -> list[str]:
        """Returns the keys of parts whose gradient is not finite, alike on all ranks with rows of them."""
        found = [each for own, _ in arrived.values() for each in own if self._is_counted(each[0])]
        if not found:
            return []
        squares = torch.stack([sum_of_squares([rows]) for _, rows in found])
        sums = self._over_shards(squares, [state.axes for state, _ in found])
        for kind in self._kinds:
            cut = [index for index, (state, _) in enumerate(found) if _kind(state) == kind]
            for name in kind[1]:
                sums[cut] = ops.all_gather_stats(sums[cut], name).sum(0)
        finite = sums.isfinite().tolist()
        return [state.part.key for (state, _), good in zip(found, finite, strict=True) if not good]

    def _take_step(self, arrived: Arrived, scale: float | Tensor) -> None:
        """Takes the step. scale: factor that clips the mean gradient."""
        got = read_marks(arrived)
        gradients = with_gradients(arrived, got)
        late = {key: got[key] for key, (_, marks) in arrived.items() if not _can_read(marks)}
        is_as_before = all(self._got.get(key, flags) == flags for key, flags in late.items())
        self._got |= late
        arrived.clear()
        is_plain = _is_plain(scale)
        if self._muon:
            self._muon.settle(gradients, (1.0 if is_plain else scale) / self._axes.size)
        self._was_plain = is_plain and is_as_before
        if not self._is_cut:  # no weights are sent: one pass over everything
            together = [each for own in gradients.values() for each in own if not each[0].matrices]
            self._update.update(together, self.lr, scale / self._axes.size)
            for _, directions in self._muon.directions(self._buckets):
                self._muon.update(directions, self.lr)
            return
        if self._ahead_lr is not None and not (self._was_plain and self._ahead_lr == self.lr):
            self._forget_ahead()
        self._ahead_lr = None
        self._send_all(gradients, scale / self._axes.size)

    def take_back(self) -> None:
        """Cancels the step: weights are as before it, on all ranks."""
        self._was_plain = False
        self._muon.forget()
        if self._ahead_lr is not None:
            self._ahead_lr = None
            self._forget_ahead()
            self._send_all({})

    def _forget_ahead(self) -> None:
        self._gatherer.take_back()
        self._update.forget(self._all_states())

    def _send_all(self, gradients: dict[int, Own], scale: float | Tensor = 1.0) -> None:
        """Updates buckets, or keeps what was computed ahead, and sends rows that have not left."""
        if not self._is_cut:
            return
        for bucket, directions in self._muon.directions(self._gatherer.update_order()):
            self._muon.update(directions, self.lr)
            own = [each for each in gradients.pop(id(bucket), []) if not each[0].matrices]
            if own and own[0][0].ahead is not None:
                self._update.keep(own, self.lr)
            else:
                self._update.update(own, self.lr, scale)
            self._gatherer.updated(bucket)  # its new rows leave while the next bucket is updated
        self._gatherer.end_update()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what the optimizer keeps, with fp32 master weights and step counts, as DTensors over this
        rank's state. Values loaded into them count from the model's next forward pass on. Keys: for AdamW
        exp_avg.NAME and exp_avg_sq.NAME, for Muon's matrices momentum.NAME, for other optimizers their own
        names; master.NAME, steps.NAME. The tensors are of the steps so far: call it again after more."""
        return self.handed.out(self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        self._update.settle(self._all_states())
        self._update.make_states()
        result: dict[str, Tensor] = {}
        for state in self._all_states():
            key = state.part.key
            tensors = {**state.moments, "master": state.master}
            for kind, tensor in tensors.items():
                if kind != "master" or state.has_master:
                    result[f"{kind}.{key}"] = as_dtensor(tensor, state.parameter, state.part, state.axes)
            result |= {f"{kind}.{key}": number for kind, number in state.numbers.items()}
            result[f"steps.{key}"] = torch.tensor(state.steps)
        return result

    def loaded(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what was loaded into `state`, the tensors of `state_dict()`, with the step counts."""
        self.handed.forget()
        self.take_back()
        self._update.loaded()
        for one in self._all_states():
            one.behind = None  # what was loaded is complete
            one.steps = int(state[f"steps.{one.part.key}"])

    def resume(self, steps: int) -> None:
        """Sets every parameter's step count to that of what was loaded into `state_dict()`."""
        self.handed.forget()
        self.take_back()
        self._update.settle(self._all_states())
        for one in self._all_states():
            one.steps = steps

    def current(self) -> list[PartState]:
        """Returns this rank's rows of all parameters, with masters and moments of all steps so far. Writes
        into rows, and first into the masters of those that have one, reach the model by `written()`."""
        self._update.settle(self._all_states())
        return list(self._all_states())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads what `state_dict()` of an optimizer of the same parameters returned, on the same ranks or, by
        DCP, on others. Every rank calls it.

        Raises ValueError for other names or shapes."""
        load_into(self._tensors(), state, "This optimizer")
        self.loaded(state)

    @torch.no_grad()
    def take_rows(self) -> None:
        """Updates masters after writes into rows: one that rounds to another value becomes the row's. Moments
        stay."""
        for state in self.current():
            if state.has_master:
                rows = state.rows.to(state.master.device)
                is_same = state.master.to(rows.dtype) == rows
                state.master.copy_(torch.where(is_same, state.master, rows.to(state.master.dtype)))

    def counts(self, state: PartState) -> bool:
        """Whether this rank counts these rows in a norm over all ranks of the model."""
        return not state.is_counted_elsewhere and self._is_counted(state) and state.axes.replicate.rank == 0

    @torch.no_grad()
    def written(self) -> None:
        """Sends what was written into the result of `current()`, into rows with masters too. Every rank calls
        it, before the next backward pass."""
        self._send_all({})

    def _all_states(self) -> Iterator[PartState]:
        for states in self._states.values():
            yield from states


def _kind(state: PartState) -> Kind:
    return state.axes, state.tp_groups


def _is_plain(scale: float | Tensor) -> bool:
    """Whether nothing is clipped; False for a scale on a device, which is not read. Then no step is taken
    ahead: the host, which enqueues what is sent, would not know what to send again."""
    return scale == 1 if isinstance(scale, float) else scale.device.type == "cpu" and bool(scale == 1)


def clip_on_device(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the factor that clips, float32, without waiting for the norm's device; NaN if not finite."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    return scale.float().masked_fill(norm.isfinite().logical_not(), math.nan)


def _can_read(marks: Tensor | None) -> bool:
    """Whether the host can read these marks without waiting for a device."""
    return marks is None or marks.device.type == "cpu"


def read_marks(arrived: Arrived) -> dict[int, list[bool]]:
    """Returns which parameters of buckets with marks got a gradient. Waits for a device once."""
    marks = {key: tensor for key, (_, tensor) in arrived.items() if tensor is not None}
    flags = iter(torch.cat(list(marks.values())).tolist() if marks else [])
    return {key: [next(flags) for _ in range(len(tensor))] for key, tensor in marks.items()}


def with_gradients(arrived: Arrived, got: Mapping[int, Sequence[bool]] | None = None) -> dict[int, Own]:
    """Drops the parts of parameters that no rank had a gradient for. got: what marks say; by default, they
    are read."""
    got = read_marks(arrived) if got is None else got
    return {
        key: [each for each in own if key not in got or got[key][each[0].part.owner]]
        for key, (own, _) in arrived.items()
    }
