"""Weights come back as they are read.

In a step every rank writes the new values of its shards, and stages 1 and 2 gather them into the parameters
under the rest of the update and the next forward pass: a few units are always on their way, in the order in
which the first pass read them, and a module waits for the units of its own weights before its forward. Units
with a weight that no module's forward announces are gathered before the step returns.

Stage 3 keeps the whole of a weight only while it is read: gathered before the module's forward and again
before its backward, the next one of the order on its way meanwhile, its memory given back afterwards. The
backward pass of an embedding does not read the table, so it is not gathered again; what the forward pass
reads last stays, as the backward pass begins with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import Axis
from pyruntime.data_parallel.units import Part, Unit
from pyruntime.nn import VocabParallelEmbedding

TABLES = (nn.Embedding, VocabParallelEmbedding)
"""Modules whose backward pass reads no weight."""


class UnitWeights:
    """One unit's parameters, and which rows of them are this rank's.

    apart: this rank's rows have memory of their own, because that of the parameters comes and goes.
    """

    def __init__(self, unit: Unit, axis: Axis, *, apart: bool):
        self.unit, self._axis = unit, axis
        self.is_cut = axis.size > 1
        self._flight: _Gather | None = None
        self.is_current = True
        """The parameters hold the values of all ranks' rows."""
        self._rows = [self._own_rows(part) for part in unit.parts]
        self._apart = apart and self.is_cut
        if self._apart:
            self._rows = [rows.clone() for rows in self._rows]

    def _own_rows(self, part: Part) -> Tensor:
        first = part.first_row + self._axis.rank * part.share
        parameter = self.unit.parameters[part.owner].data
        rows = parameter if parameter.dim() else parameter.view(1)
        count = part.local_rows(self._axis.rank)
        return rows[first : first + count] if count else rows[:0]

    def local_views(self) -> list[Tensor]:
        """This rank's rows of each part, contiguous: what the optimizer updates."""
        return self._rows

    def has_changed(self) -> None:
        """This rank's rows have been written. What is under way holds values of before, and lands first."""
        if self._flight is not None:
            self._axis.complete_up_to(self._flight)
        self.is_current = not self.is_cut

    def begin(self) -> None:
        """The gather is under way when it returns, unless nothing has changed."""
        if self.is_current or self._flight is not None:
            return
        self._axis.make_room()
        self._flight = _Gather(self, self._axis)
        self._axis.add(self._flight)

    def complete(self) -> None:
        """The parameters are current when it returns."""
        self.begin()
        if self._flight is not None:
            self._axis.complete_up_to(self._flight)

    def give(self, gather: _C.LineGather) -> None:
        """Sends this rank's rows."""
        unit = self.unit
        own = [rows.view(-1, unit.width) for rows in self._rows]
        for index, (begin, count) in enumerate(gather.own_chunks()):
            chunk = gather.own(index)
            start = begin % unit.segment_lines
            for part, lines in zip(unit.parts, own, strict=True):
                low, high = max(start, part.offset), min(start + count, part.offset + len(lines))
                if low < high:
                    chunk[low - start : high - start].copy_(lines[low - part.offset : high - part.offset])
            gather.publish(index)

    def take(self, gather: _C.LineGather) -> None:
        """Writes what a flight brought into the parameters."""
        unit = self.unit
        for parameter in unit.parameters:
            _allocate(parameter)
        if self._apart:
            for part, rows in zip(unit.parts, self._rows, strict=True):
                self._own_rows(part).copy_(rows)
        whole = [unit.lines_of(owner, p.data) for owner, p in enumerate(unit.parameters)]
        for index, (begin, count) in enumerate(gather.chunks()):
            chunk = gather.chunk(index)
            for span in unit.spans(begin, count):
                whole[span.owner][span.source : span.source + span.count].copy_(
                    chunk[span.place : span.place + span.count]
                )
        gather.finish()

    def is_under_way(self) -> bool:
        return self._flight is not None

    def of_all_ranks(self, value: list[int]) -> list[list[int]]:
        """The value of every rank that holds a shard."""
        return self._axis.of_all_ranks(value)

    def has_room(self) -> bool:
        """Whether a flight may begin without waiting for another."""
        return self._axis.has_room()

    def landed(self) -> None:
        """What the flight brought has been taken."""
        self._flight = None
        self.is_current = True

    def lost(self) -> None:
        """The flight was dropped."""
        self._flight = None

    def may_be_taken_early(self) -> bool:
        """Whether the parameters have memory before a module reads them."""
        return not self._apart

    def free(self) -> None:
        """Gives the parameters' memory back; their shapes stay."""
        if self._flight is not None:
            self.complete()
        for parameter in self.unit.parameters:
            parameter.untyped_storage().resize_(0)
        self.is_current = False


