"""Reduces one bucket's gradient: writes its chunks where they leave from, and sums them on the shard's rank.

launch      begins the flight; every chunk is written and published
advance     sums the others' parts with this rank's, if they are there
complete    waits for them; with replicas, the sum continues over those
on_reduced  gets the bucket's gradient on this rank, [segment_lines, width]

On devices a large bucket's gradient is summed in several flights, of some lines of every segment each: see
`MOST_BYTES`.

If only a few lines of it may be touched, the ranks first tell each other which, one bit a line. Lines that no
rank touched do not travel, and are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import Axes, FlightAxis
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.data_parallel.touched import MOST_TOUCHED, packed, unpacked

MOST_BYTES = 1 << 28
"""The most bytes of a flight on devices. A group keeps memory for its largest flight, four times, and again
for what leaves. Without this limit that would be a model's head; a layer's matrices are mostly smaller."""

WriteChunk = Callable[[Tensor, int, int], None]
"""Writes a chunk [segments, lines, width]. The other arguments are its first segment, and its first line in
each segment."""
WriteLines = Callable[[Tensor, Tensor], None]
"""Writes the chunk [count, width] of the lines in the second argument, int64 [count]."""
Reduced = Callable[[Bucket, Tensor], None]


@dataclass(frozen=True)
class Touched:
    """The lines of a bucket's gradient in which this rank may have more than zeros."""

    lines: Tensor
    """bool; a line that any rank touched is summed on all ranks."""
    write: WriteLines
    all_travel: Callable[[], None]
    """Called if the ranks together touched so many lines that all lines travel."""


class Launch(Protocol):
    """`launch`, or another function that sends gradients."""

    def __call__(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        axes: Axes,
        write: WriteChunk,
        on_reduced: Reduced,
        touched: Touched | None = None,
    ) -> Callable[[], None]: ...


def launch(
    bucket: Bucket,
    dtype: torch.dtype,
    axes: Axes,
    write: WriteChunk,
    on_reduced: Reduced,
    touched: Touched | None = None,
) -> Callable[[], None]:
    """Begins to sum a bucket's gradient, which `write` writes and which travels as `dtype`. The sum is over
    the ranks that share the states, each of which keeps its segment, then over those that hold the same. On
    one rank alone the sum is what is written. touched: given on every rank, or on none.

    The returned function may be called when no other bucket follows, by all ranks alike: what is still to be
    written leaves at once, not after the sums before it."""
    todo = [axis for axis in axes.of_gradients if axis.size > 1]
    if not todo:
        own = torch.empty(bucket.lines, bucket.width, dtype=dtype, device=bucket.device)
        write(own.unsqueeze(0), 0, 0)
        on_reduced(bucket, own)
        return lambda: None
    ask = _begin(_Way(bucket, dtype, todo, on_reduced, cut=axes.shard.size > 1), write, touched)
    return (lambda: None) if ask is None else (lambda: todo[0].complete_latest(ask))


def may_send_some(bucket: Bucket, axes: Axes) -> bool:
    """Whether single lines of the bucket's gradient can travel; the same on all ranks. On devices the host
    would have to wait for them to know which lines."""
    device = str(bucket.device)
    return bucket.device.type == "cpu" and all(
        _C.LineScatter.can_send_some(axis.name, device) for axis in axes.of_gradients if axis.size > 1
    )


@dataclass(frozen=True)
class _Way:
    """A bucket, and the axes `todo` over which it is still to be summed; the first is next.

    cut: all segments are written, and every rank keeps its own; otherwise one segment, which all keep."""

    bucket: Bucket
    dtype: torch.dtype
    todo: Sequence[FlightAxis]
    on_reduced: Reduced
    cut: bool

    @property
    def axis(self) -> FlightAxis:
        return self.todo[0]

    @property
    def lines(self) -> int:
        return self.bucket.lines if self.cut else self.bucket.segment_lines


def _begin(way: _Way, write: WriteChunk, touched: Touched | None) -> _Ask | None:
    if touched is not None:
        return _Ask(way, write, touched)
    pieces = pieces_of(way.bucket, way.dtype) if way.cut else [range(way.lines)]
    joined = _Joined(len(pieces))
    for piece in pieces:
        _Sum(way, write, None, piece, joined)
    return None


def most_bytes(device: torch.device) -> int | None:
    """Returns the most bytes of a flight; None: any number. A CPU's ranks read parts where they lie."""
    return None if device.type == "cpu" else MOST_BYTES


def pieces_of(bucket: Bucket, dtype: torch.dtype) -> list[range]:
    """Returns the lines of every segment that travel in one flight, for each flight."""
    lines, most = bucket.segment_lines, most_bytes(bucket.device)
    flights = 1 if most is None else math.ceil(bucket.lines * bucket.width * dtype.itemsize / most)
    step = max(1, math.ceil(lines / max(1, flights)))
    return [range(first, min(first + step, lines)) for first in range(0, lines, step)]


def blocks_of(bucket: Bucket, dtype: torch.dtype) -> list[int]:
    """Returns the rows of one rank in each flight, for each part that has some in it."""
    return [
        min(piece.stop, part.offset + part.lines) - max(piece.start, part.offset)
        for piece in pieces_of(bucket, dtype)
        for part in bucket.parts
        if part.offset < piece.stop and piece.start < part.offset + part.lines
    ]


