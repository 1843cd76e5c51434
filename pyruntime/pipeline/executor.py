"""Runs a schedule: one loop over this rank's actions.

What travels between stages goes through channels of traffic class pp. Room for what comes is made ahead, and
a send is a copy into memory that leaves by itself. Backward passes that are split (zero bubble) compute the
gradient of their input at once and that of their linear weights when the schedule says: a linear's backward
hands (dY, X) over, and the product dW = dY^T X waits as data, written straight into `.grad`, or, where the
model is data parallel, into what is reduced. There the last gradients of a stage leave as they are written,
while this rank's other stages, and those of other ranks, go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pyruntime.comm import Group, group_rank, group_size
from pyruntime.comm.channel import Channels
from pyruntime.comm.ranges import marked
from pyruntime.pipeline.actions import Action, Kind, Schedule, with_transfers
from pyruntime.pipeline.slices import Carry
from pyruntime.pipeline.validate import check
from pyruntime.pipeline.weight_gradients import Product, WeightGradients

Loss = Callable[[Tensor, int, int], Tensor]
"""(output of the last stage, micro-batch, slice) -> scalar, of which the backward pass is taken."""


class Gradients(Protocol):
    """Takes gradients instead of `.grad`: the handle of `pyruntime.shard`, which says more."""

    def passes(self) -> AbstractContextManager[None]:
        """Around a step."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Around a backward pass that is not its parameters' last in a step."""

    def add_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor, *, last: bool) -> None:
        """Adds dY^T X to the gradient of `weight`."""


