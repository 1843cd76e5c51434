"""Gradients leave as they are written.

A weight of a linear layer hands (dY, X) over (csrc/ops/weight_gradient.h), and each chunk of dW = dY^T X is
multiplied where it leaves from, in the order in which others wait for it. Every other gradient comes from
autograd, is copied into its unit's chunks when the unit is complete, and is dropped.

Units leave in one order, the same on every rank: that in which the first backward pass completed them on rank
0. A unit that is complete before its turn waits as a tensor; one that never is leaves as zeros at the end of
the pass, without marks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pyruntime.comm.core import _C
from pyruntime.data_parallel.axes import Axes
from pyruntime.data_parallel.reduction import Reduced, launch
from pyruntime.data_parallel.units import Unit
from pyruntime.ops.layers import add_

LEAST_PRODUCT = 5e8
"""Floating-point operations of one chunk's product. Below it a weight gradient is multiplied whole and
copied: of a chunk, the columns of dY must be made contiguous first, which costs more than copying a small
result; products of 1e8 lose a tenth of their speed, of 3e8 a fifth where the weight is as narrow as 256."""


class _Inbox:
    """What has come of one unit's gradient, parameter by parameter."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.whole: list[Tensor | None] = [None] * len(unit.parameters)
        """Gradients of this pass, of the parameter's dtype."""
        self.earlier: list[Tensor | None] = [None] * len(unit.parameters)
        """Sums of the passes before, fp32 (fp64 of doubles)."""
        self.left = False
        """Launched in this step."""

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


