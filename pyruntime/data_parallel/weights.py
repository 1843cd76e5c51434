"""Weights come back as they are read.

Stages 1 and 2 gather new values into the parameters. They leave as soon as a rank has computed its rows:
during the backward pass, in the order in which buckets are reduced, while gradients leave first; what has not
left when the step counts leaves in the order in which the first pass read it, a few buckets at a time. A
module waits for the buckets of its own weights before its forward. Buckets with a weight that no module's
forward announces are gathered before the step returns.

Stage 3 keeps the whole of a weight only while it is read: gathered before the module's forward and again
before its backward, the next ones of the order on their way meanwhile, its memory given back afterwards; the
first ones leave when they have been updated. What travels of a matrix may be rounded: then all ranks compute
with the rounded values, and who has the rows keeps them as they are. The backward pass of an embedding does
not read the table, so it is not gathered again; what the forward pass reads last stays, as the backward pass
begins with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.comm.wire import Wire, WireFormat
from pyruntime.data_parallel.away import AwayWeight, give_back, own_memory, take_back
from pyruntime.data_parallel.axes import MOST_FLIGHTS, PLACES, Axis
from pyruntime.data_parallel.buckets import Bucket, Part
from pyruntime.nn import VocabParallelEmbedding


def _reads_again(module: nn.Module) -> bool:
    """Whether the module's backward pass reads its weights too. What is derived may do anything."""
    return type(module) not in (nn.Embedding, VocabParallelEmbedding)


class BucketWeights:
    """One bucket's parameters, and which rows of them are this rank's. Under way it is a flight of its axis.

    apart: this rank's rows have memory of their own, because that of the parameters comes and goes. wire: of
    a matrix that is alone and apart, what its rows travel as; this rank's are rounded alike in the parameter.
    """

    def __init__(self, bucket: Bucket, axis: Axis, *, apart: bool, wire: WireFormat = "same"):
        self.bucket, self.axis = bucket, axis
        self._exact = Wire("same", bucket.width, bucket.dtype, bucket.device)
        self._rounding = self._exact
        if bucket.is_matrix:
            self._rounding = Wire(wire, bucket.width, bucket.dtype, bucket.device)
        self._wire = self._rounding
        """Of the gather that is under way."""
        self.is_cut = axis.size > 1
        self.is_under_way = False
        self._gather: _C.LineGather | None = None
        self.is_current = True
        """The parameters hold the values of all ranks' rows."""
        self._apart = apart and self.is_cut
        if self._apart:
            for parameter in bucket.parameters:
                own_memory(parameter, bucket.name)
        self.rows = [self._own_rows(part) for part in bucket.parts]
        """This rank's rows of each part, contiguous: what the optimizer updates."""
        self._stays = False
        """Somebody else than its modules has read it: whole until the next update."""
        if self._apart:
            self.rows = [rows.clone() for rows in self.rows]

    def _own_rows(self, part: Part) -> Tensor:
        first = part.first_row + self.axis.rank * part.share
        rows = torch.atleast_1d(self.bucket.parameters[part.owner].data)
        return rows[first : first + part.local_rows(self.axis.rank)]

    def take_parameters(self) -> None:
        """The parameters, which are whole, have been written: this rank's rows are theirs."""
        if self._apart and not any(isinstance(each, AwayWeight) for each in self.bucket.parameters):
            for part, rows in zip(self.bucket.parts, self.rows, strict=True):
                rows.copy_(self._own_rows(part))

    def has_changed(self) -> None:
        """This rank's rows have been written. What is under way holds values of before, and lands first."""
        self._land()
        self.is_current, self._stays = not self.is_cut, False

    def begin(self) -> None:
        """The gather is under way when it returns, unless nothing has changed."""
        if not self.is_current and not self.is_under_way:
            self._begin(self.rows)

    def begin_again(self) -> None:
        """The gather is under way when it returns, whether anything has changed or not."""
        self.has_changed()
        self._begin(self.rows)

    def begin_ahead(self, rows: Sequence[Tensor]) -> None:
        """As begin(), of what this rank's rows are going to be."""
        self.has_changed()
        self._begin(rows)

    def _begin(self, rows: Sequence[Tensor]) -> None:
        self.axis.make_room()
        bucket, wire = self.bucket, self._wire
        self._gather = _C.LineGather(
            self.axis.name, bucket.lines, wire.travelling_width, wire.travels_as, str(bucket.device)
        )
        with marked("dp send weights", bucket.name):
            self._send(self._gather, rows)
        self.is_under_way = True
        self.axis.add(self)

    def bring(self) -> None:
        """The parameters are current when it returns."""
        self.begin()
        self._land()

    def bring_exact(self) -> None:
        """The parameters hold the values of all ranks' rows, not rounded, when it returns; modules will
        gather them anew as they travel."""
        if self._rounding is self._exact or not self.is_cut:
            self.bring()
            return
        self._land()
        self._wire = self._exact
        self.begin_again()
        self._land()
        self._wire, self.is_current = self._rounding, False

    def free(self) -> None:
        """Gives the parameters' memory back; their shapes stay. What somebody else has read stays."""
        self._land()
        if self._stays:
            return
        for parameter in self.bucket.parameters:
            give_back(parameter, self._fetch)
        self.is_current = False

    def _fetch(self) -> None:
        with torch.no_grad():
            self.bring()
        self._stays = True

    def _land(self) -> None:
        if self.is_under_way:
            self.axis.complete_up_to(self)

    # -- as a flight

    def advance(self) -> None:
        # Apart, the parameters have no memory before a module reads them.
        if self._gather is not None and not self._apart and self._gather.has_come():
            self._take(self._gather)

    def complete(self) -> None:
        if self._gather is not None:
            self._take(self._gather)
        self.is_under_way, self.is_current = False, True

    def drop(self) -> None:
        self._gather, self.is_under_way = None, False

    def has_landed(self) -> bool:
        return self._gather is None

    def _send(self, gather: _C.LineGather, rows: Sequence[Tensor]) -> None:
        """Sends `rows` as this rank's."""
        bucket = self.bucket
        own = [part.view(-1, bucket.width) for part in rows]
        for index, (begin, count) in enumerate(gather.own_chunks()):
            chunk = gather.own(index)
            start = begin % bucket.segment_lines
            for part, lines in zip(bucket.parts, own, strict=True):
                low, high = max(start, part.offset), min(start + count, part.offset + len(lines))
                if low < high:
                    self._wire.write(
                        lines[low - part.offset : high - part.offset], chunk[low - start : high - start]
                    )
            gather.publish(index)

    def _take(self, gather: _C.LineGather) -> None:
        """Writes what has come into the parameters."""
        bucket = self.bucket
        with marked("dp take weights", bucket.name):
            for parameter in bucket.parameters:
                take_back(parameter)
            if self._apart:
                for part, rows in zip(bucket.parts, self.rows, strict=True):
                    own = self._wire.packed(rows.view(-1, bucket.width))
                    self._wire.read(own, self._own_rows(part).view(-1, bucket.width))
            whole = [bucket.lines_of(parameter.data) for parameter in bucket.parameters]
            for index, (begin, count) in enumerate(gather.chunks()):
                chunk = gather.chunk(index)
                for span in bucket.spans(begin, count):
                    self._wire.read(
                        chunk[span.place : span.place + span.count],
                        whole[span.owner][span.source : span.source + span.count],
                    )
            gather.finish()
        self._gather = None


