"""Column and row linears that take their rows slice by slice, in two steps. Between the steps rows travel.

    column   begin(part, x)   sends x [M_r, K], this rank's rows of a slice      end(part) -> y [M, N/P]
    row      begin(part, x)   multiplies x [M, K/P] @ W_r^T and sends rows       end(part) -> y [M_r, N]

The backward reverses every step, in reverse order (csrc/ops/sliced_linears.cpp). Each slice takes both steps
once, and all ranks take the steps of a group in the same order. dW is one GEMM over all slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyruntime.comm.groups import crosses_hosts
from pyruntime.nn.linear import ColumnParallelLinear, ParallelLinear
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
    def _end(self, begun: Tensor, *others: Any) -> Tensor:
        """Returns the result of the slice that `begun` represents."""


MOST_GATHERED_AGAIN = 2
"""Limit on slices whose rows are gathered again in the backward pass: more would need more open flights than
a group has slots."""


class SlicedColumn(_Sliced):
    """A column linear, slice by slice. keep_gathered=None also keeps the gathered rows of more than
    MOST_GATHERED_AGAIN slices. Raises ValueError for such slices with keep_gathered=False."""

    def __init__(self, linear: ColumnParallelLinear, rows: Sequence[int]):
        super().__init__(linear, rows)
        keep, many = linear.keep_gathered, len(self._rows) > MOST_GATHERED_AGAIN
        if keep is False and many:
            raise ValueError(
                f"{linear.label or linear}: keep_gathered=False gathers the rows of {len(self._rows)} slices "
                f"again, and at most {MOST_GATHERED_AGAIN} can be; use fewer slices, or leave it out."
            )
        weight = linear.weight
        self._keeps = (many or crosses_hosts(linear.group.name, weight.device)) if keep is None else keep

    def begin(self, part: int, x: Tensor) -> None:
        """Sends this rank's rows x [M_r, K] of a slice."""
        self._begun[part] = self._linear(Step(lambda: self._begin(part, x)))

    def _begin(self, part: int, x: Tensor) -> tuple:
        linear, flight = self._linear, torch.classes.pyruntime.SlicedFlight(part)
        rows = self._rows[part]
        x, weight, _ = linear.operands(x)
        # Rows that are gathered again are here for dW in the backward pass of this step, not in the next
        # one's. The weight itself only decides the tier.
        shared = None if self._keeps else self._share(weight)
        options = (linear.group.name, rows, linear.tier, linear.wire, self._weight, flight)
        begun = torch.ops.pyruntime.begin_column(x, weight.detach(), shared, *options)
        linear.note(rows, True)
        return begun, x.detach(), flight

    def _end(self, begun: Tensor, x: Tensor, flight) -> Tensor:
        _, weight, bias = self._linear.operands(begun)
        shared = self._share(weight)
        return torch.ops.pyruntime.end_column(begun, x, shared, bias, self._weight, flight)


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
