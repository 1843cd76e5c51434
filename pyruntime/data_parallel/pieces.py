"""Gathers matrices whose pieces lie over the ranks of an axis, where they are wanted, and scatters them.

Several travel together. A rank's segment holds its pieces one after the other, in lines of one element; all
segments are as long as the longest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import FlightAxis


@dataclass(frozen=True)
class MatrixCut:
    """A matrix of `shape`. Each of `size` ranks has a piece of its dimension `dim`, cut as DTensor's Shard
    cuts: every rank ceil(n / size), the last ones less, or none.

    of: rows of the stack that is cut, whose row `first` is the matrix's first; None: it is cut by itself."""

    shape: tuple[int, int]
    dim: int
    size: int
    of: int | None = None
    first: int = 0

    @property
    def _share(self) -> int:
        every = self.shape[self.dim] if self.of is None else self.of
        return max(1, -(-every // self.size))

    def piece(self, rank: int) -> tuple[int, int]:
        """Returns the shape of that rank's piece."""
        low, high = rank * self._share - self.first, (rank + 1) * self._share - self.first
        own = max(0, min(high, self.shape[self.dim]) - max(low, 0))
        return (own, self.shape[1]) if self.dim == 0 else (self.shape[0], own)

    @property
    def holder(self) -> int | None:
        """The rank that has all of it; None: several have pieces."""
        last = self.first + max(0, self.shape[self.dim] - 1)
        first, last = self.first // self._share, last // self._share
        return first if first == last else None


Wholes: TypeAlias = list[Tensor | None]
"""Whole matrices; None if another rank has it."""


class _Segments:
    """The places of the pieces of `cuts` in every rank's segment."""

    def __init__(self, cuts: Sequence[MatrixCut], ranks: int):
        self.cuts = cuts
        self._places = [
            list(itertools.accumulate((math.prod(cut.piece(rank)) for cut in cuts), initial=0))
            for rank in range(ranks)
        ]
        self.length = max(places[-1] for places in self._places)
        """Elements of the longest."""

    def of(self, segment: Tensor, number: int, rank: int) -> Tensor:
        """Returns a rank's piece of a matrix in its `segment` [length], as a view."""
        begin, end = self._places[rank][number : number + 2]
        return segment[begin:end].view(self.cuts[number].piece(rank))


class Gathering:
    """A flight that gathers matrices, cut as `cuts` say, from `pieces`, this rank's and others', on the ranks
    that have them among `wanted`. When it is completed, `done` gets those that this rank wanted."""

    def __init__(
        self,
        axis: FlightAxis,
        cuts: Sequence[MatrixCut],
        pieces: Sequence[Tensor],
        wanted: Sequence[bool],
        done: Callable[[Wholes], None],
    ):
        self._axis, self._segments, self._wanted, self._done = axis, _Segments(cuts, axis.size), wanted, done
        self._wholes: Wholes = [None] * len(cuts)
        self._own = own = pieces[0].new_zeros(self._segments.length)
        for number, piece in enumerate(pieces):
            self._segments.of(own, number, axis.rank).copy_(piece)
        axis.make_room()
        lines, first = axis.size * len(own), axis.rank * len(own)
        gather = _C.LineGather(axis.name, lines, 1, own.dtype, str(own.device))
        for index, (begin, count) in enumerate(gather.own_chunks()):
            gather.own(index).copy_(own[begin - first :][:count].unsqueeze(1))
            gather.publish(index)
        self._gather: _C.LineGather | None = gather
        axis.add(self)

    def drop(self) -> None:
        self._gather = None

    def has_landed(self) -> bool:
        return self._gather is None

    def advance(self) -> None:
        if self._gather is not None and self._gather.has_come():
            self._take(self._gather)

    def complete(self) -> None:
        if self._gather is not None:
            self._take(self._gather)
        self._done(self._wholes)

    def _take(self, gather: _C.LineGather) -> None:
        axis, segments = self._axis, self._segments
        with marked("dp take momentum"):
            every = self._own.new_empty(axis.size, segments.length) if any(self._wanted) else None
            for index, (begin, count) in enumerate(gather.chunks()):
                chunk = gather.chunk(index)  # waits for it: no rank may finish before all chunks are here
                if every is not None:
                    every.view(-1)[begin : begin + count].copy_(chunk.squeeze(1))
            if every is not None:
                every[axis.rank].copy_(self._own)
                for number in (index for index, wanted in enumerate(self._wanted) if wanted):
                    pieces = [segments.of(every[rank], number, rank) for rank in range(axis.size)]
                    self._wholes[number] = torch.cat(pieces, segments.cuts[number].dim)
            gather.finish()
        self._gather = None


class Scattering:
    """A flight that scatters the matrices of `wholes`, cut as `cuts` say, in pieces of `dtype`; each matrix
    is one rank's. When it is completed, `pieces` are this rank's.

    A rank that does not have a matrix adds zeros. So the others get what its owner sent, except that -0
    becomes 0."""

    def __init__(
        self, axis: FlightAxis, cuts: Sequence[MatrixCut], wholes: Wholes, dtype: torch.dtype, device: str
    ):
        self._axis, self._segments = axis, _Segments(cuts, axis.size)
        self.pieces: list[Tensor] = []
        length = self._segments.length
        axis.make_room()
        scatter = _C.LineScatter(axis.name, axis.size * length, 1, dtype, device, False)
        flat = self._flat(wholes)
        for index, (begin, count) in enumerate(scatter.chunks()):
            part = scatter.part(index)
            if flat is None:
                part.zero_()
            else:
                part.copy_(flat[begin : begin + count].unsqueeze(1))
            scatter.publish(index)
        self._scatter: _C.LineScatter | None = scatter
        self._is_summed = False
        axis.add(self)

    def _flat(self, wholes: Wholes) -> Tensor | None:
        """Returns all ranks' segments, one after the other; None if this rank has no matrix."""
        flat: Tensor | None = None
        size, segments = self._axis.size, self._segments
        for number, whole in enumerate(wholes):
            if whole is None:
                continue
            if flat is None:
                flat = whole.new_zeros(size * segments.length)
            dim, first = segments.cuts[number].dim, 0
            for rank, segment in enumerate(flat.view(size, -1)):
                piece = segments.of(segment, number, rank)
                piece.copy_(whole.narrow(dim, first, piece.shape[dim]))
                first += piece.shape[dim]
        return flat

    def drop(self) -> None:
        self._scatter = None

    def has_landed(self) -> bool:
        return self._scatter is None

    def advance(self) -> None:
        if self._scatter is None:
            return
        if not self._is_summed and self._scatter.parts_have_come():
            self._scatter.reduce()
            self._is_summed = True
        if self._is_summed and self._scatter.sums_have_come():
            self._take(self._scatter)

    def complete(self) -> None:
        if self._scatter is not None:
            self._take(self._scatter)

    def _take(self, scatter: _C.LineScatter) -> None:
        with marked("dp take direction"):
            own = scatter.finish().squeeze(1)
        segments, rank = self._segments, self._axis.rank
        self.pieces = [segments.of(own, number, rank) for number in range(len(segments.cuts))]
        self._scatter = None