class Gatherer(ABC):
    """Modules announce which buckets they are about to read; everything else is gathered before a step
    returns.

    An update of the shards is: update_order(), updated(bucket) for every bucket in that order, end_update().
    Before it, what buckets are going to be may be shown, all or some, in the same order on every rank, by
    ahead(); and if they are not going to be that, by take_back().
    """

    def __init__(self, model: nn.Module, weights: Sequence[BucketWeights], shard: Axis):
        self._weights, self._shard = list(weights), shard
        self._of_bucket = {id(each.bucket): each for each in weights}
        self._order: list[BucketWeights] = []
        """Buckets in the order in which modules read them first; once a step has been taken, in rank 0's
        order those that modules announced on every rank."""
        self._is_agreed = False
        self._announced: set[int] = set()
        """Ids of the parameters that modules' forwards announced, until ranks agree on the order."""
        self._hooks = [model.register_state_dict_pre_hook(lambda *_: self.complete())]
        bucket_of = {
            id(p): each for each in weights if self._may_wait(each.bucket) for p in each.bucket.parameters
        }
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in bucket_of]
            if own and bucket_of[id(own[0])].is_cut:
                self._watch(module, list(dict.fromkeys(bucket_of[id(p)] for p in own)))

    def _may_wait(self, bucket: Bucket) -> bool:
        """Whether a bucket may be gathered when the first module that reads any of it is about to."""
        return len(bucket.parameters) == 1

    def _watch(self, module: nn.Module, read: list[BucketWeights]) -> None:
        self._hooks.append(module.register_forward_pre_hook(lambda module, _: self._before(module, read)))

    def _before(self, module: nn.Module, read: list[BucketWeights]) -> None:
        if not self._is_agreed:
            self._announced.update(id(p) for p in module.parameters(recurse=False))
            self._order += [each for each in read if each not in self._order]
        for each in read:
            self._bring(each)

    def _bring(self, each: BucketWeights) -> None:
        """That bucket is current when it returns."""
        each.bring()

    def complete(self) -> None:
        """All parameters are current when it returns."""
        for each in self._order:
            self._bring(each)
        for each in self._weights:
            each.bring()

    def loaded(self) -> None:
        """Something was written into this rank's rows; all parameters are current when it returns."""
        self.begin_rest()
        for each in self._weights:
            each.has_changed()
        for each in self._weights:
            each.bring()

    def ahead(self, bucket: Bucket, rows: Sequence[Tensor]) -> None:  # noqa: B027
        """This rank's rows of that bucket are going to be `rows`, unless that is taken back."""

    def take_back(self) -> None:  # noqa: B027
        """What was shown ahead is not going to be: an update must follow, which sends what is."""

    def update_order(self) -> list[Bucket]:
        """All buckets, in the order in which their new values are wanted."""
        if not self._is_agreed:
            self._agree()
        unannounced = [each for each in self._weights if each not in self._order]
        return [each.bucket for each in (*unannounced, *self._order)]

    @abstractmethod
    def updated(self, bucket: Bucket) -> None:
        """This rank's rows of that bucket have been written."""

    def end_update(self) -> None:
        """Every bucket has been updated."""
        for each in self._weights:
            if each not in self._order:
                self._bring(each)

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
            if all(id(p) in self._announced for p in each.bucket.parameters)
        ]
        of_ranks = self._weights[0].axis.of_all_ranks(announced) if self._weights else [[]]
        # A rank that did not announce a bucket may have read it otherwise.
        by_all = set(of_ranks[0]).intersection(*of_ranks)
        self._order = [self._weights[number] for number in of_ranks[0] if number in by_all]
        self._is_agreed = True


