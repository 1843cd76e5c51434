"""Rows of a parameter, which ZeRO cuts over ranks, and where a run of them lies in it.

A stack of matrices [E, m, n], as experts' weights are, has E m rows [n], so a cut may fall within a matrix.
Any other parameter has the rows that its first dimension counts, and a scalar has one. A convolution's weight
[out, in, width] with m > 16 n is no stack: its rows would be too short for compressors and copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def is_stack(shape: Sequence[int]) -> bool:
    """Whether a tensor of that shape is a stack of matrices."""
    return len(shape) == 3 and shape[1] <= 16 * shape[2]


def rows_of(tensor: Tensor) -> Tensor:
    """Returns a tensor as its rows [rows, ...]; a view if it is contiguous."""
    return tensor.flatten(0, 1) if is_stack(tensor.shape) else torch.atleast_1d(tensor)


def row_count(shape: Sequence[int]) -> int:
    """Returns the number of rows of a tensor of that shape."""
    return math.prod(shape[:2] if is_stack(shape) else shape[:1])


def shape_of_rows(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    """Returns the shape of so many rows of a tensor of `shape`."""
    return rows, *shape[2 if is_stack(shape) else 1 :]


@dataclass(frozen=True)
class RowBlock:
    """A run of rows that is a block of its tensor: one expert's rows, or whole experts; else any rows."""

    first: int
    """The first of its rows in the run."""
    rows: int
    offsets: tuple[int, ...]
    """The block's first index in each dimension of the tensor."""
    sizes: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        """Indexes it in the tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))


def blocks_of(shape: Sequence[int], first: int, rows: int) -> Iterator[RowBlock]:
    """Yields the blocks that the rows [first, first + rows) of a tensor of `shape` are, in their order: of a
    stack at most three, the middle one of whole matrices. None if there are no rows."""
    rest = shape_of_rows(shape, rows)[1:]
    if not is_stack(shape):
        if rows > 0:
            yield RowBlock(0, rows, (first, *[0] * len(rest))[: len(shape)], (rows, *rest)[: len(shape)])
        return
    at, end = first, first + rows
    while at < end:
        matrix, row = divmod(at, shape[1])
        whole = (end - at) // shape[1] if row == 0 else 0
        count = min(shape[1] - row, end - at)
        sizes = (whole, shape[1], *rest) if whole else (1, count, *rest)
        yield RowBlock(at - first, sizes[0] * sizes[1], (matrix, row, 0), sizes)
        at += sizes[0] * sizes[1]
