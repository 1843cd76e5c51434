"""Compresses a model's gradients: keeps what was lost of each, and the plan, and makes new plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.comm.core import _C
from pyruntime.data_parallel import bucket_sum
from pyruntime.data_parallel.axes import Axes, FlightAxis
from pyruntime.data_parallel.bucket_sum import Reduced, Touched, WriteChunk
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.data_parallel.compression import power_sgd
from pyruntime.data_parallel.compression.allocation import allocate
from pyruntime.data_parallel.compression.codecs import Codec, codec_of
from pyruntime.data_parallel.compression.packets import Mail, PackedSum, Packing, rows_needed
from pyruntime.data_parallel.compression.power_sgd import LowRank, LowRankSum
from pyruntime.data_parallel.compression.settings import Compression
from pyruntime.data_parallel.compression.units import (
    Unit,
    is_compressed,
    pieces_of,
    units_of,
)
from pyruntime.ops.compression import BLOCK

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PIECES = 64
"""Plans give bits to pieces of matrices. A piece has the elements of all matrices divided by this, at least
LEAST_PIECE, rounded up."""
LEAST_PIECE = 64 * BLOCK
KEPT = -1
"""Stands in place of a new number: the old one stays."""


class _Packed:
    """A bucket that is compressed, and what this rank keeps of it from step to step."""

    def __init__(self, bucket: Bucket, ranks: int, settings: Compression, most: int):
        self.bucket = bucket
        self.units = units_of(bucket, ranks)
        if settings.plan_every and settings.method == "quantize":
            is_cut = bucket.segments > 1
            self.units = [piece for unit in self.units for piece in pieces_of(unit, most, is_cut)]
        elements, device = bucket.lines * bucket.width, bucket.device
        self.residual = torch.zeros(elements, device=device) if settings.error_feedback else None
        self.qs: list[Tensor] = []
        if settings.method == "power_sgd":
            most = power_sgd.candidates(settings)[-1] if settings.plan_every else settings.rank
            self.qs = [power_sgd.first_q(unit, most, settings.seed).to(device) for unit in self.units]
        self.errors: dict[str, list[float]] = {}
        """Squares of what would be lost in this step, by unit and candidate, if it is measured."""


class Compressor:
    """Launches the gradients of `buckets` over `axes`, one of which has several ranks. Matrices are
    compressed, except `tables`; other gradients travel as they are.

    Raises ValueError if both axes have several ranks, and for dtypes and devices that cannot be compressed.
    Every rank makes it alike.
    """

    def __init__(
        self, settings: Compression, buckets: Sequence[Bucket], tables: Sequence[nn.Parameter], axes: Axes
    ):
        self.settings = settings
        self._axis = _only_axis(axes)
        packed = [bucket for bucket in buckets if is_compressed(bucket, tables)]
        _check_dtypes(packed)
        self._device = packed[0].device if packed else torch.device("cpu")
        most = max(LEAST_PIECE, sum(bucket.lines * bucket.width for bucket in packed) // PIECES)
        self._packed = {id(bucket): _Packed(bucket, self._axis.size, settings, most) for bucket in packed}
        self._codec = codec_of(settings)
        self._candidates = power_sgd.candidates(settings) if self._codec is None else self._codec.candidates()
        self._uniform = settings.rank if self._codec is None else self._codec.uniform
        self._units = [unit for one in self._packed.values() for unit in one.units]
        self._numbers = torch.tensor([self._first_number(unit) for unit in self._units])
        """Each unit's number: bits, values of a million, or the rank."""
        self._steps = torch.zeros(1, dtype=torch.int64)
        """Steps taken."""
        self._mail = None if self._codec is None else self._open_mail(self._codec)

    @property
    def plan(self) -> dict[str, int]:
        """The number that compresses each matrix, by its name in a state dict: bits, how many of a million
        values travel, or the rank. A large matrix that is planned in pieces has name[0], name[1] and so on.
        The same on all ranks."""
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
        """Launches a bucket as `bucket_sum.launch` does, compressed if it is a matrix."""
        one = self._packed.get(id(bucket))
        if one is None:
            return bucket_sum.launch(bucket, dtype, axes, write, on_reduced, touched)
        gradient = torch.empty(bucket.lines, bucket.width, dtype=dtype, device=bucket.device)
        write(gradient.view(bucket.segments, bucket.segment_lines, bucket.width), 0, 0)
        if self._is_measured():
            one.errors = {unit.key: self._errors(one, unit, gradient) for unit in self._planned(one)}
        self._axis.make_room()
        if self._mail is None:
            LowRankSum(self._low_rank(one), self._axis, gradient, dtype, on_reduced)
        else:
            got = bucket.got(gradient[: bucket.segment_lines]).byte()

            def summed(sums: Tensor, tails: Tensor) -> None:
                lines = sums.view(bucket.segment_lines, bucket.width)
                bucket.mark(lines, (tails != 0).any(0))
                on_reduced(bucket, lines.to(dtype))

            PackedSum(self._packing(one), self._axis, self._mail, gradient.view(-1), got, summed)
        return lambda: None

    def end_step(self) -> None:
        """Ends a step, when all its gradients have been reduced. Every rank calls it."""
        if self._is_measured():
            self._plan_anew()
        self._steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what this rank needs to go on, with the same settings and ranks only. The tensors share
        storage with the compressor; names differ between ranks."""
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

    def _open_mail(self, codec: Codec) -> Mail:
        """Opens mail with room for the longest message that any plan makes."""
        size, most = self._axis.size, self._candidates[-1] if self.settings.plan_every else self._uniform
        rows = 1
        for one in self._packed.values():
            numbers = [codec.finest if unit.is_small else most for unit in one.units]
            rows = max(rows, rows_needed(_packing_of(one, numbers, codec, None), size))
        return Mail(self._axis, rows, self._device)

    # -- plans

    def _is_measured(self) -> bool:
        every = self.settings.plan_every
        return every > 0 and (int(self._steps) + 1) % every == 0

    def _planned(self, one: _Packed) -> list[Unit]:
        return [unit for unit in one.units if not unit.is_small]

    def _errors(self, one: _Packed, unit: Unit, gradient: Tensor) -> list[float]:
        """Returns the errors of what this rank sends of the unit, by candidate; they may not be finite."""
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
        """Adds up every rank's errors in one order, and takes rank 0's plan on all ranks."""
        planned = [(one, unit) for one in self._packed.values() for unit in self._planned(one)]
        if not planned:
            return
        errors = self._gathered([one.errors[unit.key] for one, unit in planned]).sum(0)
        found = self._allocated([unit for _, unit in planned], errors) if self._axis.rank == 0 else []
        chosen = self._gathered(found or [KEPT] * len(planned))[0]
        of_units = {unit.key: int(number) for (_, unit), number in zip(planned, chosen, strict=True)}
        numbers = self._numbers.tolist()
        for i, unit in enumerate(self._units):
            if of_units.get(unit.key, KEPT) != KEPT:
                numbers[i] = of_units[unit.key]
        self._numbers.copy_(torch.tensor(numbers))

    def _gathered(self, numbers: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
        """Returns the numbers of all ranks, fp64 [ranks, ...] on the CPU, by the transport of gradients, in
        their order."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return ops.all_gather_stats(mine, self._axis.name).cpu()

    def _allocated(self, units: Sequence[Unit], errors: Tensor) -> list[int]:
        """Returns the numbers of these units; none, and the plan stays, if an error is not finite."""
        if not errors.isfinite().all():
            return []
        uniform = self._candidates.index(self._uniform)
        sizes = [[self._nbytes(unit, number) for number in self._candidates] for unit in units]
        chosen = allocate(sizes, errors.tolist(), [uniform] * len(units))
        return [self._candidates[choice] for choice in chosen]

    def _nbytes(self, unit: Unit, number: int) -> int:
        """Returns the bytes of the unit that all ranks together send in a step."""
        if self._codec is None:
            return power_sgd.nbytes(unit, number)
        return sum(self._codec.nbytes(count, number) for _, count in unit.stretches)


