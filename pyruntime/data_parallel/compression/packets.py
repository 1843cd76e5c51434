"""Sums values over ranks, packed: each rank packs what another rank sums, and sums its own values.

    begin       sends every other rank what it sums of this rank's values, packed (with what was lost of them
                before), and a few bytes as they are, the tail
    complete    adds up what the others sent in the order of the ranks, this rank's own values exactly
    and then    if every rank keeps all sums: packs them, with what was lost of them before, and gathers them.
                All ranks read the same bytes, and so have the same bits

Messages go from rank to rank (`Mail`), sums by a gather; both in traffic class "dp".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pyruntime.comm.all_to_all import AllToAll
from pyruntime.comm.channel import Channels
from pyruntime.comm.core import _C
from pyruntime.comm.groups import crosses_hosts
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import Flight, FlightAxis
from pyruntime.data_parallel.compression.codecs import Codec
from pyruntime.data_parallel.compression.units import ROW, Unit, places_of
from pyruntime.ops.layers import add_, random_rounding

OnSums: TypeAlias = Callable[[Tensor, Tensor], None]
"""Takes (sums fp32, flat, of all values or of this rank's segment; tails uint8 [S, tail], by rank)."""


@dataclass(frozen=True)
class Packing:
    """The packing of flat memory of `elements` values in this step."""

    name: str
    """The name of its profiler ranges."""
    elements: int
    is_cut: bool
    """Whether memory is S segments of one size, of which each rank keeps only its own; else all keep all."""
    units: Sequence[Unit]
    numbers: Sequence[int]
    """One for each unit."""
    codec: Codec
    residual: Tensor | None
    """fp32, flat, as long as the memory: what was lost of each value. In the stretches that this rank sums:
    what was lost of the sums."""
    tail: int = 0
    """Bytes that each rank also sends to all others, unpacked."""
    rounding: str = ""
    """Names the random numbers of this rank and step; empty: values are rounded to the nearest."""
    step: int = 0

    def sizes(self, rank: int, with_tail: bool) -> list[int]:
        """Returns the bytes of what rank `rank` sums of each unit, and of the tail."""
        packed = [
            self.codec.nbytes(unit.stretches[rank][1], number)
            for unit, number in zip(self.units, self.numbers, strict=True)
        ]
        return packed + [self.tail] * with_tail

    def pack(self, values: Tensor, rank: int, message: Tensor) -> None:
        """Packs the stretches of rank `rank`, of all `values`, into `message`, uint8."""
        sizes = self.sizes(rank, with_tail=False)
        places, _ = places_of(sizes)
        for unit, number, place, size in zip(self.units, self.numbers, places, sizes, strict=True):
            first, count = unit.stretches[rank]
            residual = None if self.residual is None else self.residual[first : first + count]
            own = random_rounding(f"{self.rounding} {unit.key} {rank}", self.step) if self.rounding else None
            packed = message[place : place + size]
            self.codec.pack(values[first : first + count], number, packed, residual, own)

    def add(self, message: Tensor, rank: int, sums: Tensor, offset: int) -> None:
        """Adds packed stretches of rank `rank` to `sums`, fp32, which begin at `offset` of the memory."""
        sizes = self.sizes(rank, with_tail=False)
        places, _ = places_of(sizes)
        for unit, number, place, size in zip(self.units, self.numbers, places, sizes, strict=True):
            first, count = unit.stretches[rank]
            out = sums[first - offset : first - offset + count]
            self.codec.add(message[place : place + size], number, out)


def rows_needed(packing: Packing, ranks: int) -> int:
    """Returns the rows of that packing's longest message."""
    return max(places_of(packing.sizes(rank, with_tail=True))[1] for rank in range(ranks))


class Mail:
    """Takes messages of up to [rows, ROW] bytes from every rank of an axis to every other: by channels of two
    ranks, or between devices of several hosts by an all-to-all of the axis's process group, because a channel
    there has a communicator of its own. Every rank makes it alike."""

    def __init__(self, axis: FlightAxis, rows: int, device: torch.device):
        assert axis.mesh is not None
        self._axis, self._mesh = axis, axis.mesh
        self.others = [rank for rank in range(axis.size) if rank != axis.rank]
        self._channels: Channels | None = None
        if device.type == "cpu" or not crosses_hosts(axis.name, device):
            edges = [(sender, to) for sender in range(axis.size) for to in range(axis.size) if sender != to]
            self._channels = Channels(axis.mesh, "dp", edges, rows, ROW, torch.uint8, device)

    def exchange(self, own_rows: int, message_to: Callable[[int], Tensor]) -> Arrivals:
        """Sends what message_to(rank) gives for each other rank, [rows, ROW]; each sends [own_rows, ROW]."""
        if self._channels is None:
            return _AtOnce(self._axis, self._mesh, own_rows, [message_to(rank) for rank in self.others])
        for rank in self.others:
            self._channels.expect(rank, [own_rows])
        for rank in self.others:
            self._channels.send(rank, message_to(rank))
        return _OneByOne(self._channels, self.others)

    def stats(self) -> list[_C.CommStats]:
        """The figures of its channels; the axis counts what goes at once."""
        return [] if self._channels is None else self._channels.stats()


class Arrivals(Protocol):
    """Messages from the other ranks."""

    def have_come(self) -> bool:
        """Whether `take` would not wait; also false if that cannot be told."""

    def take(self, sender: int) -> Tensor:
        """Returns the message of that rank, [rows, ROW]. Each is taken once, by rank."""


class _OneByOne:
    def __init__(self, channels: Channels, others: Sequence[int]):
        self._channels, self._others = channels, others

    def have_come(self) -> bool:
        return all(map(self._channels.has_come, self._others))

    def take(self, sender: int) -> Tensor:
        return self._channels.receive(sender)


class _AtOnce:
    def __init__(self, axis: FlightAxis, mesh: DeviceMesh, own_rows: int, messages: Sequence[Tensor]):
        rows_to, rows_from = [len(message) for message in messages], [own_rows] * axis.size
        rows_to.insert(axis.rank, 0)
        rows_from[axis.rank] = 0
        self._rows_from = rows_from
        self._messages: Sequence[Tensor] = ()
        self._under_way = AllToAll(mesh, axis.name, torch.cat(list(messages)), rows_to, rows_from)

    def have_come(self) -> bool:
        return False

    def take(self, sender: int) -> Tensor:
        if not self._messages:
            self._messages = self._under_way.wait().split(self._rows_from)
        return self._messages[sender]


class PackedSum:
    """A flight that sums packed values over one axis, and begins another if all ranks keep all sums.

    values: this rank's, flat, as many as the packing says. They are read until the flight has landed.
    tail: uint8, sent to all ranks as it is."""

    def __init__(
        self,
        packing: Packing,
        axis: FlightAxis,
        mail: Mail,
        values: Tensor,
        tail: Tensor,
        on_sums: OnSums,
    ):
        self._packing, self._axis = packing, axis
        self._values: Tensor | None = values
        self._on_sums = on_sums
        self._tails = tail.new_zeros(axis.size, packing.tail)
        self._tails[axis.rank] = tail
        self.then: Flight | None = None
        """The flight of the sums, once this one is complete."""
        own = places_of(packing.sizes(axis.rank, with_tail=True))[1]
        self._arrivals = mail.exchange(own, lambda rank: self._message_to(values, rank))
        axis.add(self)

    def _message_to(self, values: Tensor, rank: int) -> Tensor:
        sizes = self._packing.sizes(rank, with_tail=True)
        places, rows = places_of(sizes)
        message = torch.zeros(rows * ROW, dtype=torch.uint8, device=values.device)
        with marked("dp pack", self._packing.name):
            self._packing.pack(values, rank, message)
        message[places[-1] : places[-1] + sizes[-1]] = self._tails[self._axis.rank]
        return message.view(rows, ROW)

    def advance(self) -> None:
        """Does nothing: a message has memory of its own until it is received, so no rank waits for a slot."""

    def has_landed(self) -> bool:
        """Asked of the oldest flight only: a later one's messages are behind it in the same channels."""
        return self._values is None or self._arrivals.have_come()

    def drop(self) -> None:
        self._values = None

    def complete(self) -> None:
        packing, axis = self._packing, self._axis
        values, self._values = self._values, None
        assert values is not None
        count = packing.elements // axis.size if packing.is_cut else packing.elements
        offset = axis.rank * count if packing.is_cut else 0
        sums = torch.zeros(count, device=values.device)
        *_, place = places_of(packing.sizes(axis.rank, with_tail=True))[0]
        for sender in range(axis.size):
            if sender == axis.rank:
                self._add_own(values, sums, offset)
                continue
            message = self._arrivals.take(sender).reshape(-1)
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
    """The flight that gathers every rank's packed sums of its stretches."""

    def __init__(self, packing: Packing, axis: FlightAxis, sums: Tensor, tails: Tensor, on_sums: OnSums):
        self._packing, self._axis, self._sums, self._tails = packing, axis, sums, tails
        self._on_sums = on_sums
        rows = [places_of(packing.sizes(rank, with_tail=False))[1] for rank in range(axis.size)]
        self._rows = max(1, *rows)
        self._packed = torch.zeros(axis.size, self._rows * ROW, dtype=torch.uint8, device=sums.device)
        own = self._packed[axis.rank]
        with marked("dp pack", packing.name):
            packing.pack(sums, axis.rank, own)
        axis.make_room()
        lines = axis.size * self._rows
        gather = _C.LineGather(axis.name, lines, ROW, torch.uint8, str(sums.device))
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