class GatherAhead(Gatherer):
    """Stages 1 and 2. Gathers begin in the order that was agreed on, whatever modules a rank's data lead it
    to."""

    def __init__(self, model: nn.Module, weights: Sequence[BucketWeights], shard: Axis):
        super().__init__(model, weights, shard)
        self._waiting: deque[BucketWeights] = deque()
        self._shown: list[tuple[BucketWeights, Sequence[Tensor]]] = []
        self._begun = 0
        """Of those."""
        self._left: list[BucketWeights] = []
        """What left ahead, while an update goes on."""

    def ahead(self, bucket: Bucket, rows: Sequence[Tensor]) -> None:
        axis = self._weights[0].axis
        if self._is_agreed and axis.is_used_by(self):
            axis.held = self
            self._shown.append((self._of_bucket[id(bucket)], rows))
            self._fill_ahead()

    def settle(self) -> None:
        self._show_what_is()

    def end_turn(self) -> None:
        self.settle()
        self.begin_rest()

    def forget_turn(self) -> None:
        self._shown, self._begun = [], 0

    def take_back(self) -> None:
        for each in self._settle():
            each.has_changed()

    def update_order(self) -> list[Bucket]:
        self._weights[0].axis.turn_to(self)
        self._left = self._settle()
        return super().update_order()

    def updated(self, bucket: Bucket) -> None:
        each = self._of_bucket[id(bucket)]
        if each not in self._left:
            each.has_changed()
            self._waiting.append(each)
            self._fill()

    def _fill_ahead(self) -> None:
        axis = self._weights[0].axis
        axis.take_what_has_come()
        while self._begun < len(self._shown) and axis.has_room():
            self._begin_shown()

    def _begin_shown(self) -> None:
        each, rows = self._shown[self._begun]
        self._begun += 1
        each.begin_ahead(rows)

    def _agree(self) -> None:
        super()._agree()
        # A place whose memory is too small grows where all ranks meet, and from now on they begin gathers at
        # different moments: every place gets its memory here, with what a chunk's alignment may add.
        most = max(each.bucket.nbytes for each in self._weights)
        large = [each for each in self._weights if each.is_cut and each.bucket.nbytes > 0.9 * most]
        for each in {(each.bucket.lines, each.bucket.width): each for each in large}.values():
            for _ in range(PLACES):
                each.begin_again()
            each.bring()

    def _settle(self) -> list[BucketWeights]:
        """What has left ahead on any rank, and leaves here at the latest now; nothing else will."""
        if not self._shown:
            return []
        begun = torch.tensor([self._begun], dtype=torch.float64)
        most = int(ops.all_gather_stats(begun, self._shard.name).max())
        while self._begun < most:
            self._begin_shown()
        self._weights[0].axis.leave_latest()
        left = [each for each, _ in self._shown[: self._begun]]
        self._shown, self._begun = [], 0
        self._weights[0].axis.held = None
        return left

    def _before(self, module: nn.Module, read: list[BucketWeights]) -> None:
        if any(each in read for each, _ in self._shown):
            self._show_what_is()
        super()._before(module, read)
        self._fill()

    def complete(self) -> None:
        self._show_what_is()
        super().complete()

    def loaded(self) -> None:
        self._show_what_is()
        super().loaded()

    def _show_what_is(self) -> None:
        """Somebody reads weights between the gradients and the step: all ranks have the old ones again."""
        for each in self._settle():
            each.has_changed()
            each.begin()

    def end_update(self) -> None:
        super().end_update()
        self._left = []
        self._fill()

    def begin_rest(self) -> None:
        while self._waiting:
            self._waiting.popleft().begin()

    def _may_wait(self, bucket: Bucket) -> bool:
        return True

    def _bring(self, each: BucketWeights) -> None:
        while self._waiting and not each.is_current and not each.is_under_way:
            self._waiting.popleft().begin()
        each.bring()

    def _fill(self) -> None:
        """As many buckets on their way as there is room for."""
        while self._waiting and self._waiting[0].axis.has_room():
            self._waiting.popleft().begin()