class GradientReducer:
    """Sums the gradients of `units` over `axes` while the backward pass goes on.

    linears: the weights whose (dY, X) may be taken. on_reduced(unit, gradient) is called once a unit and
    step, in the order of the units' leaving. reduce_dtype: what gradients travel as; None: as the parameters
    are.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        axes: Axes,
        linears: Sequence[nn.Parameter],
        before_leaving: Callable[[], None],
        on_reduced: Reduced,
        reduce_dtype: torch.dtype | None = None,
    ):
        self._axes, self._reduce_dtype = axes, reduce_dtype
        self._before_leaving, self._on_reduced = before_leaving, on_reduced
        self._inboxes = [_Inbox(unit) for unit in units]
        self._place_of = {
            id(parameter): (index, owner)
            for index, unit in enumerate(units)
            for owner, parameter in enumerate(unit.parameters)
        }
        self._order: list[int] | None = None
        self._seen: list[int] = []  # units in the order of their completion, in the first pass
        self._used_again: set[int] = set()  # more than once in a pass: complete only when it ends
        self._next = 0
        self._accumulating = False
        self._several_passes = False
        self._in_pass = False
        self._ended = False
        self._hooks = []
        taken = {id(p) for p in linears}
        for index, unit in enumerate(units):
            for owner, parameter in enumerate(unit.parameters):
                hook = parameter.register_post_accumulate_grad_hook(self._hook(index, owner))
                self._hooks.append(hook)
            if id(unit.parameters[0]) in taken and unit.is_matrix():
                _C.set_weight_gradient_sink(unit.parameters[0], self._sink(index))

    # Neither keeps this reducer, and with it the model, alive: torch and the C++ core hold them for good.

    def _sink(self, index: int) -> Callable[[Tensor, Tensor], None]:
        reducer = weakref.ref(self)
        return lambda dy, x: _alive(reducer)._on_product(index, dy, x)

    def _hook(self, index: int, owner: int) -> Callable[[Tensor], None]:
        reducer = weakref.ref(self)
        return lambda parameter: _alive(reducer)._on_gradient(index, owner, parameter)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes within add to the gradients and send nothing."""
        outer, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = outer

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Of the backward passes within, none that is not within `accumulate()` is the step's last one: each
        may bring the gradients of some parameters."""
        self._several_passes = True
        try:
            yield
        finally:
            self._several_passes = False

    @torch.no_grad()
    def add_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor, last: bool) -> None:
        """Adds dY^T X to the gradient of `weight`, within `passes()`. last: nothing more comes for it in this
        step; not so within `accumulate()`."""
        if not self._several_passes:
            raise RuntimeError("add_product() adds to gradients within passes().")
        index, owner = self._place_of[id(weight)]
        self._check_open(index)
        if last and not self._accumulating:
            self._take_product(index, owner, dy, x)
        else:
            self._accumulate_product(self._inboxes[index], owner, dy, x)

    def finish(self) -> None:
        """All gradients of this step are reduced when it returns; afterwards a new step begins."""
        if not self._ended:
            self._end_pass()
        self._axes.shard.make_room(0)
        self._axes.replicate.make_room(0)
        for inbox in self._inboxes:
            inbox.clear()
            inbox.left = False
        self._next = 0
        self._ended = False

    def close(self) -> None:
        """Gives the gradients back to autograd."""
        for hook in self._hooks:
            hook.remove()
        for inbox in self._inboxes:
            for parameter in inbox.unit.parameters:
                _C.set_weight_gradient_sink(parameter, None)

    # -- what comes

    @torch.no_grad()
    def _on_gradient(self, index: int, owner: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:  # the sink has taken it
            return
        self._begin_pass(index)
        inbox = self._inboxes[index]
        if self._accumulating:
            _add(inbox.earlier, owner, gradient)
            return
        _put(inbox.whole, owner, gradient)
        if inbox.is_complete():
            self._on_complete(index)

    @torch.no_grad()
    def _on_product(self, index: int, dy: Tensor, x: Tensor) -> None:
        self._begin_pass(index)
        if self._accumulating:
            self._accumulate_product(self._inboxes[index], 0, dy, x)
        else:
            self._take_product(index, 0, dy, x)

    def _take_product(self, index: int, owner: int, dy: Tensor, x: Tensor) -> None:
        """The last of a step for parameter `owner` of a unit."""
        inbox = self._inboxes[index]
        alone = inbox.unit.is_matrix() and inbox.whole[0] is None
        if alone and self._may_leave(index) and self._is_worth_cutting(inbox.unit, dy):
            self._leave(index, product=(dy, x))
            self._leave_what_waits()
            return
        gradient = torch.empty_like(inbox.unit.parameters[owner])
        _C.write_weight_gradient(gradient, dy, x, False)
        _put(inbox.whole, owner, gradient)
        if inbox.is_complete():
            self._on_complete(index)

    def _is_worth_cutting(self, unit: Unit, dy: Tensor) -> bool:
        """Whether a rank's rows of the product are no less efficient alone."""
        smallest = min(part.lines for part in unit.parts) * unit.width
        return 2 * smallest * len(dy) >= LEAST_PRODUCT

    def _accumulate_product(self, inbox: _Inbox, owner: int, dy: Tensor, x: Tensor) -> None:
        earlier = inbox.earlier[owner]
        if earlier is not None and earlier.dtype == dy.dtype:
            _C.write_weight_gradient(earlier, dy, x, True)
            return
        gradient = torch.empty_like(inbox.unit.parameters[owner])
        _C.write_weight_gradient(gradient, dy, x, False)
        _add(inbox.earlier, owner, gradient)

    def _begin_pass(self, index: int) -> None:
        self._check_open(index)
        if not self._in_pass:
            self._in_pass = True
            Variable._execution_engine.queue_callback(self._on_pass_ended)

    def _check_open(self, index: int) -> None:
        if self._ended or self._inboxes[index].left:
            raise RuntimeError(
                f"A gradient of {self._inboxes[index].unit.name} came after this step's gradients had left: "
                "backward() ran twice without optimizer.step() between (run all but the last pass of a "
                "step in handle.accumulate()), or the weight is used more often in this pass than in the "
                "first one."
            )

    def _on_pass_ended(self) -> None:
        self._in_pass = False
        if not self._accumulating and not self._several_passes:
            self._end_pass()

    # -- what leaves

    def _may_leave(self, index: int) -> bool:
        """Whether it is the unit's turn, and nothing more will come for it."""
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
        """What has not left leaves now, complete or not."""
        if self._order is None:
            self._order = self._agree_on_order()
        while self._next < len(self._order):
            self._leave(self._order[self._next])
        self._ended = True

    def _agree_on_order(self) -> list[int]:
        """Rank 0's order of completion, then what did not come."""
        rest = [index for index in range(len(self._inboxes)) if index not in self._seen]
        order = self._seen + rest
        for axis in (self._axes.shard, self._axes.replicate):
            order = axis.of_all_ranks(order)[0]
        return order

    def _leave(self, index: int, product: tuple[Tensor, Tensor] | None = None) -> None:
        inbox = self._inboxes[index]
        unit = inbox.unit
        got = [True] if product else inbox.got()

        def write(chunk: Tensor, begin: int) -> None:
            for span in unit.spans(begin, len(chunk)):
                out = chunk[span.place : span.place + span.count]
                source = slice(span.source, span.source + span.count)
                if product is not None:
                    _multiply(out, product[0][:, source], product[1])
                else:
                    _copy(out, inbox.whole[span.owner], unit, span.owner, source)
                if inbox.earlier[span.owner] is not None:
                    add_(out, unit.lines_of(span.owner, inbox.earlier[span.owner])[source])
            unit.fill(chunk, begin, got)

        if self._next == 0:
            self._before_leaving()
        inbox.left = True
        self._next += 1
        launch(unit, self._reduce_dtype or unit.dtype, self._axes, write, self._on_reduced)
        inbox.clear()


def _alive(reducer: weakref.ref[GradientReducer]) -> GradientReducer:
    found = reducer()
    if found is None:
        raise RuntimeError("A sharded model outlived its handle; keep the handle, or close() it.")
    return found


def _multiply(out: Tensor, dy: Tensor, x: Tensor) -> None:
    if out.dtype == dy.dtype:
        _C.write_weight_gradient(out, dy, x, False)
    else:
        product = torch.empty(out.shape, dtype=dy.dtype, device=out.device)
        _C.write_weight_gradient(product, dy, x, False)
        out.copy_(product)


def _copy(out: Tensor, gradient: Tensor | None, unit: Unit, owner: int, source: slice) -> None:
    if gradient is None:
        out.zero_()
    else:
        out.copy_(unit.lines_of(owner, gradient)[source])


def _put(gradients: list[Tensor | None], owner: int, gradient: Tensor) -> None:
    """A parameter that is used several times gets the sum."""
    before = gradients[owner]
    gradients[owner] = gradient if before is None else before + gradient


def _add(sums: list[Tensor | None], owner: int, gradient: Tensor) -> None:
    """Adds in fp32."""
    before = sums[owner]
    if before is None:
        wide = gradient.dtype if gradient.dtype == torch.float64 else torch.float32
        sums[owner] = gradient.to(wide)
    else:
        add_(before, gradient)
