"""Gathers weights before they are read.

Stages 1 and 2 gather new values into the parameters. Rows leave as soon as a rank has computed them: during
the backward pass, in the order in which buckets are reduced, behind gradients. When the step counts, the rest
leaves in the order in which the first pass read it, a few buckets at a time. A module's forward waits for the
buckets of its own weights. Buckets with a weight that no module's forward announces are gathered before the
step returns.

Stage 3 keeps a weight whole only while it is read. It is gathered before the module's forward and again
before its backward, or before its forward is recomputed, with the next ones on their way meanwhile; then its
memory is freed. Which are next, the first step tells. The first ones leave when they have been updated. A
matrix may be rounded as it travels: then all ranks compute with the rounded values, and each keeps its rows
exact. An embedding's backward pass does not read the table, so it is not gathered again. The weight that the
forward pass reads last stays, because the backward pass begins with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.data_parallel.axes import PLACES, FlightAxis
from pyruntime.data_parallel.bucket_weights import BucketWeights
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.nn import VocabParallelEmbedding

AHEAD_ONE_OF = 3
"""On devices one of so many buckets is sent ahead, during the backward pass: evenly among them, besides as
many that the forward pass reads first. A backward pass takes twice as long as a forward pass, and gradients
are as many bytes as weights: so the links have as much to do in both."""


def _reads_again(module: nn.Module) -> bool:
    """Whether the module's backward pass also reads its weights. A derived class may do anything, so yes."""
    return type(module) not in (nn.Embedding, VocabParallelEmbedding)


class Gatherer(ABC):
    """Gathers buckets that modules announce when they are about to read them, and all others before a step
    returns.

    An update of the shards: update_order(), updated(bucket) for every bucket in that order, end_update().
    Before it, ahead() may show the values that some or all buckets are going to have, in the same order on
    every rank; take_back() withdraws them."""

    def __init__(self, model: nn.Module, weights: Sequence[BucketWeights], shard: FlightAxis):
        self._weights, self._shard = list(weights), shard
        self._of_bucket = {id(each.bucket): each for each in weights}
        self._order: list[BucketWeights] = []
        """Buckets in the order in which modules first read them. After the first step: those that modules
        announced on every rank, in rank 0's order."""
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
        """Whether a bucket may be gathered as late as the first module is about to read any of it."""
        return len(bucket.parameters) == 1

    def _watch(self, module: nn.Module, read: list[BucketWeights]) -> None:
        self._hooks.append(module.register_forward_pre_hook(lambda module, _: self._before(module, read)))
        self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self.complete_some(read)))

    def complete_some(self, read: list[BucketWeights]) -> None:
        """Gathers these buckets; they are current when it returns."""
        for each in read:
            each.bring_exact()

    def bring(self, parameter: nn.Parameter) -> None:
        """Gathers a parameter; it is current when it returns."""
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
        each.bring()

    def complete(self) -> None:
        """Gathers all parameters; they are current when it returns."""
        for each in self._order:
            self._bring(each)
        for each in self._weights:
            each.bring()

    def loaded(self) -> None:
        """Gathers all parameters after a write into this rank's rows; they are current when it returns."""
        self.begin_rest()
        for each in self._weights:
            each.has_changed()
        for each in self._weights:
            each.bring()

    def ahead(self, bucket: Bucket, rows: Sequence[Tensor]) -> None:  # noqa: B027
        """Shows what this rank's rows of that bucket are going to be, unless take_back() follows."""

    def take_back(self) -> None:  # noqa: B027
        """Takes back what was shown ahead. An update must follow, which sends the right values."""

    def update_order(self) -> list[Bucket]:
        """Returns all buckets that are updated, in the order in which their new values are needed."""
        if not self._is_agreed:
            self._agree()
        unannounced = [each for each in self._weights if each not in self._order]
        return [each.bucket for each in (*unannounced, *self._order) if not each.frozen]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that it gathers."""
        return [each.bucket for each in self._weights]

    @abstractmethod
    def updated(self, bucket: Bucket) -> None:
        """Is told that this rank's rows of that bucket were written."""

    def end_update(self) -> None:
        """Ends an update, when every bucket has been updated."""
        for each in self._weights:
            if each not in self._order:
                self._bring(each)

    @abstractmethod
    def begin_rest(self) -> None:
        """Begins all gathers that have not begun, because other flights follow."""

    def close(self) -> None:
        """Gathers all parameters, which are then whole and current, and removes all hooks."""
        self.complete()
        for hook in self._hooks:
            hook.remove()

    def _agree(self) -> None:
        # A rank that did not announce a bucket may have read it otherwise.
        self._order = self._common(
            [each for each in self._order if all(id(p) in self._announced for p in each.bucket.parameters)]
        )
        self._is_agreed = True

    def _common(self, order: Sequence[BucketWeights]) -> list[BucketWeights]:
        """Returns rank 0's order of the buckets that are in the orders of all ranks."""
        numbers = [self._weights.index(each) for each in order]
        of_ranks = self._weights[0].axis.of_all_ranks(numbers) if self._weights else [[]]
        by_all = set(of_ranks[0]).intersection(*of_ranks)
        return [self._weights[number] for number in of_ranks[0] if number in by_all]


