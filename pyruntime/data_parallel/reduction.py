"""The way of one unit's gradient: written chunk by chunk where it leaves from, summed by who holds the shard.

launch      its flight begins and every chunk is written and published
advance     the others' parts are summed with this rank's, if they are there
complete    they are at the latest; with replicas, the sum goes on to them
on_reduced  the unit's gradient of this rank, [segment_lines, width]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import Axes, Axis
from pyruntime.data_parallel.units import Unit

WriteChunk = Callable[[Tensor, int], None]
"""Writes the chunk [count, width] whose first line is the second argument."""
Reduced = Callable[[Unit, Tensor], None]


def launch(unit: Unit, dtype: torch.dtype, axes: Axes, write: WriteChunk, on_reduced: Reduced) -> None:
    """Begins to sum a unit's gradient, which `write` writes and which travels as `dtype`: over the ranks that
    share the states, each of which keeps its segment, then over those that hold the same."""
    todo = [axis for axis in (axes.shard, axes.replicate) if axis.size > 1]
    if todo:
        _Sum(unit, dtype, todo, write, on_reduced, cut=axes.shard.size > 1)
    else:
        gradient = torch.empty(unit.segment_lines, unit.width, dtype=dtype, device=unit.device)
        write(gradient, 0)
        on_reduced(unit, gradient)


class _Sum:
    """A unit under way over the first of the axes `todo`.

    cut: all segments are written, and every rank keeps its own; otherwise one segment, which all keep."""

    def __init__(
        self,
        unit: Unit,
        dtype: torch.dtype,
        todo: Sequence[Axis],
        write: WriteChunk,
        on_reduced: Reduced,
        *,
        cut: bool,
    ):
        self._unit, self._dtype, self._on_reduced = unit, dtype, on_reduced
        self._gradient: Tensor | None = None
        """Once it is summed and nothing is under way any more."""
        axis, *self._rest = todo
        axis.make_room()
        lines = unit.lines if cut else unit.segment_lines
        scatter = _C.LineScatter(axis.name, lines, unit.width, dtype, str(unit.device), not cut)
        for index, (begin, _) in enumerate(scatter.chunks()):
            with marked("dp write chunk of", unit.name):
                write(scatter.part(index), begin)
            scatter.publish(index)
        self._scatter: _C.LineScatter | None = scatter
        self._is_summed = False
        axis.add(self)

    def drop(self) -> None:
        self._scatter = None

    def advance(self) -> None:
        if self._scatter is None:
            return
        if not self._is_summed and self._scatter.parts_have_come():
            with marked("dp sum", self._unit.name):
                self._scatter.reduce()
            self._is_summed = True
        if self._is_summed and self._scatter.sums_have_come():
            self._end(self._scatter)

    def _end(self, scatter: _C.LineScatter) -> None:
        self._gradient, self._scatter = scatter.finish(), None

    def complete(self) -> None:
        if self._scatter is not None:
            with marked("dp sum", self._unit.name):
                self._end(self._scatter)
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        if not self._rest:
            self._on_reduced(self._unit, gradient)
            return

        def write(chunk: Tensor, begin: int) -> None:
            chunk.copy_(gradient[begin : begin + len(chunk)])

        _Sum(self._unit, self._dtype, self._rest, write, self._on_reduced, cut=False)