class Pipeline:
    """This rank's stages of a model, and the schedule that runs them.

    Args:
        schedule: for as many ranks as `group` has.
        stages: this rank's, by number. A stage is called with the output of the one before, the first one
            with what `step` is given; where sequences are sliced, also with a `Carry`.
        group: the pipeline's ranks, in the order of the schedule's.
        shapes: of what travels between stages for a micro-batch, one for each slice; all with the same last
            dimension.
        dtype, device: of what travels.
        gradients: takes them instead of `.grad`, where they are reduced over further ranks.

    Raises ValueError where schedule, stages and group do not fit together, `ScheduleError` for a schedule
    that would not end, CommTimeout and PeerLost. Every rank of the group makes one alike.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        group: Group,
        *,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        gradients: Gradients | None = None,
    ):
        self.schedule = schedule
        self._rank = group_rank(group)
        if schedule.ranks != group_size(group):
            raise ValueError(
                f"The schedule is for {schedule.ranks} ranks and the group has {group_size(group)}; make it "
                "for as many."
            )
        if tuple(sorted(stages)) != tuple(schedule.stages_of(self._rank)):
            raise ValueError(
                f"The schedule gives rank {self._rank} the stages {list(schedule.stages_of(self._rank))}, "
                f"and it was given {sorted(stages)}."
            )
        self._shapes = [tuple(shape) for shape in shapes]
        if len(self._shapes) != schedule.slices or len({shape[-1] for shape in self._shapes}) != 1:
            raise ValueError(
                f"shapes={self._shapes} must be {schedule.slices}, one for each slice, with the same last "
                "dimension."
            )
        check(schedule)
        self._stages = dict(stages)
        self._is_broken = False
        most = max(math.prod(shape[:-1]) for shape in self._shapes)
        edges = [
            (rank, schedule.placement[action.counterpart.stage])
            for rank, actions in enumerate(schedule.actions)
            for action in actions
            if action.kind.is_send
        ]
        self._channels = Channels(group, "pp", edges, most, self._shapes[0][-1], dtype, device)
        self._gradients = gradients
        self._lasts = _last_passes(schedule.actions[self._rank])
        self._weights = WeightGradients(stages.values(), self._take_product if gradients else None)

    def close(self) -> None:
        """Gives the weights' gradients back to autograd."""
        self._weights.close()

    def _take_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor, last: bool) -> None:
        assert self._gradients is not None
        self._gradients.add_product(weight, dy, x, last=last)

    def step(self, inputs: Sequence[Sequence[Any]] | None, loss: Loss | None) -> list[list[Tensor]]:
        """Forward and backward of all micro-batches; gradients are added to `.grad`, or taken.

        inputs: by micro-batch and slice, on the rank of the first stage. loss: on the rank of the last one.
        Returns the losses by micro-batch and slice there, detached, and nothing elsewhere.

        Raises CommTimeout or PeerLost where another stage does not come.
        """
        actions = self.schedule.actions[self._rank]
        with ExitStack() as stack:
            if self._gradients is not None:
                stack.enter_context(self._gradients.passes())
            return self._run(actions, self.schedule.micro_batches, inputs, loss)

    def evaluate(
        self,
        inputs: Sequence[Sequence[Any]] | None,
        loss: Loss | None,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Tensor]]:
        """Forward passes alone, of as many micro-batches as `inputs` has (on every rank alike), in their
        order. shapes: as the pipeline was given them, where these are smaller. Otherwise as `step`."""
        micro_batches = 1 if inputs is None else len(inputs)
        trained, self._shapes = self._shapes, [tuple(shape) for shape in shapes or self._shapes]
        try:
            return self._run(self._forwards(micro_batches), micro_batches, inputs, loss)
        finally:
            self._shapes = trained

    def _forwards(self, micro_batches: int) -> Sequence[Action]:
        """This rank's actions of forward passes alone."""
        computes = [
            [
                Action(Kind.FORWARD, stage, micro_batch, part)
                for micro_batch in range(micro_batches)
                for part in range(self.schedule.slices)
                for stage in self.schedule.stages_of(rank)
            ]
            for rank in range(self.schedule.ranks)
        ]
        return with_transfers(computes, self.schedule.placement)[self._rank]

    def _run(
        self, actions: Sequence[Action], micro_batches: int, inputs: Any, loss: Loss | None
    ) -> list[list[Tensor]]:
        if self._is_broken:
            raise RuntimeError("An earlier step of this pipeline ended in an error; make the pipeline anew.")
        self._is_broken = True  # unless all goes well: messages of a step that ends early stay on their way
        run = _Run()
        self._expect(actions)
        losses: list[list[Tensor]] = [[] for _ in range(micro_batches)]
        for action in actions:
            what = f"pp {action.kind.value} of stage {action.stage}, micro-batch"
            with marked(what, str(action.micro_batch)):
                self._execute(action, run, inputs, loss, losses)
        self._is_broken = False
        return losses if any(losses) else []

    def _expect(self, actions: Sequence[Action]) -> None:
        coming: dict[int, list[int]] = {}
        for action in actions:
            if action.kind.is_receive:
                lines = math.prod(self._shapes[action.slice][:-1])
                coming.setdefault(self._peer(action), []).append(lines)
        for sender, lines_of in coming.items():
            self._channels.expect(sender, lines_of)

    def _peer(self, action: Action) -> int:
        return self.schedule.placement[action.counterpart.stage]

    def _execute(self, action: Action, run: _Run, inputs: Any, loss: Loss | None, losses: list) -> None:
        key = (action.stage, action.micro_batch, action.slice)
        match action.kind:
            case Kind.RECEIVE_ACTIVATION:
                run.inputs[key] = self._channels.receive(self._peer(action)).view(self._shapes[action.slice])
            case Kind.RECEIVE_GRADIENT:
                run.gradients[key] = self._channels.receive(self._peer(action))
            case Kind.SEND_ACTIVATION:
                self._channels.send(self._peer(action), run.outgoing.pop(("activation", *key)))
            case Kind.SEND_GRADIENT:
                self._channels.send(self._peer(action), run.outgoing.pop(("gradient", *key)))
            case Kind.FORWARD:
                self._forward(key, run, inputs, loss, losses)
            case Kind.BACKWARD:
                self._weights.last = action in self._lasts.products
                self._backward(action, run)
            case Kind.BACKWARD_INPUT:
                with self._weights.deferred() as products:
                    self._backward(action, run)
                run.products[key] = products
            case Kind.BACKWARD_WEIGHT:
                self._weights.last = action in self._lasts.products
                self._weights.take(run.products.pop(key))

    def _forward(self, key: tuple, run: _Run, inputs: Any, loss: Loss | None, losses: list) -> None:
        stage, micro_batch, part = key
        x = inputs[micro_batch][part] if stage == 0 else run.inputs.pop(key).requires_grad_()
        sliced = self.schedule.slices > 1
        arguments = [x]
        if sliced:
            arguments.append(run.carry(stage, micro_batch).begin(part))
        y = self._stages[stage](*arguments)
        if stage + 1 == self.schedule.stages:
            assert loss is not None
            y = loss(y, micro_batch, part)
            losses[micro_batch].append(y.detach())
        elif self.schedule.placement[stage + 1] == self._rank:
            run.inputs[stage + 1, micro_batch, part] = y.detach()
        else:
            run.outgoing["activation", *key] = y.detach()
        run.done[key] = (x if stage > 0 else None, y)

    def _backward(self, action: Action, run: _Run) -> None:
        stage, micro_batch, part = key = (action.stage, action.micro_batch, action.slice)
        x, y = run.done.pop(key)
        roots, gradients = [y], [None]
        if stage + 1 < self.schedule.stages:
            gradients = [run.gradients.pop(key).view(y.shape)]
        if self.schedule.slices > 1:
            more, of_more = run.carry(stage, micro_batch).roots(part)
            roots, gradients = [*roots, *more], [*gradients, *of_more]
        # A first stage whose parameters are all frozen has nothing to differentiate.
        known = [pair for pair in zip(roots, gradients, strict=True) if pair[0].requires_grad]
        with ExitStack() as stack:
            if self._gradients is not None and action not in self._lasts.passes:
                stack.enter_context(self._gradients.accumulate())
            if known:
                torch.autograd.backward(*zip(*known, strict=True))
        if x is None:
            return
        gradient, x.grad = x.grad, None
        if self.schedule.placement[stage - 1] == self._rank:
            run.gradients[stage - 1, micro_batch, part] = gradient
        else:
            run.outgoing["gradient", *key] = gradient


class _Lasts(NamedTuple):
    """The last actions of each stage that bring gradients: of linear weights, and of all other parameters."""

    products: frozenset[Action]
    passes: frozenset[Action]


def _last_passes(actions: Sequence[Action]) -> _Lasts:
    def last(*kinds: Kind) -> frozenset[Action]:
        return frozenset({action.stage: action for action in actions if action.kind in kinds}.values())

    return _Lasts(
        products=last(Kind.BACKWARD, Kind.BACKWARD_WEIGHT), passes=last(Kind.BACKWARD, Kind.BACKWARD_INPUT)
    )


class _Run:
    """What a step holds between its actions, by (stage, micro-batch, slice)."""

    def __init__(self) -> None:
        self.inputs: dict[tuple, Tensor] = {}
        self.gradients: dict[tuple, Tensor] = {}
        self.outgoing: dict[tuple, Tensor] = {}
        self.done: dict[tuple, tuple[Tensor | None, Tensor]] = {}
        self.products: dict[tuple, list[Product]] = {}
        self._carries: dict[tuple[int, int], Carry] = {}

    def carry(self, stage: int, micro_batch: int) -> Carry:
        return self._carries.setdefault((stage, micro_batch), Carry())
