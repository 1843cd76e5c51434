"""Gradients of linear weights that wait until the schedule has time for them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyruntime.comm.core import _C
from pyruntime.nn.handed_over import hand_over, handing_weights, take_back


class Product(NamedTuple):
    """dW = dY^T X, not multiplied yet."""

    weight: nn.Parameter
    dy: Tensor
    x: Tensor


Take = Callable[[nn.Parameter, Tensor, Tensor, bool], None]
"""(weight, dY, X, whether it is the step's last product of this weight)."""


class WeightGradients:
    """Takes (dY, X) of the linear weights of `modules` and multiplies them, at once or when it is told.

    take: what is to become of a product; by default it is added to weight.grad.
    """

    def __init__(self, modules: Iterable[nn.Module], take: Take | None = None):
        modules = list(modules)
        self._take = take or add_to_grad
        self._patched = [linear for module in modules for linear in hand_over(module)]
        self._weights = [weight for module in modules for weight in handing_weights(module)]
        self._waiting: list[Product] | None = None
        self.last = False
        """Whether what comes now are the step's last products of their weights."""
        for weight in self._weights:
            _C.set_weight_gradient_sink(weight, self._sink(weight))

    def _sink(self, weight: nn.Parameter) -> Callable[[Tensor, Tensor], None]:
        # Keeps neither this object nor the weight alive: the C++ core holds it for good.
        own, of_weight = weakref.ref(self), weakref.ref(weight)

        def take(dy: Tensor, x: Tensor) -> None:
            taker, found = own(), of_weight()
            if taker is None or found is None:
                raise RuntimeError("A pipeline's stage outlived its Pipeline; keep it, or close() it.")
            taker._on_product(Product(found, dy, x))

        return take

    def _on_product(self, product: Product) -> None:
        if self._waiting is None:
            self._take(*product, self.last)
        else:
            self._waiting.append(product)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[list[Product]]:
        """Products of backward passes within are not multiplied, but appended to the list."""
        products: list[Product] = []
        self._waiting = products
        try:
            yield products
        finally:
            self._waiting = None

    @torch.no_grad()
    def take(self, products: list[Product]) -> None:
        """Multiplies what was deferred."""
        for product in products:
            self._take(*product, self.last)

    def close(self) -> None:
        """Gives the gradients back to autograd."""
        for weight in self._weights:
            _C.set_weight_gradient_sink(weight, None)
        take_back(self._patched)


@torch.no_grad()
def add_to_grad(weight: nn.Parameter, dy: Tensor, x: Tensor, last: bool = False) -> None:
    """weight.grad += dY^T X."""
    if weight.grad is None:
        weight.grad = torch.empty_like(weight)
        _C.write_weight_gradient(weight.grad, dy, x, False)
    else:
        _C.write_weight_gradient(weight.grad, dy, x, True)