class _Gather:
    def __init__(self, weights: UnitWeights, axis: Axis):
        self._weights = weights
        unit = weights.unit
        gather = _C.LineGather(axis.name, unit.lines, unit.width, unit.dtype, str(unit.device))
        with marked("dp send weights", unit.name):
            weights.give(gather)
        self._gather: _C.LineGather | None = gather

    def advance(self) -> None:
        if self._gather is not None and self._weights.may_be_taken_early() and self._gather.has_come():
            self._take(self._gather)

    def _take(self, gather: _C.LineGather) -> None:
        with marked("dp take weights", self._weights.unit.name):
            self._weights.take(gather)
        self._gather = None

    def complete(self) -> None:
        if self._gather is not None:
            self._take(self._gather)
        self._weights.landed()

    def drop(self) -> None:
        self._gather = None
        self._weights.lost()


def _allocate(parameter: Tensor) -> None:
    storage = parameter.untyped_storage()
    needed = (parameter.storage_offset() + parameter.numel()) * parameter.element_size()
    if storage.size() < needed:
        storage.resize_(needed)


class Gatherer(ABC):
    """Modules announce which units they are about to read; everything else is gathered before a step
    returns.

    An update of the shards is: update_order(), updated(unit) for every unit in that order, end_update().
    """

    def __init__(self, model: nn.Module, weights: Sequence[UnitWeights]):
        self._weights = list(weights)
        self._of_unit = {id(each.unit): each for each in weights}
        self._order: list[UnitWeights] = []
        """Units in the order in which modules read them first; once a step has been taken, in rank 0's order
        those that modules announced on every rank."""
        self._is_agreed = False
        self._announced: set[int] = set()
        """Ids of the parameters that modules' forwards announced, until ranks agree on the order."""
        self._hooks = [model.register_state_dict_pre_hook(lambda *_: self.complete())]
        unit_of = {id(p): each for each in weights if self._may_wait(each.unit) for p in each.unit.parameters}
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in unit_of]
            if own and unit_of[id(own[0])].is_cut:
                self._watch(module, list(dict.fromkeys(unit_of[id(p)] for p in own)))

    def _may_wait(self, unit: Unit) -> bool:
        """Whether a unit may be gathered when the first module that reads any of it is about to."""
        return len(unit.parameters) == 1

    def _watch(self, module: nn.Module, read: list[UnitWeights]) -> None:
        self._hooks.append(module.register_forward_pre_hook(lambda module, _: self._before(module, read)))

    def _before(self, module: nn.Module, read: list[UnitWeights]) -> None:
        if not self._is_agreed:
            self._announced.update(id(p) for p in module.parameters(recurse=False))
            self._order += [each for each in read if each not in self._order]
        for each in read:
            self._bring(each)

    def _bring(self, each: UnitWeights) -> None:
        """That unit is current when it returns."""
        each.complete()

    def complete(self) -> None:
        """All parameters are current when it returns."""
        for each in self._order:
            self._bring(each)
        for each in self._weights:
            each.complete()

    def loaded(self) -> None:
        """Something was written into this rank's rows; all parameters are current when it returns."""
        self.begin_rest()
        for each in self._weights:
            each.has_changed()
        for each in self._weights:
            each.complete()

    def update_order(self) -> list[Unit]:
        """All units, in the order in which their new values are wanted."""
        if not self._is_agreed:
            self._agree()
        unannounced = [each for each in self._weights if each not in self._order]
        return [each.unit for each in (*unannounced, *self._order)]

    def updated(self, unit: Unit) -> None:
        """This rank's rows of that unit have been written."""
        each = self._of_unit[id(unit)]
        each.has_changed()
        if each in self._order:
            self._announced_changed(each)
        elif each.has_room():
            each.begin()

    def end_update(self) -> None:
        """Every unit has been updated."""
        for each in self._weights:
            if each not in self._order:
                each.complete()

    @abstractmethod
    def _announced_changed(self, each: UnitWeights) -> None:
        """A unit that modules announce has been written; nobody reads it before it is gathered."""

    @abstractmethod
    def begin_rest(self) -> None:
        """Gathers that are still to begin begin now: other flights follow."""

    def close(self) -> None:
        """All parameters are whole and current, and nothing is watched any more."""
        self.complete()
        for hook in self._hooks:
            hook.remove()

    def _agree(self) -> None:
        announced = [
            self._weights.index(each)
            for each in self._order
            if all(id(p) in self._announced for p in each.unit.parameters)
        ]
        of_ranks = self._weights[0].of_all_ranks(announced) if self._weights else [[]]
        # A rank that did not announce a unit may have read it otherwise.
        by_all = set(of_ranks[0]).intersection(*of_ranks)
        self._order = [self._weights[number] for number in of_ranks[0] if number in by_all]
        self._is_agreed = True


