"""Who compresses a model's gradients: what was lost of each, the plan, and when there is a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.comm.channel import Channels
from pyruntime.data_parallel import reduction
from pyruntime.data_parallel.axes import Axes, FlightAxis
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.data_parallel.compression import power_sgd
from pyruntime.data_parallel.compression.allocation import allocate
from pyruntime.data_parallel.compression.codecs import Codec, codec_of
from pyruntime.data_parallel.compression.packets import PackedSum, Packing, rows_needed
from pyruntime.data_parallel.compression.power_sgd import LowRank, LowRankSum
from pyruntime.data_parallel.compression.settings import Compression
from pyruntime.data_parallel.compression.units import (
    ROW,
    Unit,
    is_compressed,
    pieces_of,
    units_of,
)
from pyruntime.data_parallel.reduction import Reduced, Touched, WriteChunk
from pyruntime.ops.compression import BLOCK

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PIECES = 64
"""A plan gives bits to pieces of as many elements as all have divided by this, or LEAST_PIECE, rounded up."""
LEAST_PIECE = 64 * BLOCK
KEPT = -1
"""In place of a new number: the old one stays."""


class _Packed:
    """A bucket that is compressed, and what this rank keeps of it from step to step."""

    def __init__(self, bucket: Bucket, ranks: int, settings: Compression, most: int):
        self.bucket = bucket
        self.units = units_of(bucket, ranks)
        if settings.plan_every and settings.method == "quantize":
            is_cut = bucket.segments > 1
            self.units = [piece for unit in self.units for piece in pieces_of(unit, most, is_cut)]
        self.residual = torch.zeros(bucket.lines * bucket.width) if settings.error_feedback else None
        self.qs: list[Tensor] = []
        if settings.method == "power_sgd":
            most = power_sgd.candidates(settings)[-1] if settings.plan_every else settings.rank
            self.qs = [power_sgd.first_q(unit, most, settings.seed) for unit in self.units]
        self.errors: dict[str, list[float]] = {}
        """Of this step, by unit: squares of what would be lost, by candidate; where it is measured."""


class Compressor:
    """Launches the gradients of `buckets` over `axes`, of which one has several ranks: compressed where they
    are matrices, but `tables`; else as they are.

    Raises ValueError where both axes have several ranks, and where nothing can be compressed: other dtypes,
    and devices. Every rank makes it alike.
    """

    def __init__(
        self, settings: Compression, buckets: Sequence[Bucket], tables: Sequence[nn.Parameter], axes: Axes
    ):
        self.settings = settings
        self._axis = _only_axis(axes)
        packed = [bucket for bucket in buckets if is_compressed(bucket, tables)]
        _check_dtypes(packed)
        most = max(LEAST_PIECE, sum(bucket.lines * bucket.width for bucket in packed) // PIECES)
        self._packed = {id(bucket): _Packed(bucket, self._axis.size, settings, most) for bucket in packed}
        self._codec = codec_of(settings)
        self._candidates = power_sgd.candidates(settings) if self._codec is None else self._codec.candidates()
        self._uniform = settings.rank if self._codec is None else self._codec.uniform
        self._units = [unit for one in self._packed.values() for unit in one.units]
        self._numbers = torch.tensor([self._first_number(unit) for unit in self._units])
        """Of each unit: bits, values of a million, or the rank."""
        self._steps = torch.zeros(1, dtype=torch.int64)
        """Taken."""
        self._channels = None if self._codec is None else self._open_channels(self._codec)

    @property
    def plan(self) -> dict[str, int]:
        """What each matrix is compressed by, by its name in a state dict: bits, how many of a million values
        travel, or the rank. Of a large matrix that is planned in pieces, by name[0], name[1] and so on. The
        same on all ranks."""
        numbers = self._numbers.tolist()
        return {unit.key: number for unit, number in zip(self._units, numbers, strict=True)}

    def launch(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        axes: Axes,
        write: WriteChunk,
        on_reduced: Reduced,
        touched: Touched | None = None,
    ) -> Callable[[], None]:
        """As `reduction.launch`."""
        one = self._packed.get(id(bucket))
        if one is None:
            return reduction.launch(bucket, dtype, axes, write, on_reduced, touched)
        gradient = torch.empty(bucket.lines, bucket.width, dtype=dtype)
        for begin in range(0, bucket.lines, bucket.segment_lines):
            write(gradient[begin : begin + bucket.segment_lines], begin)
        if self._is_measured():
            one.errors = {unit.key: self._errors(one, unit, gradient) for unit in self._planned(one)}
        self._axis.make_room()
        if self._channels is None:
            LowRankSum(self._low_rank(one), self._axis, gradient, dtype, on_reduced)
        else:
            got = bucket.got(gradient[: bucket.segment_lines]).byte()

            def summed(sums: Tensor, tails: Tensor) -> None:
                lines = sums.view(bucket.segment_lines, bucket.width)
                bucket.mark(lines, (tails != 0).any(0))
                on_reduced(bucket, lines.to(dtype))

            PackedSum(self._packing(one), self._axis, self._channels, gradient.view(-1), got, summed)
        return lambda: None

    def end_step(self) -> None:
        """All gradients of a step have been reduced. Every rank calls it."""
        if self._is_measured():
            self._plan_anew()
        self._steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank needs to go on, over the storage that it is kept in; names differ between ranks.
        Of the same settings and ranks alone."""
        rank = dist.get_rank()
        state = {f"{rank}.steps": self._steps, f"{rank}.numbers": self._numbers}
        for one in self._packed.values():
            if one.residual is not None:
                state[f"{rank}.residual.{one.bucket.name}"] = one.residual
            for unit, q in zip(one.units, one.qs, strict=False):
                state[f"{rank}.q.{unit.key}"] = q
        return state

    # -- one step

    def _numbers_of(self, one: _Packed) -> list[int]:
        plan = self.plan
        return [plan[unit.key] for unit in one.units]

    def _first_number(self, unit: Unit) -> int:
        return self._codec.finest if self._codec is not None and unit.is_small else self._uniform

    def _packing(self, one: _Packed) -> Packing:
        assert self._codec is not None
        random = "" if self.settings.error_feedback else f"{self.settings.seed} {self._axis.rank}"
        return _packing_of(
            one, self._numbers_of(one), self._codec, one.residual, rounding=random, step=int(self._steps)
        )

    def _low_rank(self, one: _Packed) -> LowRank:
        assert one.residual is not None
        return LowRank(one.bucket, one.units, self._numbers_of(one), one.qs, one.residual)

    def _open_channels(self, codec: Codec) -> Channels:
        """With room for the longest message that any plan makes."""
        size, most = self._axis.size, self._candidates[-1] if self.settings.plan_every else self._uniform
        rows = 1
        for one in self._packed.values():
            numbers = [codec.finest if unit.is_small else most for unit in one.units]
            rows = max(rows, rows_needed(_packing_of(one, numbers, codec, None), size))
        edges = [(sender, to) for sender in range(size) for to in range(size) if sender != to]
        assert self._axis.mesh is not None
        return Channels(self._axis.mesh, "dp", edges, rows, ROW, torch.uint8)

    # -- plans

    def _is_measured(self) -> bool:
        every = self.settings.plan_every
        return every > 0 and (int(self._steps) + 1) % every == 0

    def _planned(self, one: _Packed) -> list[Unit]:
        return [unit for unit in one.units if not unit.is_small]

    def _errors(self, one: _Packed, unit: Unit, gradient: Tensor) -> list[float]:
        """Of what this rank sends of the unit in this step, by candidate; not finite where that is not."""
        if self._codec is None:
            low = self._low_rank(one)
            matrix = low.matrix(gradient.view(-1), unit).float() + low.matrix(low.residual, unit)
            found = power_sgd.errors(matrix, self._candidates, one.qs[one.units.index(unit)])
            return [
                0.0 if power_sgd.travels_whole(unit, rank) else error
                for rank, error in zip(self._candidates, found, strict=True)
            ]
        of_ranks = []
        for rank, (first, count) in enumerate(unit.stretches):
            if rank != self._axis.rank:
                residual = None if one.residual is None else one.residual[first : first + count]
                of_ranks.append(self._codec.errors(gradient.view(-1)[first : first + count], residual))
        return torch.tensor(of_ranks, dtype=torch.float64).sum(0).tolist()

    def _plan_anew(self) -> None:
        """Every rank's errors are added up in one order, and rank 0's plan is taken by all."""
        planned = [(one, unit) for one in self._packed.values() for unit in self._planned(one)]
        if not planned:
            return
        mine = torch.tensor([one.errors[unit.key] for one, unit in planned], dtype=torch.float64)
        errors = ops.all_gather_stats(mine, self._axis.name).sum(0)
        found = self._allocated([unit for _, unit in planned], errors) if self._axis.rank == 0 else []
        chosen = torch.tensor(found or [KEPT] * len(planned), dtype=torch.float64)
        chosen = ops.all_gather_stats(chosen, self._axis.name)[
            0
        ]  # by the transport of gradients, in their order
        of_units = {unit.key: int(number) for (_, unit), number in zip(planned, chosen, strict=True)}
        numbers = self._numbers.tolist()
        for i, unit in enumerate(self._units):
            if of_units.get(unit.key, KEPT) != KEPT:
                numbers[i] = of_units[unit.key]
        self._numbers.copy_(torch.tensor(numbers))

    def _allocated(self, units: Sequence[Unit], errors: Tensor) -> list[int]:
        """The numbers of these units; none where what was measured is not finite, and the plan stays."""
        if not errors.isfinite().all():
            return []
        uniform = self._candidates.index(self._uniform)
        sizes = [[self._nbytes(unit, number) for number in self._candidates] for unit in units]
        chosen = allocate(sizes, errors.tolist(), [uniform] * len(units))
        return [self._candidates[choice] for choice in chosen]

    def _nbytes(self, unit: Unit, number: int) -> int:
        """That ranks send of the unit in a step, all together."""
        if self._codec is None:
            return power_sgd.nbytes(unit, number)
        return sum(self._codec.nbytes(count, number) for _, count in unit.stretches)


def _packing_of(
    one: _Packed, numbers: Sequence[int], codec: Codec, residual: Tensor | None, **random: Any
) -> Packing:
    """With a mark for each parameter that this rank had a gradient for."""
    bucket = one.bucket
    elements, is_cut = bucket.lines * bucket.width, bucket.segments > 1
    marks = len(bucket.parameters)
    return Packing(bucket.name, elements, is_cut, one.units, numbers, codec, residual, marks, **random)


def _only_axis(axes: Axes) -> FlightAxis:
    if axes.shard.size > 1 and axes.replicate.size > 1:
        raise ValueError(
            f"Gradients are compressed over one axis, and here are {axes.replicate.size} replicas of "
            f"{axes.shard.size} ranks; use one of the two, or no compression."
        )
    return axes.shard if axes.shard.size > 1 else axes.replicate


def _check_dtypes(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        if bucket.dtype not in DTYPES or bucket.device.type != "cpu":
            raise ValueError(
                f"{bucket.name} is {bucket.dtype} on {bucket.device}, and gradients are compressed on the "
                "CPU in float32, bfloat16 and float16; leave compression out."
            )
