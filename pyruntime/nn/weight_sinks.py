"""Weights with a sink: the backward of their layer gives (dY, X) to it instead of multiplying them.

`_C.set_weight_gradient_sink(weight, take, keeps)` registers a sink, take(dY, X, later) of a linear, or
take(dY, X, later, ends) of a stack of matrices (csrc/ops/weight_gradient.h). Where `later` is true, the op
waits for other hosts, and `_C.WeightProduct` multiplies during such waits."""

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
from pyruntime.nn.parallel_experts import ParallelExperts
from pyruntime.ops.primitives import linear


def readers_of(model: nn.Module) -> dict[int, int]:
    """Returns {id of a parameter: how many modules have it}."""
    readers: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            readers[id(parameter)] = readers.get(id(parameter), 0) + 1
    return readers


def weights_with_sinks(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable weights that can have a sink: only one module reads them, a linear layer."""
    readers = readers_of(model)
    return [
        module.weight
        for module in model.modules()
        if (type(module) is nn.Linear or (isinstance(module, ParallelLinear) and not module.transposed))
        and module.weight.requires_grad
        and readers[id(module.weight)] == 1
    ]


def stacks_with_sinks(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable matrices of experts that can have a sink."""
    readers = readers_of(model)
    return [
        stack
        for module in model.modules()
        if isinstance(module, ParallelExperts)
        for stack in (module.gate_up_proj, module.down_proj)
        if stack.requires_grad and readers[id(stack)] == 1
    ]


def patch_linears(model: nn.Module) -> list[nn.Linear]:
    """Gives every nn.Linear a forward whose backward uses its weight's sink. Returns the changed linears."""
    patched = [
        module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module)
    ]
    for module in patched:
        module.forward = types.MethodType(_linear_forward, module)
    return patched


def unpatch_linears(patched: Iterable[nn.Linear]) -> None:
    """Undoes `patch_linears`."""
    for module in patched:
        del module.forward


class InTurn:
    """A queue of products that are multiplied during waits and used in the order in which they were added.

    Each is finished and used when the second product after it is added. That is the same point of the program
    on every rank, so gradients are sent in one order among all other ops. A distance of one would leave
    nothing to multiply while a column linear waits: it adds its own product just before that wait."""

    MOST = 2

    def __init__(self) -> None:
        self._finish: deque[Callable[[], None]] = deque()
        self.is_open = False
        """Whether the program is within `passes()`."""

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Uses all products added inside it by its end. After an exception the remaining ones are dropped."""
        self.is_open = True
        try:
            yield
            with torch.no_grad():
                self.finish()
        finally:
            self._finish.clear()
            self.is_open = False

    def add(self, finish: Callable[[], None]) -> None:
        """Adds a product. finish: computes the rest of it, and uses it."""
        self._finish.append(finish)
        while len(self._finish) > self.MOST:
            self._finish.popleft()()

    def finish(self) -> None:
        """Finishes and uses all products."""
        while self._finish:
            self._finish.popleft()()


class AddedToGrad:
    """A sink that adds the products of weights to their gradients: weight.grad += dY^T X."""

    def __init__(self) -> None:
        self._in_turn = InTurn()
        self._new: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """{id of a weight: its future `.grad`}, while one of its products waits."""

    def passes(self) -> contextlib.AbstractContextManager[None]:
        """Inside it, `.grad` may lack added products, or hold only a part of one."""
        return self._in_turn.passes()

    @torch.no_grad()
    def add_product(
        self, weight: nn.Parameter, dy: Tensor, x: Tensor, last: bool = False, later: bool = False
    ) -> None:
        """Adds dY^T X to weight.grad. last: ignored here, see `Sharded.add_product`. later: as given to the
        sink; if true, a product within `passes()` may be multiplied during waits."""
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
    def add_gradient(self, weight: nn.Parameter, gradient: Tensor, last: bool = False) -> None:
        """Adds a gradient to weight.grad. last: see `add_product`."""
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad.add_(gradient)

    @torch.no_grad()
    def begin_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor) -> Callable[[], None]:
        """Lets waits multiply the product from now on. Returns a function that computes the rest of it. The
        functions of one weight must be called in the order in which its products began."""
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
