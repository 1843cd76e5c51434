"""Sends gradients while the backward pass computes them.

The weight of a linear layer hands over (dY, X) (csrc/ops/weight_gradient.h). Each chunk of dW = dY^T X is
multiplied into the memory that it leaves from, in the order in which others wait for it. If the linear's own
group spans hosts, dW is multiplied whole, under waits of the pass, and leaves two products later (`InTurn`).
Every other gradient comes from autograd, is copied into its bucket's chunks when the bucket is complete, and
is dropped.

Of a token embedding's gradient, only rows that some rank's step has touched leave (bucket_sum.py). These are
known when all of it is there.

Buckets leave in one order on every rank: that in which the first backward pass completed them on rank 0. A
bucket that completes before its turn waits as a tensor. One that never completes leaves as zeros at the end
of the pass, without marks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pyruntime.comm.core import _C
from pyruntime.data_parallel.axes import Axes, flight_axes
from pyruntime.data_parallel.bucket_sum import Launch, Touched, blocks_of, launch, may_send_some
from pyruntime.data_parallel.buckets import Bucket, LineSpan
from pyruntime.data_parallel.touched import touched_rows
from pyruntime.nn.cut import gradient_of, set_gradient
from pyruntime.nn.weight_sinks import InTurn
from pyruntime.ops.attention import statistics_dtype
from pyruntime.ops.layers import add_

LEAST_GEMM = 5e8
"""Floating-point operations of one chunk's GEMM. Below it a weight gradient is multiplied whole and copied: a
chunk's columns of dY must be made contiguous first, which costs more than copying a small result. GEMMs of
1e8 lose a tenth of their speed, those of 3e8 a fifth if the weight is as narrow as 256. Devices multiply the
rows of all ranks in one launch, a block for each rank, and have the next two numbers instead."""

TILE = 128
"""Rows of a weight that devices multiply together; the rest of a block's last tile is lost."""
OPERATIONS_PER_BYTE = 200
"""Operations in bf16 for which a device needs as long as for a byte of its memory: A100 150, H100 300, H200
200, MI250X 120, MI300X 250, by their data sheets."""

SEARCH_EVERY = 16
"""Steps. If the ranks together touched most rows of a table, its gradient is searched again only so many
steps later: the search reads all of it, and ranks wait for each other's answer."""


class _Inbox:
    """The gradients of one bucket that have arrived, parameter by parameter."""

    def __init__(self, bucket: Bucket):
        self.bucket = bucket
        self.whole: list[Tensor | None] = [None] * len(bucket.parameters)
        """Gradients of this pass, in the parameter's dtype."""
        self.earlier: list[Tensor | None] = [None] * len(bucket.parameters)
        """Sums of earlier passes, fp32 (fp64 for doubles)."""
        self.left = False
        """Whether it was launched in this step."""

    def got(self) -> list[bool]:
        return [
            whole is not None or earlier is not None
            for whole, earlier in zip(self.whole, self.earlier, strict=True)
        ]

    def is_complete(self) -> bool:
        return all(gradient is not None for gradient in self.whole)

    def clear(self) -> None:
        self.whole = [None] * len(self.whole)
        self.earlier = [None] * len(self.earlier)


def _axes_of(bucket: Bucket) -> Axes:
    """Returns the axes over which a bucket's gradient is summed, unless it is compressed."""
    return bucket.axes if bucket.is_matrix or bucket.axes.small is None else bucket.axes.small