def _packing_of(
    one: _Packed, numbers: Sequence[int], codec: Codec, residual: Tensor | None, **random: Any
) -> Packing:
    """Returns the packing, whose tail has a mark for each parameter that this rank had a gradient for."""
    bucket = one.bucket
    elements, is_cut = bucket.lines * bucket.width, bucket.segments > 1
    marks = len(bucket.parameters)
    return Packing(bucket.name, elements, is_cut, one.units, numbers, codec, residual, marks, **random)


def _only_axis(axes: Axes) -> FlightAxis:
    if axes.shard.size > 1 and axes.replicate.size > 1:
        raise ValueError(
            f"Gradients are compressed over one axis only, but here are {axes.replicate.size} replicas of "
            f"{axes.shard.size} ranks; use one of the two, or no compression."
        )
    return axes.shard if axes.shard.size > 1 else axes.replicate


def _check_dtypes(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        if bucket.dtype not in DTYPES:
            raise ValueError(
                f"{bucket.name} is {bucket.dtype}, and gradients are compressed only in float32, bfloat16 "
                "and float16; leave compression out."
            )
        if reason := _C.why_no_compression(str(bucket.device)):
            raise ValueError(
                f"{bucket.name} cannot be compressed on {bucket.device}: {reason}; or leave compression out."
            )
