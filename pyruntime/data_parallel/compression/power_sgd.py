"""Sums gradients as matrices of low rank (Vogels et al. 2019, "PowerSGD", arXiv 1905.13727, algorithm 1).

Each rank r has a matrix M_r = gradient + residual [n, m]. All ranks have the same Q [m, k], that of the step
before (warm start):

    P = orthonormal(sum over ranks of M_r Q)     [n, k], summed among the ranks
    Q = sum over ranks of M_r^T P                [m, k], summed among the ranks
    the sum of the gradients becomes P Q^T; the residual M_r - P P^T M_r, what rank r's part of it lost

So one iteration a step follows the subspace of the largest singular values. k (n + m) numbers travel twice in
place of n m. If that is not less, a matrix travels whole in the first of the two sums, as do the marks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import FlightAxis
from pyruntime.data_parallel.bucket_sum import Reduced
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.data_parallel.compression.settings import Compression
from pyruntime.data_parallel.compression.units import Unit
from pyruntime.ops.layers import sum_of_squares

WIDTH = 16
"""Numbers in a line of a sum."""


def candidates(settings: Compression) -> list[int]:
    """Returns the ranks that a plan may give."""
    factors = (1 / 4, 1 / 2, 3 / 4, 1, 3 / 2, 2, 3, 4)
    return sorted({max(1, round(settings.rank * factor)) for factor in factors})


def travels_whole(unit: Unit, rank: int) -> bool:
    """Whether an approximation of that rank would take no fewer bytes than the matrix."""
    return unit.is_small or min(rank, unit.rows, unit.columns) * (unit.rows + unit.columns) >= (
        unit.rows * unit.columns
    )


def nbytes(unit: Unit, rank: int) -> int:
    """Returns the bytes of both sums, in fp32."""
    elements = unit.rows * unit.columns if travels_whole(unit, rank) else rank * (unit.rows + unit.columns)
    return 4 * elements


def first_q(unit: Unit, rank: int, seed: int) -> Tensor:
    """Returns the first Q, [m, rank], the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {unit.key}".encode()))
    return torch.randn(rank, unit.columns, generator=generator).t().contiguous()


def errors(matrix: Tensor, ranks: Sequence[int], q: Tensor) -> list[float]:
    """Returns for each rank ||M - its best approximation||^2, among those whose columns M q spans, with q [m,
    the largest of `ranks`]. A step from q can lose that much; the true error is not above it. NaN if M, or a
    square of it, is not finite."""
    whole = float(sum_of_squares([matrix]))
    spanned = matrix @ q
    if not math.isfinite(whole + float(sum_of_squares([spanned]))):
        return [math.nan] * len(ranks)
    image = (matrix.t() @ torch.linalg.qr(spanned).Q).double()
    # Sums of squares of singular values, from the largest on.
    sums = torch.linalg.eigvalsh(image.t() @ image).flip(0).cumsum(0).tolist()
    return [max(0.0, whole - sums[min(rank, len(sums)) - 1]) for rank in ranks]


@dataclass(frozen=True)
class LowRank:
    """The state with which one bucket travels in this step."""

    bucket: Bucket
    units: Sequence[Unit]
    ranks: Sequence[int]
    """The rank of each unit's approximation."""
    qs: Sequence[Tensor]
    """Each unit's Q, [m, at least its rank]; its first columns are used, and become the next step's."""
    residual: Tensor
    """fp32, flat, as long as the bucket's lines."""

    def matrix(self, memory: Tensor, unit: Unit) -> Tensor:
        """Returns the unit's rows of flat memory of the bucket's lines, [n, m]: a view if they lie together,
        else a copy."""
        stretches = [memory[first : first + count] for first, count in self.in_memory(unit)]
        joined = stretches[0] if len(stretches) == 1 else torch.cat(stretches)
        return joined.view(unit.rows, unit.columns)

    def in_memory(self, unit: Unit) -> list[tuple[int, int]]:
        """Returns the first element, and the number, of each stretch of memory that the unit's rows take."""
        first = unit.stretches[0][0]
        if self.bucket.segments == 1:
            return [(first, unit.rows * unit.columns)]
        return list(unit.stretches)

    def store(self, memory: Tensor, unit: Unit, matrix: Tensor) -> None:
        """Writes the unit's rows back; the inverse of matrix()."""
        rows = iter(matrix.reshape(-1).split([count for _, count in self.in_memory(unit)]))
        for first, count in self.in_memory(unit):
            memory[first : first + count] = next(rows)

    def forget_unless(self, is_finite: Tensor, unit: Unit) -> None:
        """Sets the unit's residual to zero if a scalar, bool, is false."""
        if is_finite.device.type == "cpu" and is_finite:
            return  # on devices the host would wait to know
        for first, count in self.in_memory(unit):
            self.residual[first : first + count].masked_fill_(~is_finite, 0)


