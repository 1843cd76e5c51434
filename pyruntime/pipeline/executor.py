"""Runs a pipeline schedule: one loop over this rank's actions.

Activations and gradients travel between stages through channels of traffic class pp. The receiver makes room
ahead; a send copies into that memory and goes on at once. In a split backward pass (zero bubble) the input's
gradient is computed at once, and the gradients of linear weights when the schedule says. Until then the GEMM
dW = dY^T X waits as data: the linear's backward hands (dY, X) over. dW is written straight into `.grad` or,
with data parallelism, into the memory that is reduced. There a stage's last gradients leave as they are
written, while the rank's other stages and other ranks go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pyruntime.choices import WireFormat
from pyruntime.comm import CommError, Group, group_rank, group_size, post_failure
from pyruntime.comm.channel import Channels
from pyruntime.comm.exchange import first_line
from pyruntime.comm.ranges import marked
from pyruntime.nn.weight_sinks import AddedToGrad
from pyruntime.pipeline.actions import Action, Kind, Route, Schedule, with_transfers
from pyruntime.pipeline.carry import Carry
from pyruntime.pipeline.validate import check
from pyruntime.pipeline.weight_gradients import Deferred, WeightGradients

if TYPE_CHECKING:
    from pyruntime.data_parallel import Sharded

Loss = Callable[[Tensor, int, int], Tensor]
"""(output of the last stage, micro-batch, slice) -> scalar, where the backward pass starts."""
Options = Sequence[Mapping[str, Any]]
"""Keyword arguments of a stage, by micro-batch."""
Shapes = Sequence[Sequence[int]]
"""Shapes of the tensors that travel between stages, by slice."""


class Pipeline:
    """This rank's stages of a model, and the schedule that runs them.

    Args:
        schedule: a schedule for as many ranks as `group` has.
        stages: this rank's stages, by number. A stage is called with the output of the stage that the
            micro-batch visited before, the first one with the inputs of `step`; where sequences are sliced,
            also with a `Carry`. Where the schedule has replicas, their gradients must be summed, as
            `gradients` does.
        group: the pipeline's ranks, in the schedule's order.
        shapes: shapes of the tensors that travel between stages for a micro-batch, one for each slice; all
            with the same last dimension.
        dtype, device: dtype and device of these tensors.
        gradients: the handle of `pyruntime.shard`. If given, it takes the gradients in place of `.grad` and
            reduces them over its ranks.
        wire: format that activations and their gradients are rounded to while they travel between ranks
            (pyruntime/comm/wire.py). The backward pass treats the rounding of an activation as the identity.
        scale_grads: True: gradients are the mean over micro-batches, the default of
            torch.distributed.pipelining. False: their sum, as `backward()` of each micro-batch in turn gives.
            `step` returns the unscaled losses either way.

    Raises ValueError if schedule, stages and group do not fit together, `ScheduleError` for a schedule that
    would not end, CommTimeout and PeerLost. Every rank of the group must make one, with the same schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        group: Group,
        *,
        shapes: Shapes,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        gradients: Sharded | None = None,
        wire: WireFormat = "same",
        scale_grads: bool = False,
    ):
        self.schedule = schedule
        self._rank = group_rank(group)
        if schedule.ranks != group_size(group):
            raise ValueError(
                f"The schedule is for {schedule.ranks} ranks, but the group has {group_size(group)}; make a "
                "schedule for that many."
            )
        if tuple(sorted(stages)) != tuple(schedule.stages_of(self._rank)):
            raise ValueError(
                f"The schedule gives rank {self._rank} of the pipeline the stages "
                f"{list(schedule.stages_of(self._rank))}, but stages= has {sorted(stages)}."
            )
        self._shapes = [tuple(shape) for shape in shapes]
        if len(self._shapes) != schedule.slices or len({shape[-1] for shape in self._shapes}) != 1:
            raise ValueError(
                f"shapes={self._shapes} must have {schedule.slices} shape(s), one for each slice, with the "
                "same last dimension."
            )
        check(schedule)
        self._stages = dict(stages)
        self._grad_scale = 1 / schedule.micro_batches if scale_grads else None
        self._is_broken = False
        most = max(math.prod(shape[:-1]) for shape in self._shapes)
        edges = [
            (rank, schedule.route.peer(action))
            for rank, actions in enumerate(schedule.actions)
            for action in actions
            if action.kind.is_send
        ]
        for replica in range(schedule.replicas):  # of `evaluate`
            ranks = [schedule.placement[stage] for stage in schedule.column(replica)]
            edges += [ends for ends in pairwise(ranks) if ends[0] != ends[1]]
        self._channels = Channels(group, "pp", edges, most, self._shapes[0][-1], dtype, device, wire)
        self._gradients = gradients
        self._actions = schedule.actions[self._rank]
        self._last_gemms = _last_of_stages(self._actions, Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        self._last_passes = _last_of_stages(self._actions, Kind.BACKWARD, Kind.BACKWARD_INPUT)
        if schedule.replicas > 1:
            # A gradient that leaves waits for the other replicas, which may wait, through other stages, for
            # what this rank sends after the pass. Only the first stage sends nothing then.
            first = range(schedule.replicas)
            self._last_passes = frozenset(each for each in self._last_passes if each.stage in first)
        self._taker = AddedToGrad() if gradients is None else gradients
        self._weights = WeightGradients(stages.values(), self._taker)

    def close(self) -> None:
        """Lets autograd accumulate the weights' gradients again."""
        self._weights.close()

    def step(
        self,
        inputs: Sequence[Sequence[Any]] | None,
        loss: Loss | None,
        options: Options = (),
    ) -> list[list[Tensor]]:
        """Runs forward and backward of all micro-batches; adds to `.grad`, or to the `gradients` handle.

        inputs: by micro-batch and slice, on the rank of the first stage. loss: on the rank of the last stage.
        options: on every rank, keyword arguments for all stages, by micro-batch; empty: none. Inputs and
        options of micro-batches that do not come to this rank are not read.
        Returns the detached losses by micro-batch and slice on the rank of the last stage, elsewhere [].

        Raises ValueError if inputs, loss or options that this rank's stages need are missing, or if a stage
        returns another shape than `shapes` says; CommTimeout or PeerLost if another stage does not answer.
        """
        with self._taker.passes():
            run = _StepState(self._shapes, options, self.schedule.route)
            return self._run(self._actions, self.schedule.micro_batches, run, inputs, loss)

    def evaluate(
        self,
        inputs: Sequence[Sequence[Any]] | None,
        loss: Loss | None,
        shapes: Shapes | None = None,
        options: Options = (),
    ) -> list[list[Tensor]]:
        """Runs only forward passes, through all stages, for as many micro-batches as `inputs` has (the same
        number on every rank; 1 for None), in order. Replicas of one number are a pipeline of their own, with
        their own micro-batches. shapes: shapes of these tensors if smaller than the pipeline's. The rest is
        as in `step`."""
        micro_batches = 1 if inputs is None else len(inputs)
        column = self.schedule.column(min(self._stages) % self.schedule.replicas)
        paths = [tuple(column)] * micro_batches
        actions = self._forwards(micro_batches, column, paths)
        run = _StepState(shapes or self._shapes, options, Route(self.schedule.placement, paths))
        return self._run(actions, micro_batches, run, inputs, loss)

    def _forwards(
        self, micro_batches: int, column: range, paths: Sequence[Sequence[int]]
    ) -> Sequence[Action]:
        """Returns this rank's actions without backward passes, through the stages of `column`."""
        slices = list(product(range(micro_batches), range(self.schedule.slices)))
        owned = [set(self.schedule.stages_of(rank)) for rank in range(self.schedule.ranks)]
        computes = [
            [Action(Kind.FORWARD, stage, *one) for one in slices for stage in column if stage in own]
            for own in owned
        ]
        return with_transfers(computes, self.schedule.placement, paths)[self._rank]

    def _run(
        self, actions: Sequence[Action], micro_batches: int, run: _StepState, inputs: Any, loss: Loss | None
    ) -> list[list[Tensor]]:
        if self._is_broken:
            raise RuntimeError("An earlier step of this pipeline ended in an error; make a new Pipeline.")
        try:
            self._check_given(actions, micro_batches, run, inputs, loss)
        except ValueError:
            self._channels.note_failed_pass()
            raise
        self._is_broken = True  # until the end: a step that fails leaves messages in the channels
        self._expect(actions, run)
        losses: list[list[Tensor]] = [[] for _ in range(micro_batches)]
        for action in actions:
            what = f"pp {action.kind.value} of stage {action.stage}, micro-batch"
            with marked(what, str(action.micro_batch)):
                try:
                    self._execute(action, run, inputs, loss, losses)
                except Exception as error:
                    self._tell_all(action, error)
                    raise
        self._is_broken = False
        return losses if any(losses) else []

    def _tell_all(self, action: Action, error: Exception) -> None:
        """Tells the other ranks, which wait for this stage's messages even if a caller catches the error."""
        if self.schedule.ranks > 1 and not isinstance(error, CommError):
            post_failure(
                f"the {action.kind.name.lower().replace('_', ' ')} of stage {action.stage}, micro-batch "
                f"{action.micro_batch}, of its pipeline ended by {type(error).__name__}: {first_line(error)}."
            )

    def _check_given(
        self, actions: Sequence[Action], micro_batches: int, run: _StepState, inputs: Any, loss: Loss | None
    ) -> None:
        slices, options, route = self.schedule.slices, run.options, run.route
        forwards = [each for each in actions if each.kind is Kind.FORWARD]
        begun = {each.micro_batch for each in forwards if route.before(each.stage, each.micro_batch) is None}
        if begun:
            found = None if inputs is None else [len(each) for each in inputs]
            if not found or len(found) != micro_batches or any(found[each] != slices for each in begun):
                raise ValueError(
                    f"Rank {self._rank} has stage 0, which takes inputs of {micro_batches} micro-batches of "
                    f"{slices} slice(s), as inputs[micro_batch][slice]; found {found and len(found)} "
                    f"micro-batches of {found and sorted(set(found))} slices."
                )
        if loss is None and any(route.after(each.stage, each.micro_batch) is None for each in forwards):
            raise ValueError(
                f"Rank {self._rank} has the last stage and needs loss=; pass the loss of that stage's output."
            )
        if options and len(options) != micro_batches:
            raise ValueError(f"options= is for {len(options)} micro-batches, but there are {micro_batches}.")

    def _expect(self, actions: Sequence[Action], run: _StepState) -> None:
        coming: dict[int, list[int]] = {}
        for action in actions:
            if action.kind.is_receive:
                rows = math.prod(run.shapes[action.slice][:-1])
                coming.setdefault(run.route.peer(action), []).append(rows)
        for sender, rows_of in coming.items():
            self._channels.expect(sender, rows_of)

    def _execute(self, action: Action, run: _StepState, inputs: Any, loss: Loss | None, losses: list) -> None:
        key = (action.stage, action.micro_batch, action.slice)
        self._weights.last = action in self._last_gemms
        match action.kind:
            case Kind.RECEIVE_ACTIVATION:
                x = self._channels.receive(run.route.peer(action))
                run.inputs[key] = x.view(run.shapes[action.slice])
            case Kind.RECEIVE_GRADIENT:
                run.gradients[key] = self._channels.receive(run.route.peer(action))
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                self._channels.send(run.route.peer(action), run.outgoing.pop(action))
            case Kind.FORWARD:
                self._forward(action, run, inputs, loss, losses)
            case Kind.BACKWARD:
                self._backward(action, run)
            case Kind.BACKWARD_INPUT:
                with self._weights.deferred() as gemms:
                    self._backward(action, run)
                run.gemms[key] = gemms
            case Kind.BACKWARD_WEIGHT:
                self._weights.take(run.gemms.pop(key))

    def _forward(self, action: Action, run: _StepState, inputs: Any, loss: Loss | None, losses: list) -> None:
        stage, micro_batch, part = key = (action.stage, action.micro_batch, action.slice)
        is_first = run.route.before(stage, micro_batch) is None
        x = inputs[micro_batch][part] if is_first else run.inputs.pop(key).requires_grad_()
        carries = [run.carry(stage, micro_batch).begin(part)] if self.schedule.slices > 1 else []
        y = self._stages[stage](x, *carries, **(run.options[micro_batch] if run.options else {}))
        after = run.route.after(stage, micro_batch)
        if after is None:
            assert loss is not None  # _check_given
            y = loss(y, micro_batch, part)
            losses[micro_batch].append(y.detach())
        else:
            _check_shape(action, run.shapes[part], x, y)
            if self.schedule.placement[after] == self._rank:
                run.inputs[after, micro_batch, part] = y.detach()
            else:
                run.outgoing[action.as_kind(Kind.SEND_ACTIVATION)] = y.detach()
        run.done[key] = (None if is_first else x, y)

    def _backward(self, action: Action, run: _StepState) -> None:
        stage, micro_batch, part = key = (action.stage, action.micro_batch, action.slice)
        x, y = run.done.pop(key)
        roots: list[Tensor] = [y]
        gradients: list[Tensor | None] = [None]
        if run.route.after(stage, micro_batch) is not None:
            gradients = [run.gradients.pop(key).view(y.shape)]
        elif self._grad_scale is not None:
            gradients = [torch.full_like(y, self._grad_scale)]
        if self.schedule.slices > 1:
            more, of_more = run.carry(stage, micro_batch).roots(part)
            roots, gradients = [*roots, *more], [*gradients, *of_more]
        # A first stage whose parameters are all frozen has nothing to differentiate.
        known = [pair for pair in zip(roots, gradients, strict=True) if pair[0].requires_grad]
        taker = self._gradients
        with nullcontext() if taker is None or action in self._last_passes else taker.accumulate():
            if known:
                torch.autograd.backward(*zip(*known, strict=True))
        if x is None:
            return
        gradient, x.grad = x.grad, None
        before = run.route.before(stage, micro_batch)
        assert before is not None  # only a first stage has no input to differentiate
        if self.schedule.placement[before] == self._rank:
            run.gradients[before, micro_batch, part] = gradient
        else:
            run.outgoing[action.as_kind(Kind.SEND_GRADIENT)] = gradient


def _check_shape(action: Action, shape: Sequence[int], x: Any, y: Any) -> None:
    found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
    if found != tuple(shape):
        given = f" was given {tuple(x.shape)} and" if isinstance(x, Tensor) else ""
        raise ValueError(
            f"shapes= says that {tuple(shape)} travels between stages, but stage {action.stage}{given} "
            f"returned {found}, for micro-batch {action.micro_batch}, slice {action.slice}; set shapes= to "
            "the shape that a stage returns for one micro-batch."
        )


def _last_of_stages(actions: Sequence[Action], *kinds: Kind) -> frozenset[Action]:
    """Returns, for each stage, its last action of these kinds."""
    return frozenset({action.stage: action for action in actions if action.kind in kinds}.values())


class _StepState:
    """Tensors that a step keeps between its actions, by (stage, micro-batch, slice)."""

    def __init__(self, shapes: Shapes, options: Options, route: Route) -> None:
        self.shapes, self.options, self.route = shapes, options, route
        self.inputs: dict[tuple, Tensor] = {}
        self.gradients: dict[tuple, Tensor] = {}
        self.outgoing: dict[Action, Tensor] = {}
        """Tensors to send, by the action that sends them."""
        self.done: dict[tuple, tuple[Tensor | None, Tensor]] = {}
        self.gemms: dict[tuple, list[Deferred]] = {}
        self._carries: dict[tuple[int, int], Carry] = {}

    def carry(self, stage: int, micro_batch: int) -> Carry:
        return self._carries.setdefault((stage, micro_batch), Carry())