@dataclass
class _Joined:
    """The sums of a bucket's pieces, of which the last makes the whole."""

    pieces: int
    sums: list[Tensor] = field(default_factory=list)

    def add(self, sums: Tensor) -> Tensor | None:
        """Takes the next piece's sums; returns those of all pieces if it is the last."""
        self.sums.append(sums)
        if len(self.sums) < self.pieces:
            return None
        return sums if self.pieces == 1 else torch.cat(self.sums)


class _Ask:
    """The flight in which ranks tell each other which lines they touched. The sum of these follows."""

    def __init__(self, way: _Way, write: WriteChunk, touched: Touched):
        self._way, self._write, self._touched = way, write, touched
        self._bits = packed(touched.lines)
        axis = way.axis
        axis.make_room()
        width, device = len(self._bits), str(way.bucket.device)
        gather = _C.LineGather(axis.name, axis.size, width, torch.uint8, device)
        for index, (_, count) in enumerate(gather.own_chunks()):
            gather.own(index).copy_(self._bits.expand(count, width))
            gather.publish(index)
        self._gather: _C.LineGather | None = gather
        axis.add(self)

    def drop(self) -> None:
        self._gather = None

    def advance(self) -> None:
        if self._gather is not None and self._gather.has_come():
            self._take(self._gather)

    def has_landed(self) -> bool:
        return self._gather is None

    def complete(self) -> None:
        if self._gather is not None:
            self._take(self._gather)
        lines = unpacked(self._bits, self._way.lines)
        _Sum(self._way, self._write, replace(self._touched, lines=lines))

    def _take(self, gather: _C.LineGather) -> None:
        for index, (_, count) in enumerate(gather.chunks()):
            if count:
                self._bits |= gather.chunk(index)[0]
        gather.finish()
        self._gather = None


class _Sum:
    """The flight that sums a bucket over one axis. touched: by any of its ranks. piece: the lines of every
    segment that it sums; None: all. joined: the sums of all pieces."""

    def __init__(
        self,
        way: _Way,
        write: WriteChunk,
        touched: Touched | None,
        piece: range | None = None,
        joined: _Joined | None = None,
    ):
        self._way, self._touched = way, None if touched is None else touched.lines
        self._piece = range(way.lines // (way.bucket.segments if way.cut else 1)) if piece is None else piece
        self._joined = _Joined(1) if joined is None else joined
        self._bucket = bucket = way.bucket
        self._gradient: Tensor | None = None
        """The sum, once nothing is under way any more."""
        self._some: Tensor | None = None
        """The lines that travel; None: all."""
        if touched is not None:
            if int(touched.lines.sum()) <= MOST_TOUCHED * way.lines:
                self._some = touched.lines.nonzero().flatten()
            else:
                touched.all_travel()
        way.axis.make_room()
        scatter = _C.LineScatter(
            way.axis.name,
            len(self._piece) * (bucket.segments if way.cut else 1),
            bucket.width,
            way.dtype,
            str(bucket.device),
            not way.cut,
            None if self._some is None else self._some.tolist(),
        )
        for index, (begin, count) in enumerate(scatter.chunks()):
            with marked("dp write chunk of", bucket.name):
                if self._some is None or touched is None:
                    write(*bucket.chunk_of(scatter.part(index), begin, self._piece))
                else:
                    touched.write(scatter.part(index), self._some[begin : begin + count])
            scatter.publish(index)
        self._scatter: _C.LineScatter | None = scatter
        self._is_summed = False
        way.axis.add(self)

    def drop(self) -> None:
        self._scatter = None

    def advance(self) -> None:
        if self._scatter is None:
            return
        if not self._is_summed and self._scatter.parts_have_come():
            with marked("dp sum", self._bucket.name):
                self._scatter.reduce()
            self._is_summed = True
        if self._is_summed and self._scatter.sums_have_come():
            self._end(self._scatter)

    def has_landed(self) -> bool:
        return self._scatter is None

    def _end(self, scatter: _C.LineScatter) -> None:
        sums, self._scatter = scatter.finish(), None
        if self._some is not None:
            first, count = self._own_lines()
            own = self._some[(self._some >= first) & (self._some < first + count)] - first
            sums = sums.new_zeros(count, self._bucket.width).index_copy_(0, own, sums)
        self._gradient = sums

    def _own_lines(self) -> tuple[int, int]:
        """Returns the first, and the number, of the lines whose sums this rank keeps."""
        count = self._bucket.segment_lines
        return (self._way.axis.rank * count if self._way.cut else 0), count

    def complete(self) -> None:
        if self._scatter is not None:
            with marked("dp sum", self._bucket.name):
                self._end(self._scatter)
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        gradient = self._joined.add(gradient)
        if gradient is None:
            return
        rest = replace(self._way, todo=self._way.todo[1:], cut=False)
        if not rest.todo:
            rest.on_reduced(self._bucket, gradient)
            return

        def write(chunk: Tensor, segment: int, line: int) -> None:
            chunk[0].copy_(gradient[line : line + chunk.shape[1]])

        def write_lines(chunk: Tensor, lines: Tensor) -> None:
            torch.index_select(gradient, 0, lines, out=chunk)

        touched = None
        if self._touched is not None:
            first, count = self._own_lines()
            touched = Touched(self._touched[first : first + count], write_lines, lambda: None)
        _begin(rest, write, touched)