class GradientReducer:
    """Sums the gradients of `buckets` over their axes during the backward pass.

    linears: weights whose (dY, X) may be taken. tables: weights of which few rows may have a gradient.
    before_leaving() is called before a step's first bucket leaves, on_reduced(bucket, gradient, is_whole)
    once a bucket and step, in the same order on every rank; is_whole: this rank had a gradient of each of its
    parameters, so that no mark need be read. reduce_dtype: dtype in which gradients travel; None: that of
    the parameters. launch: sends them.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        linears: Sequence[nn.Parameter],
        tables: Sequence[nn.Parameter],
        before_leaving: Callable[[], None],
        on_reduced: Callable[[Bucket, Tensor, bool], None],
        reduce_dtype: torch.dtype | None = None,
        launch: Launch = launch,
    ):
        self._reduce_dtype, self._launch = reduce_dtype, launch
        self._axes = list(dict.fromkeys(bucket.axes for bucket in buckets))
        self._before_leaving, self._on_reduced = before_leaving, on_reduced
        self._inboxes = [_Inbox(bucket) for bucket in buckets]
        self._place_of: dict[int, tuple[int, int]] = {}
        """Bucket, and number in it, of each parameter, by its id."""
        self._unsearched: dict[int, int] = {}
        """Steps in which all rows of a table travel without a search, by its id; the same on every rank."""
        self._order: list[int] | None = None
        self._seen: list[int] = []  # buckets in the order of their completion, in the first pass
        self._used_again: set[int] = set()  # used several times in a pass: complete only when it ends
        self._next = 0
        self._hasten: Callable[[], None] = _nothing
        """The result of `launch` for the bucket that left last."""
        self._accumulating = False
        self._of_passes = InTurn()
        self._of_pass: Callable[[], InTurn | None] = _no_pass  # weak: the engine holds it
        self._ended = False
        self._hooks = []
        taken, self._tables = {id(p) for p in linears}, {id(p) for p in tables}
        for index, bucket in enumerate(buckets):
            for owner, parameter in enumerate(bucket.parameters):
                self._place_of[id(parameter)] = index, owner
                hook = _weakly(self._on_gradient, index, owner)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            if id(bucket.parameters[0]) in taken and bucket.is_matrix:
                sink = _weakly(self._on_gemm, index)
                _C.set_weight_gradient_sink(bucket.parameters[0], sink, keeps=False)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Makes backward passes within it add to the gradients and send nothing."""
        outer, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = outer

    def passes(self) -> contextlib.AbstractContextManager[None]:
        """See `Sharded.passes`."""
        return self._of_passes.passes()

    @torch.no_grad()
    def add_product(
        self, weight: nn.Parameter, dy: Tensor, x: Tensor, last: bool, later: bool = False
    ) -> None:
        """See `Sharded.add_product`."""
        self._check_passes()
        index, owner = self._place_of[id(weight)]
        self._take_gemm(index, owner, dy, x, last, self._of_passes if later else None)

    @torch.no_grad()
    def add_gradient(self, weight: nn.Parameter, gradient: Tensor, last: bool) -> None:
        """See `Sharded.add_gradient`."""
        self._check_passes()
        index, owner = self._place_of[id(weight)]
        self._take(index, owner, gradient, last and not self._accumulating)

    def _check_passes(self) -> None:
        if not self._of_passes.is_open:
            raise RuntimeError("Products are added only within passes(); enter it around the step.")

    def begin_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor) -> None:
        """Returns None; see `Sharded.begin_product`. It would hold a whole gradient for every micro-batch."""

    def finish(self) -> None:
        """Reduces all gradients of this step; when it returns, a new step begins."""
        if not self._ended:
            self._forget_failed_pass()
            self._end_pass()
        self._hasten()
        self._hasten = _nothing
        for axis in flight_axes(self._axes):
            axis.complete_all()
        for inbox in self._inboxes:
            inbox.clear()
            inbox.left = False
        self._next = 0
        self._ended = False

    def check_complete(self) -> None:
        """Raises RuntimeError if this step's last pass has not run yet."""
        if not self._ended and self.has_some():
            raise RuntimeError(
                "The gradients were read before the last backward pass of their step has run, the one "
                "outside of handle.accumulate(), so they are not reduced yet; read them after it."
            )

    def has_some(self) -> bool:
        """Whether a gradient of this step has come."""
        return self._ended or any(inbox.left or any(inbox.got()) for inbox in self._inboxes)

    def drop(self) -> bool:
        """Drops all gradients of this step. Returns whether some have been reduced already, which are handed
        over first. Every rank calls it, after the same passes."""
        self._forget_failed_pass()
        if self._ended or any(inbox.left for inbox in self._inboxes):
            self.finish()
            return True
        for inbox in self._inboxes:
            inbox.clear()
        return False

    def close(self) -> None:
        """Gives the gradients back to autograd."""
        for hook in self._hooks:
            hook.remove()
        for inbox in self._inboxes:
            for parameter in inbox.bucket.parameters:
                _C.set_weight_gradient_sink(parameter, None)

    # -- gradients that arrive

    @torch.no_grad()
    def _on_gradient(self, index: int, owner: int, parameter: Tensor) -> None:
        gradient = gradient_of(parameter)
        set_gradient(parameter, None)
        if gradient is None:  # the sink has taken it
            return
        self._begin_pass()
        self._take(index, owner, gradient, last=not self._accumulating)

    @torch.no_grad()
    def _on_gemm(self, index: int, dy: Tensor, x: Tensor, later: bool) -> None:
        products = self._begin_pass()
        self._take_gemm(index, 0, dy, x, True, products if later else None)

    def _take_gemm(
        self, index: int, owner: int, dy: Tensor, x: Tensor, last: bool, products: InTurn | None
    ) -> None:
        """Takes dY^T X as `_take` does: written where it leaves from if it can be, else among `products`."""
        self._check_open(index)
        inbox = self._inboxes[index]
        last = last and not self._accumulating
        if last and products is None:
            alone = inbox.bucket.is_matrix and inbox.whole[0] is None
            if alone and self._may_leave(index) and self._is_worth_cutting(inbox.bucket, dy):
                self._leave(index, (_C.WeightGradientGemm(dy, x), dy.dtype))
                self._leave_what_waits()
                return
        earlier = inbox.earlier[owner]
        adds = not last and earlier is not None and earlier.dtype == dy.dtype
        gradient = earlier if adds else torch.empty_like(inbox.bucket.parameters[owner])
        assert gradient is not None
        take = _nothing if adds else partial(self._take, index, owner, gradient, last)
        if products is None:
            _C.WeightGradientGemm(dy, x).write(gradient, 0, adds)
            take()
            return
        product = _C.WeightProduct(gradient, dy, x, adds)

        def finish() -> None:
            product.finish()
            take()

        products.add(finish)

    def _take(self, index: int, owner: int, gradient: Tensor, last: bool) -> None:
        """Takes a gradient. last: no other comes for this parameter in the step."""
        self._check_open(index)
        inbox = self._inboxes[index]
        if not last:
            if (earlier := inbox.earlier[owner]) is None:
                inbox.earlier[owner] = gradient.to(statistics_dtype(gradient))
            else:
                add_(earlier, gradient)
            return
        before = inbox.whole[owner]  # if the parameter is used several times
        inbox.whole[owner] = gradient if before is None else before + gradient
        if inbox.is_complete():
            self._on_complete(index)

    def _is_worth_cutting(self, bucket: Bucket, dy: Tensor) -> bool:
        """Whether GEMMs of single ranks' rows cost less than a whole GEMM and a copy."""
        if bucket.device.type == "cpu":
            smallest = min(part.lines for part in bucket.parts) * bucket.width
            return 2 * smallest * len(dy) >= LEAST_GEMM
        dtype = self._reduce_dtype or bucket.dtype
        blocks = [] if bucket.segments == 1 else blocks_of(bucket, dtype)
        lost = sum(-rows % TILE for rows in blocks) * len(dy)
        return dtype == dy.dtype and lost <= sum(blocks) * dtype.itemsize * OPERATIONS_PER_BYTE

    def _begin_pass(self) -> InTurn:
        """Returns the products of the running pass; they end with it, in whatever way it ends."""
        if (products := self._of_pass()) is None:
            self._forget_failed_pass()
            products = InTurn()
            self._of_pass = weakref.ref(products)
            Variable._execution_engine.queue_callback(partial(self._on_pass_ended, products))
        return products

    def _forget_failed_pass(self) -> None:
        """Forgets what has not left of a pass that an exception ended, except sums of `accumulate()`. The
        other ranks learn of it with the next bucket, and raise unless they have left a pass too: their
        gradients are of other passes than this rank's."""
        if not isinstance(self._of_pass, weakref.ref) or self._of_pass() is not None:
            return
        self._of_pass = _no_pass
        for axes in self._axes:
            axes.note_failed_pass()
        for inbox in self._inboxes:
            if not inbox.left:
                inbox.whole = [None] * len(inbox.whole)
        if self._order is None:
            self._seen.clear()
            self._used_again.clear()

    def _check_open(self, index: int) -> None:
        if self._ended or self._inboxes[index].left:
            raise RuntimeError(
                f"A gradient of {self._inboxes[index].bucket.name} came after this step's gradients had "
                "left: backward() ran twice without optimizer.step() between (run all but the last pass of a "
                "step in handle.accumulate()), or the weight is used more often in this pass than in the "
                "first one."
            )

    @torch.no_grad()
    def _on_pass_ended(self, products: InTurn) -> None:
        products.finish()
        self._of_pass = _no_pass
        if not self._accumulating and not self._of_passes.is_open:
            self._end_pass()

    # -- buckets that leave

    def _may_leave(self, index: int) -> bool:
        """Whether it is the bucket's turn, and nothing more will come for it."""
        return (
            self._order is not None
            and self._next < len(self._order)
            and self._order[self._next] == index
            and index not in self._used_again
        )

    def _on_complete(self, index: int) -> None:
        if self._order is None:
            if index in self._seen:
                self._seen.remove(index)
                self._used_again.add(index)
            self._seen.append(index)
        else:
            self._leave_what_waits()

    def _leave_what_waits(self) -> None:
        assert self._order is not None
        while self._next < len(self._order):
            index = self._order[self._next]
            if not self._may_leave(index) or not self._inboxes[index].is_complete():
                return
            self._leave(index)

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Sends what has not left, complete or not."""
        if self._order is None:
            self._order = self._agree_on_order()
        while self._next < len(self._order):
            self._leave(self._order[self._next])
        self._ended = True

    def _agree_on_order(self) -> list[int]:
        """Returns rank 0's order of completion, then the buckets that did not complete.

        Where some buckets have axes of their own, it is the first of all ranks' orders as lists of numbers
        compare: then ranks agree that share no axis, but are joined by two."""
        rest = [index for index in range(len(self._inboxes)) if index not in self._seen]
        order = self._seen + rest
        for axis in flight_axes(self._axes):
            orders = axis.of_all_ranks(order)
            order = orders[0] if len(self._axes) == 1 else min(orders)
        return order

    def _leave(self, index: int, gemm: tuple[_C.WeightGradientGemm, torch.dtype] | None = None) -> None:
        inbox = self._inboxes[index]
        bucket = inbox.bucket
        got = [True] if gemm else inbox.got()
        whole, earlier = inbox.whole, inbox.earlier  # a table is written after the inbox is cleared

        def write(chunk: Tensor, segment: int, line: int) -> None:
            segments, lines = range(segment, segment + len(chunk)), range(line, line + chunk.shape[1])
            for span in bucket.spans(segments, lines):
                out = span.of_chunk(chunk)
                if gemm is not None:
                    _write_rows(out, *gemm, span)
                elif (gradient := whole[span.owner]) is not None:
                    out.copy_(span.of_parameter(bucket.lines_of(gradient)))
                else:
                    out.zero_()
                if (sums := earlier[span.owner]) is not None:
                    add_(out, span.of_parameter(bucket.lines_of(sums)))
            bucket.fill(chunk, segment, line, got)

        if self._next == 0:
            self._before_leaving()
        inbox.left = True
        self._next += 1
        touched = self._touched(bucket, whole[0], earlier[0], got)
        dtype = self._reduce_dtype or bucket.dtype
        is_whole = all(got)

        def reduced(bucket: Bucket, gradient: Tensor) -> None:
            self._on_reduced(bucket, gradient, is_whole)

        self._hasten = self._launch(bucket, dtype, _axes_of(bucket), write, reduced, touched)
        inbox.clear()

    def _touched(
        self, bucket: Bucket, whole: Tensor | None, earlier: Tensor | None, got: Sequence[bool]
    ) -> Touched | None:
        """Returns a table's lines with a gradient [rows, width] of this rank; None if all lines travel."""
        table = bucket.parameters[0]
        if id(table) not in self._tables or not bucket.is_table or not may_send_some(bucket, bucket.axes):
            return None
        if left := self._unsearched.get(id(table), 0):
            self._unsearched[id(table)] = left - 1
            return None

        def all_travel() -> None:
            # Replicas touch different rows.
            if min(axis.size for axis in bucket.axes.of_gradients) == 1:
                self._unsearched[id(table)] = SEARCH_EVERY - 1

        def write(chunk: Tensor, lines: Tensor) -> None:
            rows, marks = bucket.rows_of(lines)
            if whole is None:
                chunk.zero_()
            else:
                chunk.copy_(bucket.lines_of(whole).index_select(0, rows))
            if earlier is not None:
                add_(chunk, bucket.lines_of(earlier).index_select(0, rows))
            chunk[marks] = 0
            chunk[marks, 0] = float(got[0])

        lines = bucket.lines_with(touched_rows((whole, earlier), len(table)))
        return Touched(lines, write, all_travel)


def _weakly(method: Callable[..., None], *first: int) -> Callable[..., None]:
    """Wraps the method so that it does not keep its reducer, and with it the model, alive: torch and the C++
    core hold the wrapper for good."""
    weak = weakref.WeakMethod(method)

    def call(*rest: Tensor) -> None:
        found = weak()
        if found is None:
            raise RuntimeError("A sharded model outlived its handle; keep the handle, or close() it.")
        found(*first, *rest)

    return call


def _nothing() -> None:
    pass


def _no_pass() -> None:
    return None


def _write_rows(out: Tensor, gemm: _C.WeightGradientGemm, dtype: torch.dtype, span: LineSpan) -> None:
    """Writes the rows of `span` of a product in `dtype` into `out` [segments, rows, width]."""
    if out.dtype == dtype:
        gemm.write_blocks(out, span.source, span.step)
    else:
        rows = torch.empty(out.shape, dtype=dtype, device=out.device)
        gemm.write_blocks(rows, span.source, span.step)
        out.copy_(rows)