class GatherPerUse(Gatherer):
    """Stage 3. keep: the first so many buckets of the order stay between forward and backward."""

    def __init__(self, model: nn.Module, weights: Sequence[BucketWeights], shard: Axis, keep: int):
        super().__init__(model, weights, shard)
        self._keep = keep
        self._wanted_again: set[int] = set()
        """Buckets whose place in the order is that of a module that reads them in its backward pass too."""
        self._last: BucketWeights | None = None
        """What the first forward pass read last."""
        self._in_backward: list[BucketWeights] = []

    def _watch(self, module: nn.Module, read: list[BucketWeights]) -> None:
        super()._watch(module, read)
        self._hooks.append(
            module.register_forward_hook(lambda module, _, output: self._after(module, read, output))
        )

    def updated(self, bucket: Bucket) -> None:
        self._in_backward = []
        each = self._of_bucket[id(bucket)]
        each.has_changed()
        if each in self._order:
            each.free()  # nobody reads it before it is gathered
        elif each.axis.has_room():
            each.begin()

    def end_update(self) -> None:
        super().end_update()
        self._prefetch(0, +1)

    def begin_rest(self) -> None:
        """None: weights are gathered where they are used."""

    def complete(self) -> None:
        for each in dict.fromkeys([*self._order, *self._weights]):
            each.bring_exact()

    def _before(self, module: nn.Module, read: list[BucketWeights]) -> None:
        in_forward = torch._C._current_graph_task_id() == -1
        if not self._is_agreed and in_forward:
            self._last = read[-1]
            if _reads_again(module):
                self._wanted_again.update(id(each) for each in read if each not in self._order)
        super()._before(module, read)
        if read[-1] in self._order:
            place = self._order.index(read[-1])
            # Computed again for a backward pass, the modules that follow may have been through it.
            self._prefetch(place + 1, +1, MOST_FLIGHTS if in_forward else 1)
            if in_forward and read[-1] is self._last and torch.is_grad_enabled():
                self._prefetch(place - 1, -1)

    def _after(self, module: nn.Module, read: list[BucketWeights], output: Any) -> None:
        again = _reads_again(module)
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

    def _before_backward(self, read: list[BucketWeights]) -> None:
        """Runs right before the backward of the module; that of the module before it is over."""
        for each in self._in_backward:
            if each not in read:
                each.free()
        self._in_backward = list(read)
        for each in read:
            each.bring()
        self._prefetch(self._order.index(read[0]) - 1, -1)

    def _prefetch(self, place: int, step: int, most: int = MOST_FLIGHTS) -> None:
        """The weights from that place of the order on are on their way, so many as there is room for."""
        axis = self._weights[0].axis
        while 0 <= place < len(self._order) and most > 0 and axis.has_room():
            if step > 0 or id(self._order[place]) in self._wanted_again:
                self._order[place].begin()
                most -= 1
            place += step
