"""One part of the model that meets at a time: its outer iterate, its momentum and the snapshot that
travels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from pyruntime.ops.attention import statistics_dtype
from pyruntime.ops.outer_step import outer_step_, squared_displacement, squared_gap
from pyruntime.replicas.averaging import WIDTH
from pyruntime.replicas.methods import Method
from pyruntime.replicas.weights import Value

BLOCK = 1 << 16
"""Elements that operations of torch go over at once, so that what lies between them is small."""

Flat: TypeAlias = tuple[Value, Tensor, Tensor, Tensor, Tensor]
"""Of the same elements: a value, its numbers x, the outer iterate z, the momentum m, what travels."""


class Fragment:
    """The arithmetic of `OuterOptimizer` on some of the values, and where their round stands."""

    NUMBERS: ClassVar[int] = 6
    """That `progress` has."""

    def __init__(self, values: Sequence[Value], method: Method):
        self._values, self._method = values, method
        dtypes = {statistics_dtype(value.tensor) for value in values} or {torch.float32}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        travelling = {value.travels_as for value in values}
        elements = sum(value.tensor.numel() for value in values)
        whole = -(-elements // WIDTH) * WIDTH
        self.base, self.momentum = (torch.zeros(elements, dtype=dtype) for _ in range(2))
        self.sent = torch.zeros(whole + WIDTH, dtype=travelling.pop() if len(travelling) == 1 else dtype)
        """Displacements, and once they have been awaited their sum over the replicas; in the last line the
        square of the length of the round's first step."""
        self.steps = self.length = 0
        """Of the inner optimizer in this round until now, and when it ends."""
        self.is_pending = False
        """Displacements have left, and the outer step with them is to come."""
        self.has_come = True
        """What is in `sent` is their sum."""
        self.count = 1
        """Replicas whose displacements that is of."""
        self.sent_steps = 0
        """Of the round that they are of."""
        self.moved = torch.zeros(1)
        """1 where the last outer step moved the outer iterate, 0 where there was nothing to step with."""
        self.first_square = 0.0
        """Of this round, over all parts of the replica."""
        with torch.no_grad():
            for _, x, z, _, _ in self._flat():
                z.copy_(x)

    def _flat(self) -> Iterator[Flat]:
        first = 0
        for value in self._values:
            last = first + value.tensor.numel()
            z, m, sent = (each[first:last] for each in (self.base, self.momentum, self.sent))
            yield value, value.tensor.detach().view(-1), z, m, sent
            first = last

    def pass_(self, step: float | None, pull: bool, launch: bool) -> None:
        """One pass over all values. step: the outer step, with the sum of displacements times that; None:
        none. pull: replicas go to the outer iterate. launch: displacements are written where they travel
        from, of before the outer step where replicas begin anew, otherwise of after it."""
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
        """Outer iterate and values become the mean over the replicas. mean: of the sum that has come."""
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
        """What travels has been written; between that and the last line there is nothing of the round before,
        of whose zeros packing may have made values."""
        self.sent[len(self.base) :] = 0
        self.sent[-WIDTH] = self.first_square
        self.sent_steps, self.steps, self.is_pending, self.has_come = self.steps, 0, True, False

    @torch.no_grad()
    def begin_anew(self, length: int, behind: bool) -> None:
        """The replica goes to the outer iterate, and a round of `length` steps begins. behind: with nothing
        of its own in what is on its way; else nothing is."""
        self._go_to_base()
        self.steps, self.length, self.is_pending, self.has_come = 0, length, behind, not behind
        if behind:
            self.sent_steps = length
            self.sent.zero_()
        else:
            self.moved.zero_()

    def sent_square(self) -> float:
        """The sum over the replicas of what `first_square` was."""
        return float(self.sent[-WIDTH])

    def square_moved(self) -> float:
        """||z - x||^2 of what this rank counts. A round that began at the outer iterate began at what x can
        hold of it."""
        rounds = self._method.pull == 1
        return math.fsum(
            squared_displacement(z, x, rounds) for value, x, z, _, _ in self._flat() if value.counts
        )

    def square_gap(self, mean: float) -> float:
        """||z_t - (z_{t-1} - mean(d))||^2 of what this rank counts: z_t - z_{t-1} is -lr m where the outer
        iterate moved. mean: of the sum that has come."""
        lr = self._method.lr * float(self.moved)
        return math.fsum(
            squared_gap(sent, m, mean, lr) for value, _, _, m, sent in self._flat() if value.counts
        )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """base, momentum and sent, by the names of the values and in their shapes."""
        result: dict[str, dict[str, Tensor]] = {"base": {}, "momentum": {}, "sent": {}}
        for value, _, *flat in self._flat():
            for kind, tensor in zip(result, flat, strict=True):
                result[kind][value.name] = tensor.view(value.tensor.shape)
        return result

    def progress(self) -> list[float]:
        sent_steps = self.sent_steps if self.is_pending else 0
        return [self.steps, self.length, sent_steps, self.sent_square(), self.count, float(self.moved)]

    def go_on(self, numbers: Sequence[float]) -> None:
        """As another was, of whose `progress` these are."""
        self.steps, self.length, self.sent_steps = map(int, numbers[:3])
        self.is_pending, self.has_come = self.sent_steps > 0, True
        self.sent[-WIDTH], self.count = numbers[3], int(numbers[4])
        self.moved.fill_(numbers[5])
