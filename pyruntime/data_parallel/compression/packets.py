"""Values that are summed over ranks and travel packed: each rank packs what another sums, and sums what is
its own.

    begin       every other rank is sent what it sums of this rank's values, packed (with what was lost of
                them before), and a few bytes as they are, the tail
    complete    what the others sent is added up in the order of the ranks, this rank's own values exactly
    and then    where every rank keeps all sums, they are packed, with what was lost of them before, and
                gathered: all ranks read the same bytes, and so have the same bits

Messages go from rank to rank (`comm.channel`), sums by a gather; both in the class of traffic "dp".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pyruntime.comm.channel import Channels
from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import Flight, FlightAxis
from pyruntime.data_parallel.compression.codecs import Codec
from pyruntime.data_parallel.compression.units import ROW, Unit, places_of
from pyruntime.ops.layers import add_, random_rounding

OnSums: TypeAlias = Callable[[Tensor, Tensor], None]
"""(sums fp32, flat, of all values or of this rank's segment; tails uint8 [S, tail], by rank)."""


@dataclass(frozen=True)
class Packing:
    """How flat memory of `elements` values is packed in this step."""

    name: str
    """For a ledger."""
    elements: int
    is_cut: bool
    """Whether memory is S segments of one size, of which each rank keeps its own alone; else all keep all."""
    units: Sequence[Unit]
    numbers: Sequence[int]
    """Of each unit."""
    codec: Codec
    residual: Tensor | None
    """fp32, flat, of the memory: what was lost of each value; of the stretches that this rank sums, what was
    lost of the sums."""
    tail: int = 0
    """Bytes that each rank tells all others beside."""
    rounding: str = ""
    """Names the random numbers of this rank and step; empty: to the nearest."""
    step: int = 0

    def sizes(self, rank: int, with_tail: bool) -> list[int]:
        """Bytes of what rank `rank` sums of each unit, and of the tail."""
        packed = [
            self.codec.nbytes(unit.stretches[rank][1], number)
            for unit, number in zip(self.units, self.numbers, strict=True)
        ]
        return packed + [self.tail] * with_tail

    def pack(self, values: Tensor, rank: int, message: Tensor) -> None:
        """The stretches of rank `rank`, of all `values`, into `message` uint8."""
        sizes = self.sizes(rank, with_tail=False)
        places, _ = places_of(sizes)
        for unit, number, place, size in zip(self.units, self.numbers, places, sizes, strict=True):
            first, count = unit.stretches[rank]
            residual = None if self.residual is None else self.residual[first : first + count]
            own = random_rounding(f"{self.rounding} {unit.key} {rank}", self.step) if self.rounding else None
            packed = message[place : place + size]
            self.codec.pack(values[first : first + count], number, packed, residual, own)

    def add(self, message: Tensor, rank: int, sums: Tensor, offset: int) -> None:
        """`sums`, fp32, whose first element is that of the memory at `offset`, += what was packed of the
        stretches of rank `rank`."""
        sizes = self.sizes(rank, with_tail=False)
        places, _ = places_of(sizes)
        for unit, number, place, size in zip(self.units, self.numbers, places, sizes, strict=True):
            first, count = unit.stretches[rank]
            out = sums[first - offset : first - offset + count]
            self.codec.add(message[place : place + size], number, out)


def rows_needed(packing: Packing, ranks: int) -> int:
    """Of the longest message of that packing."""
    return max(places_of(packing.sizes(rank, with_tail=True))[1] for rank in range(ranks))


class PackedSum:
    """Values under way over one axis, packed: a flight that begins another where all ranks keep all sums.

    values: this rank's, flat, as many as the packing says; they may be read until the flight has landed.
    tail: uint8, what all ranks are told beside."""

    def __init__(
        self,
        packing: Packing,
        axis: FlightAxis,
        channels: Channels,
        values: Tensor,
        tail: Tensor,
        on_sums: OnSums,
    ):
        self._packing, self._axis, self._channels = packing, axis, channels
        self._values: Tensor | None = values
        self._on_sums = on_sums
        self._tails = tail.new_zeros(axis.size, packing.tail)
        self._tails[axis.rank] = tail
        self.then: Flight | None = None
        """Of the sums, once this one has landed."""
        own = places_of(packing.sizes(axis.rank, with_tail=True))[1]
        self._others = [rank for rank in range(axis.size) if rank != axis.rank]
        for rank in self._others:
            channels.expect(rank, [own])
        for rank in self._others:
            with marked("dp pack", packing.name):
                message = self._message_to(values, rank)
            channels.send(rank, message)
        axis.add(self)

    def _message_to(self, values: Tensor, rank: int) -> Tensor:
        sizes = self._packing.sizes(rank, with_tail=True)
        places, rows = places_of(sizes)
        message = torch.zeros(rows * ROW, dtype=torch.uint8)
        self._packing.pack(values, rank, message)
        message[places[-1] : places[-1] + sizes[-1]] = self._tails[self._axis.rank]
        return message.view(rows, ROW)

    def advance(self) -> None:
        """A message has memory of its own until it is received: no rank waits for its place."""

    def has_landed(self) -> bool:
        """Of the oldest flight: a later one's messages are behind it in the same channels."""
        return self._values is None or all(map(self._channels.has_come, self._others))

    def drop(self) -> None:
        self._values = None

    def complete(self) -> None:
        packing, axis = self._packing, self._axis
        values, self._values = self._values, None
        assert values is not None
        count = packing.elements // axis.size if packing.is_cut else packing.elements
        offset = axis.rank * count if packing.is_cut else 0
        sums = torch.zeros(count)
        *_, place = places_of(packing.sizes(axis.rank, with_tail=True))[0]
        for sender in range(axis.size):
            if sender == axis.rank:
                self._add_own(values, sums, offset)
                continue
            message = self._channels.receive(sender).view(-1)
            with marked("dp sum", packing.name):
                packing.add(message, axis.rank, sums, offset)
            self._tails[sender] = message[place : place + packing.tail]
        if packing.is_cut:
            self._on_sums(sums, self._tails)
        else:
            self.then = _Sums(packing, axis, sums, self._tails, self._on_sums)

    def _add_own(self, values: Tensor, sums: Tensor, offset: int) -> None:
        for unit in self._packing.units:
            first, count = unit.stretches[self._axis.rank]
            add_(sums[first - offset : first - offset + count], values[first : first + count])


class _Sums:
    """Under way: every rank's sums of its stretches, to all."""

    def __init__(self, packing: Packing, axis: FlightAxis, sums: Tensor, tails: Tensor, on_sums: OnSums):
        self._packing, self._axis, self._sums, self._tails = packing, axis, sums, tails
        self._on_sums = on_sums
        rows = [places_of(packing.sizes(rank, with_tail=False))[1] for rank in range(axis.size)]
        self._rows = max(1, *rows)
        self._packed = torch.zeros(axis.size, self._rows * ROW, dtype=torch.uint8)
        own = self._packed[axis.rank]
        with marked("dp pack", packing.name):
            packing.pack(sums, axis.rank, own)
        axis.make_room()
        gather = _C.LineGather(axis.name, axis.size * self._rows, ROW, torch.uint8, "cpu")
        for index, (begin, count) in enumerate(gather.own_chunks()):
            gather.own(index).copy_(self._lines()[begin : begin + count])
            gather.publish(index)
        self._gather: _C.LineGather | None = gather
        axis.add(self)

    def _lines(self) -> Tensor:
        return self._packed.view(-1, ROW)

    def advance(self) -> None:
        if self._gather is not None and self._gather.has_come():
            self._take(self._gather)

    def has_landed(self) -> bool:
        return self._gather is None

    def drop(self) -> None:
        self._gather = None

    def _take(self, gather: _C.LineGather) -> None:
        for index, (begin, count) in enumerate(gather.chunks()):
            if count:
                self._lines()[begin : begin + count] = gather.chunk(index)
        gather.finish()
        self._gather = None

    def complete(self) -> None:
        if self._gather is not None:
            self._take(self._gather)
        sums = torch.zeros_like(self._sums)
        with marked("dp sum", self._packing.name):
            for rank in range(self._axis.size):
                self._packing.add(self._packed[rank], rank, sums, 0)
        self._on_sums(sums, self._tails)
