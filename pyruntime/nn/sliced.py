"""Linears and experts that take their rows slice by slice, in steps. Between the steps rows travel.

    column    begin(part, x)   sends x [M_r, K], this rank's rows of a slice      end(part) -> y [M, N/P]
    row       begin(part, x)   multiplies x [M, K/P] @ W_r^T and sends rows       end(part) -> y [M_r, N]
    router    route(part, x)   sends nothing                                      -> experts of x, weights
    experts   begin(part, x, routed)   sends x [M_r, D] and where rows go
              multiply(part)           takes the rows that came, gate and up
              scatter(part)            down; sends what the experts make          end(part) -> y [M_r, D]

The backward reverses every step, in reverse order (csrc/ops/slices).
Each slice takes all steps once, and all ranks take the steps of a group in the same order. A linear's dW is
one GEMM over all slices; to the gradient of an expert every slice adds its product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyruntime.comm.groups import crosses_hosts
from pyruntime.nn.linear import ColumnParallelLinear, ParallelLinear
from pyruntime.nn.module import Step
from pyruntime.nn.parallel_experts import ParallelExperts
from pyruntime.nn.router import Routed, Router, Scores


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


class SlicedScores:
    """Scores, slice by slice: the gradient of their weight is summed over the group once."""

    def __init__(self, scores: Scores):
        self._scores = scores
        self._weight: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """Returns the scores [M_r, N] of x [M_r, D], this rank's rows of a slice."""
        return self._scores(Step(lambda: self._of(x)))

    def _of(self, x: Tensor) -> Tensor:
        if self._weight is None:
            self._weight = self._scores.shared_weight()
        return self._scores.of(x, self._weight)


class SlicedRouter(SlicedScores):
    """A router, slice by slice. Its losses are those of the rows of all slices; the last slice has them."""

    def __init__(self, router: Router, slices: int):
        super().__init__(router)
        self._router, self._slices = router, slices
        self._of_slices: list[tuple[Tensor, Tensor]] = []

    def route(self, part: int, x: Tensor) -> Routed:
        """Returns the experts of x [M_r, D], this rank's rows of a slice, and their weights. Slices come in
        order."""
        return self._router(Step(lambda: self._route(part, x)))

    def _route(self, part: int, x: Tensor) -> Routed:
        logits = self._of(x)
        routed = self._router.routes(logits)
        self._of_slices.append((logits, routed.ids))
        if part + 1 < self._slices:
            return routed
        logits, ids = (torch.cat(each) for each in zip(*self._of_slices, strict=True))
        return self._router.with_losses(routed, logits, ids)


class SlicedExperts:
    """The experts of a layer, slice by slice. rows: their number, as `ParallelExperts` takes it."""

    def __init__(self, layer: ParallelExperts, rows: Sequence[int]):
        self._layer, self._rows, form = layer, list(rows), layer.form
        self._cut = layer.has_own_rows or layer.sequence_parallel
        self._experts = torch.classes.pyruntime.SlicedExperts(
            layer.group.name, layer.experts, self._cut, layer.tier, form.transposed, form.interleaved,
            form.scales_input, form.alpha, form.limit, form.shift,
        )  # fmt: skip
        self._shared: Tensor | None = None
        self._begun: dict[int, tuple] = {}

    def begin(self, part: int, x: Tensor, routed: Routed) -> None:
        """Sends this rank's rows x [M_r, D] of a slice, and their experts and weights."""
        self._begun[part] = self._layer(Step(lambda: self._begin(part, x, *routed)))

    def multiply(self, part: int) -> None:
        """Computes the first half of what this rank's experts make of the slice's rows."""
        begun, *others, flight = self._begun[part]
        step = Step(lambda: torch.ops.pyruntime.multiply_experts(begun, self._shared, flight))
        self._begun[part] = self._layer(step), *others, flight

    def scatter(self, part: int) -> None:
        """Computes the second half, and sends it."""
        multiplied, *others, flight = self._begun[part]
        step = Step(lambda: torch.ops.pyruntime.scatter_experts(multiplied, flight))
        self._begun[part] = self._layer(step), *others, flight

    def end(self, part: int) -> Tensor:
        """Returns this rank's rows of the slice's result."""
        scattered, own, x, flight = self._begun.pop(part)
        step = Step(lambda: torch.ops.pyruntime.finish_experts(scattered, x, flight))
        return self._layer(step)[:own]

    def _begin(self, part: int, x: Tensor, ids: Tensor, weights: Tensor) -> tuple:
        layer, rows, own = self._layer, self._rows[part], len(x)
        if layer.has_own_rows:
            x, ids, weights = layer.padded(x, ids, weights, rows)
            rows *= layer.group.size
        x, weights, parameters = layer.operands(x, weights)
        if self._shared is None:
            names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
            given = [parameters.get(name) for name in names]
            self._shared = torch.ops.pyruntime.share_experts(*given, self._experts)
        flight = torch.classes.pyruntime.ExpertsFlight()
        begun = torch.ops.pyruntime.begin_experts(x, ids, weights, rows, self._experts, flight)
        layer.note(rows, self._cut, ids.shape[1])
        return begun, own, x.detach(), flight
