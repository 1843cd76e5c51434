"""Displacements that travel packed; what packing loses is added to the next ones.

A run of a tensor is summed as gradients are (`data_parallel.compression.packets`). Every replica packs the
part that another sums, and the sums are packed again for all. All read the same bytes, so they have the same
bits. The last line of a tensor travels beside, unpacked.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pyruntime.choices import COMPRESSION_OF_RUNS
from pyruntime.comm.core import _C
from pyruntime.data_parallel.axes import FlightAxis
from pyruntime.data_parallel.compression import Compression
from pyruntime.data_parallel.compression.codecs import codec_of
from pyruntime.data_parallel.compression.packets import Mail, PackedSum, Packing, rows_needed
from pyruntime.data_parallel.compression.units import LEAST, Unit, shared_out

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(settings: Compression, dtypes: set[torch.dtype], replicas: int, device: torch.device) -> None:
    """Raises ValueError for settings that cannot compress displacements."""
    if reason := _C.why_no_compression(str(device)):
        raise ValueError(
            f"Displacements on {device} cannot be compressed: {reason}; or leave compression out."
        )
    if replicas == 1:
        raise ValueError("compression was set, but a single replica sends nothing; leave compression out.")
    if settings.method == "power_sgd":
        raise ValueError(
            "Displacements travel in runs, which are no matrices, but method=power_sgd needs matrices; use "
            f"{' or '.join(COMPRESSION_OF_RUNS)}."
        )
    if not settings.error_feedback:
        raise ValueError(
            "Displacements are compressed only with error_feedback: without it, random rounding of a round "
            "moves all replicas; leave it on."
        )
    if settings.plan_every:
        raise ValueError(
            f"plan_every={settings.plan_every} chooses bits for each matrix of a gradient, but displacements "
            "travel in runs; leave plan_every out."
        )
    if other := dtypes.difference(DTYPES):
        raise ValueError(
            f"Displacements of {', '.join(map(str, other))} cannot be compressed; use float32, bfloat16 or "
            "float16, or leave compression out."
        )


class Packer:
    """Sums packed runs of tensors over the ranks of `axis`. All ranks construct it with the same arguments.

    lengths: elements of each run. width: elements of the last line.
    """

    def __init__(
        self,
        settings: Compression,
        axis: FlightAxis,
        lengths: Iterable[int],
        width: int,
        device: torch.device,
    ):
        codec = codec_of(settings)
        assert codec is not None
        self._codec, self._axis = codec, axis
        tail = width * torch.float32.itemsize
        rows = max(rows_needed(self._packing(length, None, tail), axis.size) for length in lengths)
        self.mail = Mail(axis, rows, device)

    def _packing(self, elements: int, residual: Tensor | None, tail: int) -> Packing:
        unit = Unit("", 1, elements, elements < LEAST, shared_out(0, elements, self._axis.size))
        number = self._codec.finest if unit.is_small else self._codec.uniform
        return Packing("outer", elements, False, [unit], [number], self._codec, residual, tail)

    def begin(self, run: Tensor, residual: Tensor | None, last: Tensor | None) -> PackedSum:
        """Starts to sum a run: flat values, which the sums will overwrite. residual: fp32, what earlier
        rounds lost, overwritten by what is lost now. last: the last line, if it travels with this run."""
        line = run[:0] if last is None else last
        tail = line.contiguous().view(torch.uint8)

        def summed(sums: Tensor, tails: Tensor) -> None:
            run.copy_(sums)
            if last is not None:
                last.copy_(tails.view(last.dtype).float().sum(0))

        packing = self._packing(run.numel(), residual, len(tail))
        self._axis.make_room()
        return PackedSum(packing, self._axis, self.mail, run, tail, summed)
