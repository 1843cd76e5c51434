"""Displacements that travel packed, with what was lost of them kept for the next ones.

A run of a tensor is summed as gradients are (`data_parallel.compression.packets`): every replica packs what
another sums, and the sums are packed once more for all, who read the same bytes and so have the same bits.
The last line of a tensor goes beside, as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pyruntime.choices import COMPRESSION_OF_RUNS
from pyruntime.comm.channel import Channels
from pyruntime.data_parallel.axes import FlightAxis
from pyruntime.data_parallel.compression import Compression
from pyruntime.data_parallel.compression.codecs import codec_of
from pyruntime.data_parallel.compression.packets import PackedSum, Packing, rows_needed
from pyruntime.data_parallel.compression.units import LEAST, ROW, Unit, shared_out

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(settings: Compression, dtypes: set[torch.dtype], replicas: int) -> None:
    """Raises ValueError for what displacements cannot be compressed by."""
    if replicas == 1:
        raise ValueError("compression was asked for, and one replica alone sends nothing; leave it out.")
    if settings.method == "power_sgd":
        raise ValueError(
            "Displacements travel in runs that are no matrices, and method=power_sgd is of matrices; use "
            f"{' or '.join(COMPRESSION_OF_RUNS)}."
        )
    if not settings.error_feedback:
        raise ValueError(
            "Displacements are compressed with error_feedback alone: a round that is rounded at random moves "
            "all replicas; leave it on."
        )
    if settings.plan_every:
        raise ValueError(
            f"plan_every={settings.plan_every} gives matrices of a gradient bits of their own, and "
            "displacements travel in runs; leave it out."
        )
    if other := dtypes.difference(DTYPES):
        raise ValueError(
            f"Displacements of {', '.join(map(str, other))} are not compressed; use float32, bfloat16 or "
            "float16, or leave compression out."
        )


class Packer:
    """Sums runs of tensors over the ranks of `axis`. Every rank makes it alike.

    lengths: of all runs, in elements. width: of the last line.
    """

    def __init__(self, settings: Compression, axis: FlightAxis, lengths: Iterable[int], width: int):
        codec = codec_of(settings)
        assert codec is not None and axis.mesh is not None
        self._codec, self._axis = codec, axis
        tail = width * torch.float32.itemsize
        rows = max(rows_needed(self._packing(length, None, tail), axis.size) for length in lengths)
        edges = [(one, other) for one in range(axis.size) for other in range(axis.size) if one != other]
        self.channels = Channels(axis.mesh, "dp", edges, rows, ROW, torch.uint8)

    def _packing(self, elements: int, residual: Tensor | None, tail: int) -> Packing:
        unit = Unit("", 1, elements, elements < LEAST, shared_out(0, elements, self._axis.size))
        number = self._codec.finest if unit.is_small else self._codec.uniform
        return Packing("outer", elements, False, [unit], [number], self._codec, residual, tail)

    def begin(self, run: Tensor, residual: Tensor | None, last: Tensor | None) -> PackedSum:
        """The run is on its way: flat values, which the sums will be written into. residual: fp32, what was
        lost of them before, and becomes what is lost now. last: the line beside, if it goes with this run."""
        line = run[:0] if last is None else last
        tail = line.contiguous().view(torch.uint8)

        def summed(sums: Tensor, tails: Tensor) -> None:
            run.copy_(sums)
            if last is not None:
                last.copy_(tails.view(last.dtype).float().sum(0))

        packing = self._packing(run.numel(), residual, len(tail))
        self._axis.make_room()
        return PackedSum(packing, self._axis, self.channels, run, tail, summed)