class _Summed:
    """A sum of fp32 numbers over all ranks that is under way."""

    def __init__(self, axis: FlightAxis, numbers: Tensor, doing: str, name: str):
        lines = max(1, -(-len(numbers) // WIDTH))
        self._count, self._name = len(numbers), name
        padded = numbers.new_zeros(lines, WIDTH)
        padded.view(-1)[: len(numbers)] = numbers
        axis.make_room()
        device = str(numbers.device)
        self._scatter = _C.LineScatter(axis.name, lines, WIDTH, torch.float32, device, True)
        for index, (begin, count) in enumerate(self._scatter.chunks()):
            self._scatter.part(index).copy_(padded[begin : begin + count])
            self._scatter.publish(index)
        self._is_summed = False
        self._sums: Tensor | None = None

    def advance(self) -> None:
        if self._sums is not None:
            return
        if not self._is_summed and self._scatter.parts_have_come():
            with marked("dp sum", self._name):
                self._scatter.reduce()
            self._is_summed = True
        if self._is_summed and self._scatter.sums_have_come():
            self._sums = self._scatter.finish()

    def has_landed(self) -> bool:
        return self._sums is not None

    def result(self) -> Tensor:
        if self._sums is None:
            self._sums = self._scatter.finish()
        return self._sums.reshape(-1)[: self._count]


class _Flight:
    """A flight of a bucket's numbers, as an axis completes it."""

    _sums: _Summed | None

    def advance(self) -> None:
        if self._sums is not None:
            self._sums.advance()

    def has_landed(self) -> bool:
        return self._sums is None or self._sums.has_landed()

    def drop(self) -> None:
        self._sums = None


class LowRankSum(_Flight):
    """The flight of a bucket's first sum, of M Q. gradient [lines, width]: this rank's, with its marks."""

    def __init__(
        self, low: LowRank, axis: FlightAxis, gradient: Tensor, dtype: torch.dtype, on_reduced: Reduced
    ):
        self._low, self._axis, self._dtype, self._on_reduced = low, axis, dtype, on_reduced
        bucket = low.bucket
        numbers = []
        with marked("dp pack", bucket.name):
            for unit, rank, q in zip(low.units, low.ranks, low.qs, strict=True):
                matrix = low.matrix(gradient.view(-1), unit).float()
                if unit.is_small:
                    numbers.append(matrix.reshape(-1))
                    continue
                matrix = low.matrix(low.residual, unit) + matrix
                whole = travels_whole(unit, rank)  # by this plan; the one before may have left a residual
                low.store(low.residual, unit, torch.zeros_like(matrix) if whole else matrix)
                numbers.append((matrix if whole else matrix @ q[:, :rank]).reshape(-1))
            numbers.append(bucket.got(gradient[: bucket.segment_lines]).float())
            flat = torch.cat(numbers)
        self._sums = _Summed(axis, flat, "dp sum", bucket.name)
        axis.add(self)

    def complete(self) -> None:
        assert self._sums is not None
        low = self._low
        sums, self._sums = self._sums.result(), None
        sizes = [
            unit.rows * (unit.columns if travels_whole(unit, rank) else rank)
            for unit, rank in zip(low.units, low.ranks, strict=True)
        ]
        *parts, got = sums.split([*sizes, len(low.bucket.parameters)])
        left: list[Tensor] = []  # for each unit the whole sum, or P
        with marked("dp orthogonalise", low.bucket.name):
            for unit, rank, part in zip(low.units, low.ranks, parts, strict=True):
                whole = travels_whole(unit, rank)
                one = part.view(unit.rows, unit.columns if whole else rank)
                left.append(one if whole else orthonormal(one))
        _Right(low, self._axis, left, got != 0, self._dtype, self._on_reduced)


class _Right(_Flight):
    """The flight of the second sum, of M^T P."""

    def __init__(
        self,
        low: LowRank,
        axis: FlightAxis,
        left: Sequence[Tensor],
        got: Tensor,
        dtype: torch.dtype,
        on_reduced: Reduced,
    ):
        self._low, self._axis, self._left, self._got = low, axis, left, got
        self._dtype, self._on_reduced = dtype, on_reduced
        numbers = [low.residual.new_zeros(0)]
        with marked("dp pack", low.bucket.name):
            for unit, rank, p in zip(low.units, low.ranks, left, strict=True):
                if travels_whole(unit, rank):
                    continue
                matrix = low.matrix(low.residual, unit)
                own = matrix.t() @ p
                numbers.append(own.reshape(-1))
                low.store(low.residual, unit, torch.addmm(matrix, p, own.t(), alpha=-1))
        self._sums = _Summed(axis, torch.cat(numbers), "dp sum", low.bucket.name)
        axis.add(self)

    def complete(self) -> None:
        assert self._sums is not None
        low, bucket = self._low, self._low.bucket
        rest, self._sums = self._sums.result(), None
        segment = bucket.segment_lines * bucket.width
        offset = self._axis.rank * segment if bucket.segments > 1 else 0
        sums = rest.new_zeros(bucket.segment_lines, bucket.width)
        for unit, rank, p, q in zip(low.units, low.ranks, self._left, low.qs, strict=True):
            rows = slice(0, unit.rows)
            first, count = low.in_memory(unit)[0]
            if bucket.segments > 1:
                first, count = unit.stretches[self._axis.rank]
                share = count // unit.columns
                rows = slice(self._axis.rank * share, (self._axis.rank + 1) * share)
            out = sums.view(-1)[first - offset : first - offset + count].view(-1, unit.columns)
            if travels_whole(unit, rank):
                out.copy_(p[rows])
                continue
            right, rest = rest[: unit.columns * rank].view(unit.columns, rank), rest[unit.columns * rank :]
            torch.mm(p[rows], right.t(), out=out)
            is_finite = right.isfinite().all()
            q[:, :rank] = torch.where(is_finite, right, q[:, :rank])
            # Else some rank's values were not finite, as all ranks see here: begin anew.
            low.forget_unless(is_finite, unit)
        bucket.mark(sums, self._got)
        self._on_reduced(bucket, sums.to(self._dtype))


def orthonormal(columns: Tensor) -> Tensor:
    """Returns an orthonormal basis of the columns, fp32 [n, k] with k <= n; the columns themselves if they
    are not finite."""
    return torch.where(columns.isfinite().all(), torch.linalg.qr(columns.double()).Q.float(), columns)
