"""A bucket's gradient that travels packed: each rank packs what another sums, and sums what is its own.

    begin       every other rank is sent what it sums of this rank's gradient, packed (with what was lost of
                it before), and a mark for each parameter that this rank had a gradient for
    complete    what the others sent is added up in the order of the ranks, this rank's own values exactly
    and then    where every rank keeps the whole gradient, the sums are packed, with what was lost of them
                before, and gathered: all ranks read the same bytes, and so have the same bits

Messages go from rank to rank (`comm.channel`), sums by a gather; both in the class of traffic "dp".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyruntime.comm.channel import Channels
from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import Axis
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.data_parallel.compression.codecs import Codec
from pyruntime.data_parallel.compression.units import ROW, Unit, places_of
from pyruntime.data_parallel.reduction import Reduced
from pyruntime.ops.layers import add_, random_rounding


@dataclass(frozen=True)
class Packing:
    """How the values of one bucket are packed in this step."""

    bucket: Bucket
    units: Sequence[Unit]
    numbers: Sequence[int]
    """Of each unit."""
    codec: Codec
    residual: Tensor | None
    """fp32, flat, of the bucket's lines: what was lost of each value; of the stretches that this rank sums,
    what was lost of the sums."""
    rounding: str
    """Names the random numbers of this rank and step; empty: to the nearest."""
    step: int

    @property
    def is_cut(self) -> bool:
        return self.bucket.segments > 1

    def sizes(self, rank: int, with_marks: bool) -> list[int]:
        """Bytes of what rank `rank` sums of each unit, and of the marks."""
        packed = [
            self.codec.nbytes(unit.stretches[rank][1], number)
            for unit, number in zip(self.units, self.numbers, strict=True)
        ]
        return packed + [len(self.bucket.parameters)] * with_marks

    def pack(self, values: Tensor, offset: int, rank: int, message: Tensor) -> None:
        """The stretches of rank `rank`, of `values`, whose first element is that of the bucket's memory at
        `offset`, into `message` uint8."""
        sizes = self.sizes(rank, with_marks=False)
        places, _ = places_of(sizes)
        for unit, number, place, size in zip(self.units, self.numbers, places, sizes, strict=True):
            first, count = unit.stretches[rank]
            residual = None if self.residual is None else self.residual[first : first + count]
            own = random_rounding(f"{self.rounding} {unit.key} {rank}", self.step) if self.rounding else None
            packed = message[place : place + size]
            self.codec.pack(values[first - offset : first - offset + count], number, packed, residual, own)

    def add(self, message: Tensor, rank: int, sums: Tensor, offset: int) -> None:
        """`sums`, fp32, whose first element is that of the bucket's memory at `offset`, += what was packed of
        the stretches of rank `rank`."""
        sizes = self.sizes(rank, with_marks=False)
        places, _ = places_of(sizes)
        for unit, number, place, size in zip(self.units, self.numbers, places, sizes, strict=True):
            first, count = unit.stretches[rank]
            out = sums[first - offset : first - offset + count]
            self.codec.add(message[place : place + size], number, out)


def rows_needed(packing: Packing, ranks: int) -> int:
    """Of the longest message of that packing."""
    return max(places_of(packing.sizes(rank, with_marks=True))[1] for rank in range(ranks))


class PackedSum:
    """A bucket under way over one axis, packed. gradient [lines, width]: this rank's, with its marks; its
    values may be read until the flight has landed."""

    def __init__(
        self,
        packing: Packing,
        axis: Axis,
        channels: Channels,
        gradient: Tensor,
        dtype: torch.dtype,
        on_reduced: Reduced,
    ):
        self._packing, self._axis, self._channels = packing, axis, channels
        self._gradient: Tensor | None = gradient
        self._dtype, self._on_reduced = dtype, on_reduced
        bucket = packing.bucket
        self._got = bucket.got(gradient[: bucket.segment_lines])
        own = places_of(packing.sizes(axis.rank, with_marks=True))[1]
        others = [rank for rank in range(axis.size) if rank != axis.rank]
        for rank in others:
            channels.expect(rank, [own])
        for rank in others:
            with marked("dp pack", bucket.name):
                message = self._message_to(rank)
            channels.send(rank, message)
        axis.add(self)

    def _message_to(self, rank: int) -> Tensor:
        assert self._gradient is not None
        sizes = self._packing.sizes(rank, with_marks=True)
        places, rows = places_of(sizes)
        message = torch.zeros(rows * ROW, dtype=torch.uint8)
        self._packing.pack(self._gradient.view(-1), 0, rank, message)
        message[places[-1] : places[-1] + sizes[-1]] = self._got
        return message.view(rows, ROW)

    def advance(self) -> None:
        """A message has memory of its own until it is received: no rank waits for its place."""

    def has_landed(self) -> bool:
        return self._gradient is None

    def drop(self) -> None:
        self._gradient = None

    def complete(self) -> None:
        packing, rank = self._packing, self._axis.rank
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        bucket, width = packing.bucket, packing.bucket.width
        offset = rank * bucket.segment_lines * width if packing.is_cut else 0
        sums = torch.zeros(bucket.segment_lines, width)
        *_, marks = places_of(packing.sizes(rank, with_marks=True))[0]
        for sender in range(self._axis.size):
            if sender == rank:
                self._add_own(gradient.view(-1), sums.view(-1), offset)
                continue
            message = self._channels.receive(sender).view(-1)
            with marked("dp sum", bucket.name):
                packing.add(message, rank, sums.view(-1), offset)
            self._got = self._got | (message[marks : marks + len(self._got)] != 0)
        if packing.is_cut:
            _finish(bucket, sums, self._got, self._dtype, self._on_reduced)
        else:
            _Sums(packing, self._axis, sums, self._got, self._dtype, self._on_reduced)

    def _add_own(self, values: Tensor, sums: Tensor, offset: int) -> None:
        for unit in self._packing.units:
            first, count = unit.stretches[self._axis.rank]
            add_(sums[first - offset : first - offset + count], values[first : first + count])


class _Sums:
    """Under way: every rank's sums of its stretches, to all."""

    def __init__(
        self,
        packing: Packing,
        axis: Axis,
        sums: Tensor,
        got: Tensor,
        dtype: torch.dtype,
        on_reduced: Reduced,
    ):
        self._packing, self._axis, self._sums, self._got = packing, axis, sums, got
        self._dtype, self._on_reduced = dtype, on_reduced
        rows = [places_of(packing.sizes(rank, with_marks=False))[1] for rank in range(axis.size)]
        self._rows = max(rows)
        self._packed = torch.zeros(axis.size, self._rows * ROW, dtype=torch.uint8)
        own = self._packed[axis.rank]
        with marked("dp pack", packing.bucket.name):
            packing.pack(sums.view(-1), 0, axis.rank, own)
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
        with marked("dp sum", self._packing.bucket.name):
            for rank in range(self._axis.size):
                self._packing.add(self._packed[rank], rank, sums.view(-1), 0)
        _finish(self._packing.bucket, sums, self._got, self._dtype, self._on_reduced)


def _finish(bucket: Bucket, sums: Tensor, got: Tensor, dtype: torch.dtype, on_reduced: Reduced) -> None:
    with_marks(bucket, sums, got)
    on_reduced(bucket, sums.to(dtype))


def with_marks(bucket: Bucket, sums: Tensor, got: Tensor) -> None:
    """Marks the parameters that some rank had a gradient for in a reduced segment."""
    sums[bucket.marks :, 0] = got.to(sums.dtype)
