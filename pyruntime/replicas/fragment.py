"""A part of the model with a round of its own: outer iterate, momentum and the displacement to send."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from pyruntime.ops.attention import statistics_dtype
from pyruntime.ops.outer_step import BLOCK, outer_step_, squared_displacement, squared_gap
from pyruntime.replicas.averaging import WIDTH
from pyruntime.replicas.methods import Method
from pyruntime.replicas.weights import Value

Number: TypeAlias = float | Tensor
"""A number of the host; on devices a float64 tensor without dimensions, which the host does not read."""
Flat: TypeAlias = tuple[Value, Tensor, Tensor, Tensor, Tensor]
"""Views of the same elements: a value, its numbers x, outer iterate z, momentum m, and the buffer to send."""


class Fragment:
    """The arithmetic of `OuterOptimizer` on some of the values, which are all on `device`, and the state of
    their round."""

    NUMBERS: ClassVar[int] = 6
    """Length of what `progress` returns."""

    def __init__(self, values: Sequence[Value], method: Method, device: torch.device):
        self._values, self._method = values, method
        dtypes = {statistics_dtype(value.tensor) for value in values} or {torch.float32}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        travelling = {value.travels_as for value in values}
        elements = sum(value.tensor.numel() for value in values)
        whole = -(-elements // WIDTH) * WIDTH
        self.base, self.momentum = (torch.zeros(elements, dtype=dtype, device=device) for _ in range(2))
        travels_as = travelling.pop() if len(travelling) == 1 else dtype
        self.sent = torch.zeros(whole + WIDTH, dtype=travels_as, device=device)
        """Displacements; after the wait, their sum over the replicas. The last line holds the squared length
        of the round's first step."""
        self.steps = self.length = 0
        """Steps of the inner optimizer so far in this round, and the step that ends it."""
        self.is_pending = False
        """Whether displacements were sent and the outer step with them is still to come."""
        self.has_come = True
        """Whether `sent` holds the sum."""
        self.count = 1
        """Replicas in the sum."""
        self.sent_steps = 0
        """Steps of the round that `sent` belongs to."""
        self.moved = torch.zeros(1)
        """1 if the last outer step moved the outer iterate, 0 if it had no sums; always on the CPU."""
        self.first_square: Number = self._number(0.0)
        """Squared length of this round's first step, over all parts of the replica."""
        with torch.no_grad():
            for _, x, z, _, _ in self._flat():
                z.copy_(x)

    def _number(self, value: float) -> Number:
        """Returns a number as this fragment's squares are."""
        device = self.base.device
        return value if device.type == "cpu" else torch.full((), value, dtype=torch.float64, device=device)

    def _flat(self) -> Iterator[Flat]:
        first = 0
        for value in self._values:
            last = first + value.tensor.numel()
            z, m, sent = (each[first:last] for each in (self.base, self.momentum, self.sent))
            yield value, value.tensor.detach().view(-1), z, m, sent
            first = last

    def pass_(self, step: Number | None, pull: bool, launch: bool) -> None:
        """Makes one pass over all values.

        step: takes the outer step with the sum of displacements times this; None: no outer step. pull: moves
        replicas to the outer iterate. launch: writes displacements into `sent`, measured before the outer
        step if the method restarts from the outer iterate, else after it."""
        method = self._method
        self.moved.fill_(0 if step is None else 1)
        for value, x, z, m, sent in self._flat():
            outer_step_(
                x,
                z,
                m,
                sent,
                value.rounded,
                step=step,
                pulls=pull,
                launches=launch,
                lr=method.lr,
                momentum=method.momentum,
                nesterov=method.nesterov,
                clip=method.clip,
                pull=method.pull,
                restarts=method.restarts,
            )

    @torch.no_grad()
    def take_mean(self, mean: float) -> None:
        """Sets outer iterate and values to the mean over the replicas. mean: the factor of the sum."""
        for _, _, z, _, sent in self._flat():
            for some, of in zip(z.split(BLOCK), sent.split(BLOCK), strict=True):
                some.sub_(of.to(some.dtype), alpha=mean)
        self._go_to_base()
        self.is_pending = False

    def _go_to_base(self) -> None:
        for value, x, z, _, _ in self._flat():
            x.copy_(z)
            if value.rounded is not None:
                value.rounded.copy_(value.tensor)

    def begin_round(self) -> None:
        """Begins a round whose displacements have been written. Zeroes the gap between them and the last
        line: packing may have turned the zeros of the round before into values."""
        self.sent[len(self.base) :] = 0
        self.sent[-WIDTH] = self.first_square
        self.sent_steps, self.steps, self.is_pending, self.has_come = self.steps, 0, True, False

    @torch.no_grad()
    def begin_anew(self, length: int, behind: bool) -> None:
        """Sets the replica to the outer iterate and begins a round of `length` steps. behind: whether a
        sum is under way; this replica adds zeros to it."""
        self._go_to_base()
        self.steps, self.length, self.is_pending, self.has_come = 0, length, behind, not behind
        if behind:
            self.sent_steps = length
            self.sent.zero_()
        else:
            self.moved.zero_()

    def sent_square(self) -> Number:
        """Returns the sum of `first_square` over the replicas."""
        square = self.sent[-WIDTH].double()
        return square.item() if square.device.type == "cpu" else square

    def take_first_square(self, square: Tensor) -> None:
        """Takes up the squared length of the round's first step, of a checkpoint."""
        self.first_square = self._number(float(square))

    def square_moved(self) -> Number:
        """Returns ||z - x||^2 over the values that this rank counts. If rounds begin at the outer iterate, z
        is rounded to x's dtype, because that is where x began."""
        rounds = self._method.pull == 1
        return self._sum(
            squared_displacement(z, x, rounds) for value, x, z, _, _ in self._flat() if value.counts
        )

    def square_gap(self, mean: float) -> Number:
        """Returns ||z_t - (z_{t-1} - mean(d))||^2 over the values that this rank counts. z_t - z_{t-1} is
        -lr m if the outer iterate moved. mean: the factor of the sum."""
        lr = self._method.lr * float(self.moved)
        return self._sum(
            squared_gap(sent, m, mean, lr) for value, _, _, m, sent in self._flat() if value.counts
        )

    def _sum(self, squares: Iterable[Number]) -> Number:
        if self.base.device.type == "cpu":
            return math.fsum(map(float, squares))
        return sum(squares, self._number(0.0))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns base, momentum and sent, each by the values' names and in their shapes."""
        result: dict[str, dict[str, Tensor]] = {"base": {}, "momentum": {}, "sent": {}}
        for value, _, *flat in self._flat():
            for kind, tensor in zip(result, flat, strict=True):
                result[kind][value.name] = tensor.view(value.tensor.shape)
        return result

    def progress(self) -> list[float]:
        sent_steps = self.sent_steps if self.is_pending else 0
        square = float(self.sent_square())
        return [self.steps, self.length, sent_steps, square, self.count, float(self.moved)]

    def go_on(self, numbers: Sequence[float]) -> None:
        """Continues from the `progress` of another."""
        self.steps, self.length, self.sent_steps = map(int, numbers[:3])
        self.is_pending, self.has_come = self.sent_steps > 0, True
        self.sent[-WIDTH], self.count = numbers[3], int(numbers[4])
        self.moved.fill_(numbers[5])
