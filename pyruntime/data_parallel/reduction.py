"""The way of one unit's gradient: written chunk by chunk where it leaves from, summed by who holds the shard.

launch      its flight begins and every chunk is written and published
complete    the others' parts are summed with this rank's; with replicas, the sum goes on to them
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
        axis, *self._rest = todo
        axis.make_room()
        lines = unit.lines if cut else unit.segment_lines
        self._scatter = _C.LineScatter(axis.name, lines, unit.width, dtype, str(unit.device), not cut)
        for index, (begin, _) in enumerate(self._scatter.chunks()):
            with marked("dp write chunk of", unit.name):
                write(self._scatter.part(index), begin)
            self._scatter.publish(index)
        axis.add(self)

    def drop(self) -> None:
        del self._scatter

    def complete(self) -> None:
        with marked("dp sum", self._unit.name):
            gradient = self._scatter.finish()
        del self._scatter
        if not self._rest:
            self._on_reduced(self._unit, gradient)
            return

        def write(chunk: Tensor, begin: int) -> None:
            chunk.copy_(gradient[begin : begin + len(chunk)])

        _Sum(self._unit, self._dtype, self._rest, write, self._on_reduced, cut=False)
