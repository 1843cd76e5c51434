"""Column and row linears that take their rows slice by slice, in two steps. Between the steps rows travel.

    column   begin(part, x)   sends x [M_r, K], this rank's rows of a slice      end(part) -> y [M, N/P]
    row      begin(part, x)   multiplies x [M, K/P] @ W_r^T and sends rows       end(part) -> y [M_r, N]

The backward reverses every step, in reverse order (csrc/ops/sliced_linears.cpp). Each slice takes both steps
once, and all ranks take the steps of a group in the same order. A column linear keeps its gathered X, and dW
is one GEMM over all slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from pyruntime.nn.linear import ParallelLinear
from pyruntime.nn.module import Step


class _Sliced(ABC):
    """The slices of one linear in one forward pass. rows: how many each slice has over all ranks."""

    def __init__(self, linear: ParallelLinear, rows: Sequence[int]):
        if not linear.sequence_parallel or linear.dim != 0 or not linear.group.name:
            raise ValueError(f"{linear.label or linear} cannot be sliced: its rows are not cut over ranks.")
        self._linear = linear
        self._rows = list(rows)
        self._weight = torch.classes.pyruntime.SlicedWeight(self._rows)
        self._shared: Tensor | None = None
        self._begun: dict[int, tuple] = {}

    def _share(self, weight: Tensor) -> Tensor:
        """Ties the slices to the weight for autograd. dW is computed right after the last slice's dX."""
        if self._shared is None:
            self._shared = torch.ops.pyruntime.share_weight(weight, self._weight)
        return self._shared

    def end(self, part: int) -> Tensor:
        return self._linear(Step(lambda: self._end(*self._begun.pop(part))))

    @abstractmethod
    def _end(self, begun: Tensor, flight) -> Tensor:
        """Returns the result of the slice that `begun` represents."""


class SlicedColumn(_Sliced):
    """A column linear, slice by slice."""

    def begin(self, part: int, x: Tensor) -> None:
        """Sends this rank's rows x [M_r, K] of a slice."""
        self._begun[part] = self._linear(Step(lambda: self._begin(part, x)))

    def _begin(self, part: int, x: Tensor) -> tuple:
        linear, flight = self._linear, torch.classes.pyruntime.SlicedFlight(part)
        rows = self._rows[part]
        x, weight, _ = linear.operands(x)
        # The weight only decides the tier here; its gradient comes through `_share`.
        begun = torch.ops.pyruntime.begin_column(
            x, weight.detach(), linear.group.name, rows, linear.tier, linear.wire, flight
        )
        linear.note(rows, True)
        return begun, flight

    def _end(self, begun: Tensor, flight) -> Tensor:
        _, weight, bias = self._linear.operands(begun)
        return torch.ops.pyruntime.end_column(begun, self._share(weight), bias, self._weight, flight)


class SlicedRow(_Sliced):
    """A row linear, slice by slice."""

    def begin(self, part: int, x: Tensor) -> None:
        self._begun[part] = self._linear(Step(lambda: self._begin(part, x)))

    def _begin(self, part: int, x: Tensor) -> tuple:
        linear, flight = self._linear, torch.classes.pyruntime.SlicedFlight(part)
        x, weight, bias = linear.operands(x)
        begun = torch.ops.pyruntime.begin_row(
            x, self._share(weight), bias, self._weight, linear.group.name, linear.tier, linear.wire, flight
        )
        linear.note(len(x), True)
        return begun, flight

    def _end(self, begun: Tensor, flight) -> Tensor:
        return torch.ops.pyruntime.end_row(begun, flight)
