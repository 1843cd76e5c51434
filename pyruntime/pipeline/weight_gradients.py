"""Delays the gradients of linears' and experts' weights until the schedule has time for them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from pyruntime.comm.core import _C
from pyruntime.nn.weight_sinks import (
    AddedToGrad,
    patch_linears,
    stacks_with_sinks,
    unpatch_linears,
    weights_with_sinks,
)

Deferred = Callable[[], None]
"""Computes what remains of dW = dY^T X and adds it to the gradient."""


class Taker(Protocol):
    """The receiver of (dY, X) of a linear weight, which adds dY^T X to the weight's gradient."""

    def add_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor, last: bool, later: bool) -> None:
        """See `Sharded.add_product`."""

    def begin_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor) -> Deferred | None:
        """See `Sharded.begin_product`."""

    def add_gradient(self, weight: nn.Parameter, gradient: Tensor, last: bool) -> None:
        """See `Sharded.add_gradient`."""


class WeightGradients:
    """Takes (dY, X) of the weights of linears and experts in `modules` and multiplies them, at once or when
    `take` is called.

    taker: gets the GEMMs; by default they are added to weight.grad. Between hosts the deferred ones are
    computed in parts while this rank waits for others, with the same bits.
    """

    def __init__(self, modules: Iterable[nn.Module], taker: Taker | None = None):
        modules = list(modules)
        self._taker = taker or AddedToGrad()
        self._patched = [linear for module in modules for linear in patch_linears(module)]
        self._weights = [
            weight
            for module in modules
            for weight in (*weights_with_sinks(module), *stacks_with_sinks(module))
        ]
        self._waiting: list[Deferred] | None = None
        self.last = False
        """Whether the GEMMs from now on are the step's last ones of their weights."""
        for weight in self._weights:
            _C.set_weight_gradient_sink(weight, self._sink(weight))

    def _sink(self, weight: nn.Parameter) -> Callable[..., None]:
        # Keeps neither this object nor the weight alive: the C++ core holds the function for good.
        own, of_weight = weakref.ref(self), weakref.ref(weight)

        def take(dy: Tensor, x: Tensor, later: bool, ends: Sequence[int] = ()) -> None:
            taker, found = own(), of_weight()
            if taker is None or found is None:
                raise RuntimeError("A stage's Pipeline was deleted before backward; keep it, or close() it.")
            if ends:
                taker._on_stack(found, dy, x, ends)
            else:
                taker._on_gemm(found, dy, x, later)

        return take

    def _on_gemm(self, weight: nn.Parameter, dy: Tensor, x: Tensor, later: bool) -> None:
        if self._waiting is None:
            self._taker.add_product(weight, dy, x, self.last, later)
            return
        finish = self._taker.begin_product(weight, dy, x) if later else None
        self._waiting.append(finish or partial(self._add, weight, dy, x))

    def _add(self, weight: nn.Parameter, dy: Tensor, x: Tensor) -> None:
        self._taker.add_product(weight, dy, x, self.last, False)

    def _on_stack(self, stack: nn.Parameter, dy: Tensor, x: Tensor, ends: Sequence[int]) -> None:
        if self._waiting is None:
            self._add_stack(stack, dy, x, ends)
        else:
            self._waiting.append(partial(self._add_stack, stack, dy, x, ends))

    def _add_stack(self, stack: nn.Parameter, dy: Tensor, x: Tensor, ends: Sequence[int]) -> None:
        gradient = torch.empty_like(stack, requires_grad=False)
        _C.write_stack_gradient(gradient, dy, x, ends)
        self._taker.add_gradient(stack, gradient, self.last)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[list[Deferred]]:
        """Within this context the GEMMs of backward passes are not run but appended to the returned list."""
        gemms: list[Deferred] = []
        self._waiting = gemms
        try:
            yield gemms
        finally:
            self._waiting = None

    @torch.no_grad()
    def take(self, gemms: list[Deferred]) -> None:
        """Runs the deferred GEMMs."""
        for finish in gemms:
            finish()

    def close(self) -> None:
        """Lets autograd accumulate the weights' gradients again."""
        for weight in self._weights:
            _C.set_weight_gradient_sink(weight, None)
        unpatch_linears(self._patched)