class Gatherers:
    """The gatherers of one model, each of the buckets of its axis, as one. Each orders its gathers by
    itself, as ranks of another axis take no part in them."""

    def __init__(self, gatherers: Sequence[Gatherer]):
        self._gatherers = list(gatherers)
        self._of_bucket = {id(bucket): each for each in gatherers for bucket in each.buckets}

    def bring(self, parameter: nn.Parameter) -> None:
        """Gathers a parameter; it is current when it returns."""
        for each in self._gatherers:
            each.bring(parameter)

    def complete(self) -> None:
        """Gathers all parameters; they are current when it returns."""
        for each in self._gatherers:
            each.complete()

    def loaded(self) -> None:
        """Gathers all parameters after a write into this rank's rows; they are current when it returns."""
        for each in self._gatherers:
            each.loaded()

    def ahead(self, bucket: Bucket, rows: Sequence[Tensor]) -> None:
        """See `Gatherer.ahead`."""
        self._of_bucket[id(bucket)].ahead(bucket, rows)

    def take_back(self) -> None:
        """See `Gatherer.take_back`."""
        for each in self._gatherers:
            each.take_back()

    def update_order(self) -> list[Bucket]:
        """Returns all buckets that are updated, in the order in which their new values are needed."""
        return [bucket for each in self._gatherers for bucket in each.update_order()]

    def updated(self, bucket: Bucket) -> None:
        """Is told that this rank's rows of that bucket were written."""
        self._of_bucket[id(bucket)].updated(bucket)

    def end_update(self) -> None:
        """Ends an update, when every bucket has been updated."""
        for each in self._gatherers:
            each.end_update()

    def begin_rest(self) -> None:
        """Begins all gathers that have not begun, because other flights follow."""
        for each in self._gatherers:
            each.begin_rest()

    def close(self) -> None:
        """Gathers all parameters, which are then whole and current, and removes all hooks."""
        for each in self._gatherers:
            each.close()


class GatherAhead(Gatherer):
    """The gatherer of stages 1 and 2. Gathers begin in the agreed order, whichever modules a rank runs.

    Ahead, CPU ranks begin a gather when an earlier one has arrived, each at its own moment. Arrivals on a
    device are known to its streams alone, so there all ranks begin a gather as soon as it is shown; what is
    too many under way is completed in the order of the stream. A device shows only some: gradients need the
    links during the backward pass, and the forward pass needs them for nothing else (`AHEAD_ONE_OF`)."""

    def __init__(self, model: nn.Module, weights: Sequence[BucketWeights], shard: FlightAxis):
        super().__init__(model, weights, shard)
        self._waiting: deque[BucketWeights] = deque()
        self._shown: list[tuple[BucketWeights, Sequence[Tensor]]] = []
        self._begun = 0
        """The number of those that have begun."""
        self._left: list[BucketWeights] = []
        """Buckets that were sent ahead of the running update."""
        self._later: set[BucketWeights] = set()
        """Those that are never sent ahead."""
        self._sees_arrivals = all(each.bucket.device.type == "cpu" for each in self._weights)

    def ahead(self, bucket: Bucket, rows: Sequence[Tensor]) -> None:
        axis, each = self._weights[0].axis, self._of_bucket[id(bucket)]
        if self._is_agreed and axis.is_used_by(self) and each not in self._later:
            axis.held = self
            self._shown.append((each, rows))
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
        while self._begun < len(self._shown) and (axis.has_room() or not self._sees_arrivals):
            self._begin_shown()

    def _begin_shown(self) -> None:
        each, rows = self._shown[self._begun]
        self._begun += 1
        each.begin_ahead(rows)

    def _agree(self) -> None:
        super()._agree()
        if not self._sees_arrivals:
            self._later = {
                each for number, each in enumerate(self._order[AHEAD_ONE_OF:]) if number % AHEAD_ONE_OF
            }
        # A slot whose memory is too small grows collectively, but from now on ranks begin gathers at
        # different moments. So every slot gets its memory here, with what a chunk's alignment may add.
        most = max(each.bucket.nbytes for each in self._weights)
        large = [each for each in self._weights if each.is_cut and each.bucket.nbytes > 0.9 * most]
        for each in {(each.bucket.lines, each.bucket.width): each for each in large}.values():
            for _ in range(PLACES):
                each.begin_again()
            each.bring()

    def _settle(self) -> list[BucketWeights]:
        """Begins every gather that some rank has begun ahead, and returns these buckets; drops the others."""
        if not self._shown:
            return []
        if self._sees_arrivals:
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
        """Gathers the old weights on all ranks, because they are read between the gradients and the step."""
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
        """Begins as many gathers as there is room for."""
        while self._waiting and self._waiting[0].axis.has_room():
            self._waiting.popleft().begin()


