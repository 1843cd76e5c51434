"""The way of one unit's gradient: written chunk by chunk where it leaves from, summed by who holds the shard.

launch      its flight begins and every chunk is written and published
complete    the others' parts are summed with this rank's; with replicas, the sum goes on to them
on_reduced  the unit's gradient of this rank, [segment_lines, width]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyruntime.comm.core import _C
from pyruntime.data_parallel.axes import Axes
from pyruntime.data_parallel.ranges import marked
from pyruntime.data_parallel.units import Unit

WriteChunk = Callable[[Tensor, int], None]
"""Writes the chunk [count, width] whose first line is the second argument."""
Reduced = Callable[[Unit, Tensor], None]


def launch(unit: Unit, dtype: torch.dtype, axes: Axes, write: WriteChunk, on_reduced: Reduced) -> None:
    """Begins to sum a unit's gradient, which `write` writes and which travels as `dtype`."""
    if axes.shard.size > 1:
        _Sharded(unit, dtype, axes, write, on_reduced)
    elif axes.replicate.size > 1:
        _Replicated(unit, dtype, axes, write, on_reduced)
    else:
        gradient = torch.empty(unit.segment_lines, unit.width, dtype=dtype, device=unit.device)
        write(gradient, 0)
        on_reduced(unit, gradient)


class _Sharded:
    """Summed over the ranks that share the states; each keeps its segment."""

    def __init__(self, unit: Unit, dtype: torch.dtype, axes: Axes, write: WriteChunk, on_reduced: Reduced):
        self._unit, self._dtype, self._axes, self._on_reduced = unit, dtype, axes, on_reduced
        axis = axes.shard
        axis.make_room()
        self._scatter = _begin(unit, dtype, axis.name, unit.lines, write, every=False)
        axis.add(self)

    def drop(self) -> None:
        del self._scatter

    def complete(self) -> None:
        with marked("sum", self._unit.name):
            gradient = self._scatter.finish()
        del self._scatter
        if self._axes.replicate.size == 1:
            self._on_reduced(self._unit, gradient)
            return

        def write(chunk: Tensor, begin: int) -> None:
            chunk.copy_(gradient[begin : begin + len(chunk)])

        _Replicated(self._unit, self._dtype, self._axes, write, self._on_reduced)


class _Replicated:
    """Summed over ranks that hold the same; each keeps all of it."""

    def __init__(self, unit: Unit, dtype: torch.dtype, axes: Axes, write: WriteChunk, on_reduced: Reduced):
        self._unit, self._on_reduced = unit, on_reduced
        axis = axes.replicate
        axis.make_room()
        self._scatter = _begin(unit, dtype, axis.name, unit.segment_lines, write, every=True)
        axis.add(self)

    def drop(self) -> None:
        del self._scatter

    def complete(self) -> None:
        with marked("sum", self._unit.name):
            gradient = self._scatter.finish()
        del self._scatter
        self._on_reduced(self._unit, gradient)


def _begin(
    unit: Unit, dtype: torch.dtype, group: str, lines: int, write: WriteChunk, *, every: bool
) -> _C.LineScatter:
    scatter = _C.LineScatter(group, lines, unit.width, dtype, str(unit.device), every)
    for index, (begin, _) in enumerate(scatter.chunks()):
        with marked("write chunk of", unit.name):
            write(scatter.part(index), begin)
        scatter.publish(index)
    return scatter
