"""Optimizers of shards: every rank updates the rows it holds, as soon as their gradients are there.

Clipping asks for the norm of all gradients before any weight may change. Where the step before was not
clipped, this one is taken ahead of its norm (Qi et al. 2023, arXiv 2401.10241, "bypassing optimizer
synchronization"): what rows become if nothing is clipped is computed when their bucket is reduced, and leaves
for the other ranks. step() has the norm. If it does not clip and is finite, the rows become that; otherwise
nothing has changed but what others were sent, which they are sent again.
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
from pyruntime.data_parallel.update import Own, PartState, Update
from pyruntime.data_parallel.weight_gathers import Gatherer
from pyruntime.data_parallel.written import Handed, load_into
from pyruntime.ops.layers import sum_of_squares


@dataclass(frozen=True)
class Holders:
    """The ranks that hold a parameter, each of which takes the same steps from the sum of their gradients."""

    group: Group
    """Of these ranks, as `pyruntime.ops` takes it."""
    counts: bool
    """Whether this rank is the one that counts the parameter in the norm of all parts."""


Shared = Mapping[nn.Parameter, Holders]
"""Parameters that several parts of a model hold, as the first and the last stage of a pipeline hold tied
embeddings."""


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


Arrived: TypeAlias = dict[int, tuple[Own, Tensor | None]]
"""By bucket, its parts, and marks where these say which parameters got a gradient."""


@dataclass(frozen=True)
class Shards:
    """A sharded model, as its optimizer sees it."""

    weights: Sequence[BucketWeights]
    axes: Axes
    finish_gradients: Callable[[], None]
    """All gradients of the step have been handed to `take()` when it returns."""
    gatherer: Gatherer
    """Is told what has been updated."""
    drop: Callable[[], None]
    """Lets go of gradients."""

    def states(self, with_master: bool) -> dict[int, list[PartState]]:
        """Makes states without moments, for optimizers that keep their own; by id of the bucket."""
        return {
            id(each.bucket): [
                PartState(each.bucket, part, rows, self.axes, 0.0, with_master, moments=())
                for part, rows in zip(each.bucket.parts, each.rows, strict=True)
            ]
            for each in self.weights
        }


class ShardedOptimizer(OneGroup):
    """Steps over the shards of a model: what all optimizers do with gradients, their norm and new weights;
    `Update` has the arithmetic.

    A parameter without a gradient on any rank is left alone, as torch.optim does. The norm of all gradients
    clips as a factor on them. With max_norm=0 and nonfinite="ignore" nobody asks for the norm.

    states: by id of the bucket. momentum: of those that Muon updates. group: what torch's tools see of it.
    Options:

        lr: learning rate of the next step; it may be set, best before the backward pass: one that is set
            after it takes back what was computed ahead.
        max_norm: largest norm of the whole model's gradient, clipped as torch.nn.utils.clip_grad_norm_ clips;
            0: no clipping.
        nonfinite: of a step whose gradient holds NaN or infinity: "raise" NonFiniteGradient, "skip" it, or
            "ignore" that.
        parts: the ranks, this one among them, whose models are the parts of one (the stages of a pipeline):
            the norm is that of all of them.
        shared: parameters that another part has too (tied embeddings): their gradients are summed over
            their holders, and the norm counts them once.

    Raises ValueError for another `nonfinite`, and for shared parameters where buckets are updated during the
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
        """What `state_dict()` gave."""
        self.max_norm = max_norm
        self._nonfinite = nonfinite
        self._axes, self._gatherer = shards.axes, shards.gatherer
        self._finish_gradients = shards.finish_gradients
        self._update, self._states = update, states
        self._parts, self._shared = parts, dict(shared or {})
        self._muon = MuonUpdate(self._states, self._axes, momentum)
        if self._shared and self.at_once:
            raise ValueError(
                "Buckets are updated during the backward pass, where the gradients of parameters that other "
                'parts of the model share cannot be summed; set max_norm, or nonfinite to "raise" or "skip".'
            )
        self._device = self._buckets[0].device
        self._tp_groups = dict.fromkeys([(), *(state.tp_groups for state in self._all_states())])
        self._arrived: Arrived = {}
        self._was_plain = False
        """Whether the last step counted, unclipped: the next one is taken ahead."""
        self._ahead_lr: float | None = None
        """Of the buckets of this step that were; None: there are none."""
        self._held_back = {id(bucket) for bucket in self._buckets if self._has_shared(bucket)}

    def _has_shared(self, bucket: Bucket) -> bool:
        """Whether gradients of other parts of the model are still to be added to the bucket's."""
        return any(parameter in self._shared for parameter in bucket.parameters)

    @property
    def at_once(self) -> bool:
        """Whether a bucket is updated as soon as it is reduced."""
        asks_for_norm = self.max_norm > 0 or self._nonfinite != "ignore" or self._muon
        return self._update.goes_ahead and not asks_for_norm

    def take(self, bucket: Bucket, rows: Sequence[Tensor | None], marks: Tensor | None = None) -> None:
        """A bucket's gradient has come, summed over all ranks: this rank's rows of each part. Those are None
        where there is none, or `marks` says which parameters some rank had one for: bool, where the rows
        are."""
        states = self._states[id(bucket)]
        own = [(state, part) for state, part in zip(states, rows, strict=True) if part is not None]
        if self.at_once:
            self._update.update(with_gradients({0: (own, marks)})[0], self.lr, 1.0 / self._axes.size)
            if bucket.device.type == "cpu":
                self._gatherer.ahead(bucket, [state.rows for state in states])
        elif self._muon.has(bucket) and self._was_plain:
            own = with_gradients({0: (own, marks)})[0]
            self._arrived[id(bucket)] = own, None
            self._muon.begin(id(bucket), own, 1.0 / self._axes.size)
        elif self._goes_ahead(bucket):
            own = with_gradients({0: (own, marks)})[0]
            self._arrived[id(bucket)] = own, None
            self._ahead_lr = self.lr if self._ahead_lr is None else self._ahead_lr
            self._update.ahead(own, self._ahead_lr)
            rows = [state.rows if state.ahead is None else state.ahead for state in states]
            self._gatherer.ahead(bucket, rows)
        else:
            self._arrived[id(bucket)] = own, marks

    def _goes_ahead(self, bucket: Bucket) -> bool:
        """Whether a bucket's step is taken before it is known to count; the same on all ranks."""
        return (
            self._update.goes_ahead
            and self._was_plain
            and self._axes.shard.size > 1
            and bucket.device.type == "cpu"
            and id(bucket) not in self._held_back
            and not self._muon.has(bucket)
        )

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """This rank's part of the square of the norm that `step` takes, float64 where the gradients are:
        those of all ranks of the job add up to it. Reduces what is left of the gradients; every rank calls
        it, and then step() with the norm."""
        self._finish()
        squares = self._squares(lambda state: not state.is_counted_elsewhere)
        whole = torch.stack(list(squares.values())).sum()
        return whole if self._axes.replicate.rank == 0 else torch.zeros_like(whole)

    @torch.no_grad()
    def step(self, grad_norm: float | Tensor | None = None, **others: Any) -> StepReport:
        """Reduces what is left of the gradients, updates the shards and sends the new weights on their way.
        Every rank calls it.

        grad_norm: of the whole model's mean gradient, where the caller has exchanged `squared_norm()` among
        all ranks; by default the ranks exchange it here. One in a Tensor is not read, so that the host does
        not wait for its device: where it is not finite, nothing is updated.

        Raises NonFiniteGradient on every rank, having updated nothing, where nonfinite="raise"; CommTimeout
        or PeerLost.
        """
        if callable(grad_norm) or others:
            raise TypeError(
                "step() takes no closure: gradients come during the backward pass and are updated once; run "
                "the backward pass before it."
            )
        self.check_group()
        if grad_norm is None:
            self._finish()
            if self.at_once:
                self._send_all({})  # each bucket has been updated when it came
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
        """Those that have been reduced."""
        if self.at_once:
            raise RuntimeError(
                "The gradients of this step have been used as they came, since nothing asks for their norm; "
                'to drop some, set max_norm, or nonfinite to "raise" or "skip".'
            )
        self._arrived = {}
        self.take_back()

    def _finish(self) -> None:
        """All gradients have arrived when it returns."""
        self._finish_gradients()
        self._muon.bring()
        if not self._shared:
            return
        for state, rows in self.arrived_rows():
            holders = self._shared.get(state.parameter)
            if holders is not None and rows.numel() > 0:
                rows.copy_(ops.all_reduce(rows.contiguous(), holders.group))

    def arrived_rows(self) -> Iterator[tuple[PartState, Tensor]]:
        """Parts and this rank's rows of their gradients, until step() uses them; in the order of the buckets,
        so that their norm does not depend on which came first."""
        for number in self._states:
            own, _ = self._arrived.get(number, ([], None))
            yield from own

    def _is_counted(self, state: PartState) -> bool:
        """Whether the norm of all parts counts it here."""
        holders = self._shared.get(state.parameter)
        return holders is None or holders.counts

    def _squares(self, counts: Callable[[PartState], bool]) -> dict[tuple[str, ...], Tensor]:
        """Sums of squares of this rank's rows of the mean gradient, by the groups that they are cut over."""
        rows_of: dict[tuple[str, ...], list[Tensor]] = {names: [] for names in self._tp_groups}
        for state, rows in self.arrived_rows():
            if counts(state) and self._is_counted(state):
                rows_of[state.tp_groups].append(rows)
        sums = {names: sum_of_squares(rows, self._device) for names, rows in rows_of.items()}
        return {names: square / self._axes.size**2 for names, square in sums.items()}

    def _of_all_ranks(self, squares: dict[tuple[str, ...], Tensor]) -> float:
        """The square of the norm of the whole model's gradient."""
        total = self._over_shards(torch.stack(list(squares.values())))
        whole = 0.0
        for names, square in zip(squares, total, strict=True):
            for name in names:
                square = ops.all_gather_stats(square, name).sum()
            whole += float(square)
        if self._parts is None:
            return whole
        mine = torch.tensor([whole], dtype=torch.float64)
        return math.fsum(ops.all_gather_stats(mine, self._parts).flatten().tolist())

    def _over_shards(self, sums: Tensor) -> Tensor:
        if self._axes.shard.size == 1:
            return sums
        return ops.all_gather_stats(sums, self._axes.shard.name).sum(0)

    def _nonfinite_keys(self, arrived: Arrived) -> list[str]:
        """Of the parts whose gradient is not finite, the same on all ranks that hold a part of them."""
        found = [each for own, _ in arrived.values() for each in own if self._is_counted(each[0])]
        if not found:
            return []
        sums = self._over_shards(torch.stack([sum_of_squares([rows]) for _, rows in found]))
        for names in self._tp_groups:
            cut = [index for index, (state, _) in enumerate(found) if state.tp_groups == names]
            for name in names:
                sums[cut] = ops.all_gather_stats(sums[cut], name).sum(0)
        finite = sums.isfinite().tolist()
        return [state.part.key for (state, _), good in zip(found, finite, strict=True) if not good]

    def _take_step(self, arrived: Arrived, scale: float | Tensor) -> None:
        """scale: that clips the mean gradient."""
        gradients = with_gradients(arrived)
        arrived.clear()
        if self._muon:
            scale = float(scale)
            if math.isnan(scale):
                self.take_back()
                return
            self._muon.settle(gradients, scale / self._axes.size)
        self._was_plain = _is_plain(scale)
        if self._axes.shard.size == 1:  # no weights are sent: one pass over everything
            together = [each for own in gradients.values() for each in own if each[0].matrix is None]
            self._update.update(together, self.lr, scale / self._axes.size)
            for _, directions in self._muon.directions(self._buckets):
                self._muon.update(directions, self.lr)
            return
        if self._ahead_lr is not None and not (self._was_plain and self._ahead_lr == self.lr):
            self._forget_ahead()
        self._ahead_lr = None
        self._send_all(gradients, scale / self._axes.size)

    def take_back(self) -> None:
        """The step does not count: weights are as before it, on all ranks."""
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
        """Buckets are updated, or what was computed ahead is kept; their rows leave where they have not."""
        if self._axes.shard.size == 1:
            return
        for bucket, directions in self._muon.directions(self._gatherer.update_order()):
            self._muon.update(directions, self.lr)
            own = [each for each in gradients.pop(id(bucket), []) if each[0].matrix is None]
            if own and own[0][0].ahead is not None:
                self._update.keep(own, self.lr)
            else:
                self._update.update(own, self.lr, scale)
            self._gatherer.updated(bucket)  # its new rows leave while the next bucket is updated
        self._gatherer.end_update()

    def state_dict(self) -> dict[str, Tensor]:
        """What the optimizer keeps, fp32 master weights and step counts, as DTensors over this rank's state:
        what is loaded into them counts from the model's next forward pass on. Keys: of AdamW exp_avg.NAME,
        exp_avg_sq.NAME (of Muon's in their place momentum.NAME), of others the names that these give;
        master.NAME, steps.NAME. Of the steps until now: after further ones, ask again."""
        return self.handed.out(self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        self._update.catch_up(self._all_states())
        self._update.make_states()
        result: dict[str, Tensor] = {}
        for state in self._all_states():
            key = state.part.key
            tensors = {**state.moments, "master": state.master}
            for kind, tensor in tensors.items():
                if kind != "master" or state.has_master:
                    result[f"{kind}.{key}"] = as_dtensor(tensor, state.parameter, state.part, self._axes)
            result |= {f"{kind}.{key}": number for kind, number in state.numbers.items()}
            result[f"steps.{key}"] = torch.tensor(state.steps)
        return result

    def loaded(self, state: Mapping[str, Tensor]) -> None:
        """Something was loaded into the tensors of `state_dict()`, `state`: takes up the step counts too."""
        self.handed.forget()
        self.take_back()
        self._update.loaded()
        for one in self._all_states():
            one.behind = None  # what was loaded is all of it
            one.steps = int(state[f"steps.{one.part.key}"])

    def resume(self, steps: int) -> None:
        """Every parameter has taken so many steps; what was loaded into `state_dict()` is of those."""
        self.handed.forget()
        self.take_back()
        self._update.catch_up(self._all_states())
        for one in self._all_states():
            one.steps = steps

    def current(self) -> list[PartState]:
        """This rank's rows of all parameters, with masters and moments of all steps until now. What is then
        written into rows, and first into the masters of those that have one, reaches the model by
        `written()`."""
        self._update.catch_up(self._all_states())
        return list(self._all_states())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """What `state_dict()` of an optimizer of the same parameters gave, on the same ranks or, by DCP, on
        others. Every rank calls it.

        Raises ValueError for other names or shapes."""
        load_into(self._tensors(), state, "This optimizer")
        self.loaded(state)

    @torch.no_grad()
    def take_rows(self) -> None:
        """This rank's rows may have been written: masters that round to other values are theirs, moments
        stay."""
        for state in self.current():
            if state.has_master:
                is_same = state.master.to(state.rows.dtype) == state.rows
                state.master.copy_(torch.where(is_same, state.master, state.rows.to(state.master.dtype)))

    def counts(self, state: PartState) -> bool:
        """Whether a norm over all ranks of the model counts these rows here."""
        return not state.is_counted_elsewhere and self._is_counted(state) and self._axes.replicate.rank == 0

    @torch.no_grad()
    def written(self) -> None:
        """Something was written into what `current()` gave, rows with masters too; before the next backward
        pass. Every rank calls it."""
        self._send_all({})

    def _all_states(self) -> Iterator[PartState]:
        for states in self._states.values():
            yield from states


def _is_plain(scale: float | Tensor) -> bool:
    """Whether nothing is clipped. A device is not asked."""
    return scale == 1 if isinstance(scale, float) else scale.device.type == "cpu" and bool(scale == 1)


def clip_on_device(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that clips, float32 where `norm` is, without waiting for it; NaN where it is not finite."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    return scale.float().masked_fill(norm.isfinite().logical_not(), math.nan)


def with_gradients(arrived: Arrived) -> dict[int, Own]:
    """Without the parts of parameters that no rank had a gradient for. A device is waited for once."""
    marks = {key: tensor for key, (_, tensor) in arrived.items() if tensor is not None}
    flags = iter(torch.cat(list(marks.values())).tolist() if marks else [])
    got = {key: [next(flags) for _ in range(len(tensor))] for key, tensor in marks.items()}
    return {
        key: [each for each in own if key not in got or got[key][each[0].part.owner]]
        for key, (own, _) in arrived.items()
    }
