"""Linear layers whose weight has a sink: their backward hands (dY, X) over instead of multiplying them.

`_C.set_weight_gradient_sink(weight, take)` says who takes them (csrc/ops/weight_gradient.h): take(dY, X,
later). Where `later` is true the op waits for other hosts, and `_C.WeightProduct` multiplies in such waits.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pyruntime.comm.core import _C
from pyruntime.nn.linear import ParallelLinear
from pyruntime.ops.primitives import linear


def readers_of(model: nn.Module) -> dict[int, int]:
    """How many modules have each parameter, by its id."""
    readers: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            readers[id(parameter)] = readers.get(id(parameter), 0) + 1
    return readers


def weights_with_sinks(model: nn.Module) -> list[nn.Parameter]:
    """Trainable weights that can have a sink: their only reader is a linear layer."""
    readers = readers_of(model)
    return [
        module.weight
        for module in model.modules()
        if (type(module) is nn.Linear or (isinstance(module, ParallelLinear) and not module.transposed))
        and module.weight.requires_grad
        and readers[id(module.weight)] == 1
    ]


def patch_linears(model: nn.Module) -> list[nn.Linear]:
    """Gives every nn.Linear a forward whose backward asks for its weight's sink. Returns those changed."""
    patched = [
        module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module)
    ]
    for module in patched:
        module.forward = types.MethodType(_linear_forward, module)
    return patched


def unpatch_linears(patched: Iterable[nn.Linear]) -> None:
    """They are as they were before `patch_linears`."""
    for module in patched:
        del module.forward


class InTurn:
    """Products that are multiplied under waits, and used in the order in which they came.

    Each is used when the second one after it comes, whatever has been multiplied by then: at the same point
    of the program on every rank, so that what leaves then leaves in one order among all other ops. One behind
    would leave nothing to the wait of a column linear, which hands its own product over just before it.
    """

    MOST = 2

    def __init__(self) -> None:
        self._finish: deque[Callable[[], None]] = deque()
        self.is_open = False
        """Within `passes()`."""

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """All that is added within it has been used at its end; of what fails, nothing more is."""
        self.is_open = True
        try:
            yield
            with torch.no_grad():
                self.finish()
        finally:
            self._finish.clear()
            self.is_open = False

    def add(self, finish: Callable[[], None]) -> None:
        """finish: multiplies what is left of a product, and uses it."""
        self._finish.append(finish)
        while len(self._finish) > self.MOST:
            self._finish.popleft()()

    def finish(self) -> None:
        """Uses all of them."""
        while self._finish:
            self._finish.popleft()()


class AddedToGrad:
    """Takes (dY, X) of linear weights: weight.grad += dY^T X."""

    def __init__(self) -> None:
        self._in_turn = InTurn()
        self._new: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """By the weight's id: what is going to be its `.grad`, while a product of it waits."""

    def passes(self) -> contextlib.AbstractContextManager[None]:
        """Within it `.grad` may lack products that have been added, or hold a part of one."""
        return self._in_turn.passes()

    @torch.no_grad()
    def add_product(
        self, weight: nn.Parameter, dy: Tensor, x: Tensor, last: bool = False, later: bool = False
    ) -> None:
        """`last` is for others who take (dY, X): see `Sharded.add_product`. later: what the sink was told;
        within `passes()` the product may then be multiplied under waits."""
        if not later:
            adds = weight.grad is not None
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
            _C.WeightGradientGemm(dy, x).write(weight.grad, 0, adds)
            return
        finish = self.begin_product(weight, dy, x)
        if self._in_turn.is_open:
            self._in_turn.add(finish)
        else:
            finish()

    @torch.no_grad()
    def begin_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor) -> Callable[[], None]:
        """The product may be multiplied under waits from now on; what is returned multiplies the rest of it,
        and is called in the order in which a weight's products begin."""
        out = self._new.get(id(weight)) if weight.grad is None else weight.grad
        adds = out is not None
        if out is None:
            out = self._new[id(weight)] = torch.empty_like(weight)
        product = _C.WeightProduct(out, dy, x, adds)

        def finish() -> None:
            product.finish()
            self._new.pop(id(weight), None)
            if weight.grad is None:
                weight.grad = out

        return finish


def _linear_forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)
