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
from pyruntime.data_parallel.axes import MOST_FLIGHTS, PLACES, FlightAxis
from pyruntime.data_parallel.bucket_weights import BucketWeights
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.nn import VocabParallelEmbedding


def _reads_again(module: nn.Module) -> bool:
    """Whether the module's backward pass reads its weights too. What is derived may do anything."""
    return type(module) not in (nn.Embedding, VocabParallelEmbedding)


class Gatherer(ABC):
    """Modules announce which buckets they are about to read; everything else is gathered before a step
    returns.

    An update of the shards is: update_order(), updated(bucket) for every bucket in that order, end_update().
    Before it, what buckets are going to be may be shown, all or some, in the same order on every rank, by
    ahead(); and if they are not going to be that, by take_back().
    """

    def __init__(self, model: nn.Module, weights: Sequence[BucketWeights], shard: FlightAxis):
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
        self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self.complete_some(read)))

    def complete_some(self, read: list[BucketWeights]) -> None:
        """Those are current when it returns."""
        for each in read:
            each.bring_exact()

    def bring(self, parameter: nn.Parameter) -> None:
        """It is current when it returns."""
        self.complete_some(
            [each for each in self._weights if any(p is parameter for p in each.bucket.parameters)]
        )

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
        """All buckets that are updated, in the order in which their new values are wanted."""
        if not self._is_agreed:
            self._agree()
        unannounced = [each for each in self._weights if each not in self._order]
        return [each.bucket for each in (*unannounced, *self._order) if not each.frozen]

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

    def __init__(self, model: nn.Module, weights: Sequence[BucketWeights], shard: FlightAxis):
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

    def complete_some(self, read: list[BucketWeights]) -> None:
        if any(each in read for each, _ in self._shown):
            self._show_what_is()
        for each in read:
            self._bring(each)

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
    """Stage 3. frozen: weights that are never updated. keep: the first so many buckets of the order stay
    between forward and backward."""

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[BucketWeights],
        frozen: Sequence[BucketWeights],
        shard: FlightAxis,
        keep: int,
    ):
        super().__init__(model, [*weights, *frozen], shard)
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
        self._end_backward()
        each = self._of_bucket[id(bucket)]
        each.has_changed()
        if each in self._order:
            each.free()  # nobody reads it before it is gathered
        elif each.axis.has_room():
            each.begin()

    def _end_backward(self) -> None:
        """What the backward pass has read last is not read any more; what is updated is given back then."""
        for each in self._in_backward:
            if each.frozen and each in self._order:
                each.free()
        self._in_backward = []

    def end_update(self) -> None:
        super().end_update()
        self._prefetch(0, +1)

    def loaded(self) -> None:
        """Something was written into this rank's rows: weights that are cut are gathered as they are read."""
        for each in self._weights:
            each.has_changed()
        for each in self._weights:
            if self._may_wait(each.bucket):
                each.free()
            else:
                each.bring()

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
