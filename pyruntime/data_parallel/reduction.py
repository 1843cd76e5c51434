"""One bucket's gradient: written chunk by chunk where it leaves from, summed by who holds the shard.

launch      its flight begins and every chunk is written and published
advance     the others' parts are summed with this rank's, if they are there
complete    they are at the latest; with replicas, the sum goes on to them
on_reduced  the bucket's gradient of this rank, [segment_lines, width]

Where few lines of it were touched, the ranks first tell each other which, a bit for each line; lines that
nobody touched do not travel, and are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import Axes, FlightAxis
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.data_parallel.touched import MOST_TOUCHED, packed, unpacked

WriteChunk = Callable[[Tensor, int], None]
"""Writes the chunk [count, width] whose first line is the second argument."""
WriteLines = Callable[[Tensor, Tensor], None]
"""Writes the chunk [count, width] of the lines in the second argument, int64 [count]."""
Reduced = Callable[[Bucket, Tensor], None]


@dataclass(frozen=True)
class Touched:
    """What of a bucket's gradient this rank has more than zeros of."""

    lines: Tensor
    """bool; the same lines of all ranks are summed."""
    write: WriteLines
    all_travel: Callable[[], None]
    """Called where the ranks together have touched so many lines that all travel."""


class Launch(Protocol):
    """`launch`, or what sends gradients otherwise."""

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
    """Begins to sum a bucket's gradient, which `write` writes and which travels as `dtype`: over the ranks
    that share the states, each of which keeps its segment, then over those that hold the same. There are
    several ranks. touched: given on every rank, or on none.

    What is returned may be called when no other bucket follows, by all ranks alike: what is still to be
    written leaves now, not when the sums before it are there."""
    todo = [axis for axis in (axes.shard, axes.replicate) if axis.size > 1]
    ask = _begin(_Way(bucket, dtype, todo, on_reduced, cut=axes.shard.size > 1), write, touched)
    return (lambda: None) if ask is None else (lambda: todo[0].complete_latest(ask))


def may_send_some(bucket: Bucket, axes: Axes) -> bool:
    """Whether lines of the bucket's gradient can travel alone, an answer for all ranks. On devices the host
    would have to wait for them to know which."""
    device = str(bucket.device)
    return bucket.device.type == "cpu" and all(
        _C.LineScatter.can_send_some(axis.name, device)
        for axis in (axes.shard, axes.replicate)
        if axis.size > 1
    )


@dataclass(frozen=True)
class _Way:
    """A bucket's way over the axes `todo`, of which it is about to take the first.

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
    _Sum(way, write, None)
    return None


class _Ask:
    """Under way: which lines the ranks have touched. Their sum follows."""

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
    """A bucket under way over one axis. touched: by any of its ranks."""

    def __init__(self, way: _Way, write: WriteChunk, touched: Touched | None):
        self._way, self._touched = way, None if touched is None else touched.lines
        self._bucket = bucket = way.bucket
        self._gradient: Tensor | None = None
        """Once it is summed and nothing is under way any more."""
        self._some: Tensor | None = None
        """The lines that travel, where these are not all."""
        if touched is not None:
            if int(touched.lines.sum()) <= MOST_TOUCHED * way.lines:
                self._some = touched.lines.nonzero().flatten()
            else:
                touched.all_travel()
        way.axis.make_room()
        scatter = _C.LineScatter(
            way.axis.name,
            way.lines,
            bucket.width,
            way.dtype,
            str(bucket.device),
            not way.cut,
            None if self._some is None else self._some.tolist(),
        )
        for index, (begin, count) in enumerate(scatter.chunks()):
            with marked("dp write chunk of", bucket.name):
                if self._some is None or touched is None:
                    write(scatter.part(index), begin)
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
        """The first, and how many, of the lines whose sums this rank keeps."""
        count = self._bucket.segment_lines
        return (self._way.axis.rank * count if self._way.cut else 0), count

    def complete(self) -> None:
        if self._scatter is not None:
            with marked("dp sum", self._bucket.name):
                self._end(self._scatter)
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        rest = replace(self._way, todo=self._way.todo[1:], cut=False)
        if not rest.todo:
            rest.on_reduced(self._bucket, gradient)
            return

        def write(chunk: Tensor, begin: int) -> None:
            chunk.copy_(gradient[begin : begin + len(chunk)])

        def write_lines(chunk: Tensor, lines: Tensor) -> None:
            torch.index_select(gradient, 0, lines, out=chunk)

        touched = None
        if self._touched is not None:
            first, count = self._own_lines()
            touched = Touched(self._touched[first : first + count], write_lines, lambda: None)
        _begin(rest, write, touched)