class GatherAhead(Gatherer):
    """Stages 1 and 2: the parameters stay; new values come while the modules before them compute.

    Gathers begin in the order that was agreed on, whatever modules a rank's data lead it to."""

    def __init__(self, model: nn.Module, weights: Sequence[UnitWeights]):
        super().__init__(model, weights)
        self._waiting: deque[UnitWeights] = deque()

    def _announced_changed(self, each: UnitWeights) -> None:
        self._waiting.append(each)
        self._fill()

    def end_update(self) -> None:
        super().end_update()
        self._fill()

    def begin_rest(self) -> None:
        while self._waiting:
            self._waiting.popleft().begin()

    def _may_wait(self, unit: Unit) -> bool:
        return True

    def _before(self, module: nn.Module, read: list[UnitWeights]) -> None:
        super()._before(module, read)
        self._fill()

    def _bring(self, each: UnitWeights) -> None:
        while self._waiting and not each.is_current and not each.is_under_way():
            self._waiting.popleft().begin()
        each.complete()

    def _fill(self) -> None:
        """As many units on their way as there is room for."""
        while self._waiting and self._waiting[0].has_room():
            self._waiting.popleft().begin()


class GatherPerUse(Gatherer):
    """Stage 3: a weight is whole from shortly before a module reads it until the module is done.

    keep: the first so many units of the order stay between forward and backward.
    """

    def __init__(self, model: nn.Module, weights: Sequence[UnitWeights], keep: int):
        self._wanted_again: set[int] = set()
        """Units whose place in the order is that of a module that reads them in its backward pass too."""
        self._last: UnitWeights | None = None
        """What the first forward pass read last."""
        super().__init__(model, weights)
        self._keep = keep
        self._in_backward: list[UnitWeights] = []

    def _watch(self, module: nn.Module, read: list[UnitWeights]) -> None:
        again = type(module) not in TABLES  # what is derived may do anything
        self._hooks.append(module.register_forward_pre_hook(lambda *_: self._note(read, again=again)))
        super()._watch(module, read)
        self._hooks.append(
            module.register_forward_hook(lambda _, __, output: self._after(read, output, again=again))
        )

    def _note(self, read: list[UnitWeights], *, again: bool) -> None:
        """A module is about to read them. again: in its backward pass too."""
        if self._is_agreed or torch._C._current_graph_task_id() != -1:
            return
        self._last = read[-1]
        if again:
            self._wanted_again.update(id(each) for each in read if each not in self._order)

    def _announced_changed(self, each: UnitWeights) -> None:
        self._in_backward = []
        each.free()

    def begin_rest(self) -> None:
        """None: weights are gathered where they are used."""

    def _before(self, module: nn.Module, read: list[UnitWeights]) -> None:
        super()._before(module, read)
        if read[-1] in self._order:
            self._prefetch(read[-1], +1)

    def _after(self, read: list[UnitWeights], output: Any, *, again: bool) -> None:
        """again: the module's backward pass reads them too."""
        if again and torch._C._current_graph_task_id() != -1:
            return  # a forward that is computed again for a backward pass, which is about to read them
        read = [each for each in read if each in self._order]  # the others stay whole
        for each in read:
            stays = self._order.index(each) < self._keep or each is self._last
            if not (stays and again and torch.is_grad_enabled()):
                each.free()
        if not again or not read:
            return
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_backward(read))

    def _before_backward(self, read: list[UnitWeights]) -> None:
        """Runs right before the backward of the module; that of the module before it is over."""
        for each in self._in_backward:
            if each not in read:
                each.free()
        self._in_backward = list(read)
        for each in read:
            each.complete()
        self._prefetch(read[0], -1)

    def _prefetch(self, each: UnitWeights, step: int) -> None:
        place = self._order.index(each) + step
        if 0 <= place < len(self._order) and (step > 0 or id(self._order[place]) in self._wanted_again):
            self._order[place].begin()