class GatherPerUse(Gatherer):
    """The gatherer of stage 3. frozen: weights that are never updated. keep: the number of buckets, the first
    of the order, that stay between forward and backward."""

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
        self._backward: list[BucketWeights] = []
        """Buckets in the order in which a backward pass, with what it recomputes, first reads them; agreed
        upon as `_order` is."""
        self._last: BucketWeights | None = None
        """The bucket that the first forward pass read last."""
        self._in_backward: list[BucketWeights] = []
        self._over: set[int] = set()
        """Ids of the buckets whose modules' backward is over, in the running pass; emptied where it reads one
        again that it has freed, as with a model that uses its layers several times."""
        self._pass = -1
        """The autograd engine's number of the backward pass that `_over` describes."""

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
            each.free()  # it is gathered before it is read
        elif each.axis.has_room():
            each.begin()

    def _end_backward(self) -> None:
        """Frees frozen weights that the backward pass read last; the others are freed as they are updated."""
        for each in self._in_backward:
            if each.frozen and each in self._order:
                each.free()
        self._in_backward = []

    def end_update(self) -> None:
        super().end_update()
        self._prefetch(self._order)

    def loaded(self) -> None:
        """Is told of a write into this rank's rows: weights that are cut are gathered when they are read."""
        for each in self._weights:
            each.has_changed()
        for each in self._weights:
            if self._may_wait(each.bucket):
                each.free()
            else:
                each.bring()

    def begin_rest(self) -> None:
        """Begins none: weights are gathered when they are used."""

    def complete(self) -> None:
        for each in dict.fromkeys([*self._order, *self._weights]):
            each.bring_exact()

    def _before(self, module: nn.Module, read: list[BucketWeights]) -> None:
        in_forward = torch._C._current_graph_task_id() == -1
        if not self._is_agreed and in_forward:
            self._last = read[-1]
        if not in_forward:
            self._see_what_is_over(read)
        super()._before(module, read)
        if not in_forward:  # recomputed for a backward pass
            self._prefetch_in_backward(read)
            return
        self._prefetch(_behind(self._order, read[-1]))
        if read[-1] is self._last and torch.is_grad_enabled():
            self._prefetch(self._backward)

    def _see_what_is_over(self, read: list[BucketWeights]) -> None:
        """Is told what the backward pass is about to read."""
        task = torch._C._current_graph_task_id()
        if task != self._pass or any(id(each) in self._over and not each.is_current for each in read):
            self._pass, self._over = task, set()

    def _prefetch_in_backward(self, read: list[BucketWeights]) -> None:
        if not self._is_agreed:
            self._backward += [each for each in read if each not in self._backward]
        rest = _behind(self._backward, read[-1])
        self._prefetch(each for each in rest if id(each) not in self._over)

    def _after(self, module: nn.Module, read: list[BucketWeights], output: Any) -> None:
        again = _reads_again(module)
        if again and torch._C._current_graph_task_id() != -1:
            return  # recomputed for a backward pass, which is about to read them
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
        """Runs right before the module's backward, when the backward that ran before it is over."""
        for each in self._in_backward:
            if each not in read:
                each.free()
        self._in_backward = list(read)
        self._see_what_is_over(read)
        for each in read:
            each.bring()
        self._over.update(id(each) for each in read)
        self._prefetch_in_backward(read)

    def _prefetch(self, order: Iterable[BucketWeights]) -> None:
        """Begins gathers in that order, as many as there is room for."""
        for each in order:
            if not each.axis.has_room():
                return
            each.begin()

    def _agree(self) -> None:
        super()._agree()
        self._backward = self._common(self._backward)


def _behind(order: list[BucketWeights], one: BucketWeights) -> list[BucketWeights]:
    """Returns what comes behind `one` in an order, or nothing if it is not there."""
    return order[order.index(one) + 1 :] if one in order else []
