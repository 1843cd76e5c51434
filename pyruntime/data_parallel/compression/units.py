"""Divides a bucket into units that are compressed together, and says which rank sums them.

A bucket's gradient is flat memory, [lines, width] (../buckets.py). If its segments are cut over the ranks,
each rank sums its own segment. If every rank keeps all of it (stage 0), each rank sums an equal stretch of
every part, and sends the sum to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from pyruntime.data_parallel.buckets import Bucket
from pyruntime.ops.compression import BLOCK

ROW = 64
"""Bytes of a row of a message; packed units begin at multiples of it."""
GRAIN = 16 * BLOCK
"""Elements that take whole rows with any number of bits."""
LEAST = 1024
"""Elements of a matrix; below this, a matrix is too small to be worth a loss."""


@dataclass(frozen=True)
class Unit:
    """A part of a parameter, with one number (codecs.py). `stretches`: by rank, the first element in the
    bucket's memory, and the number of elements, that the rank sums."""

    key: str
    rows: int
    """Rows of its matrix, with those that fill up the last segment."""
    columns: int
    is_small: bool
    stretches: tuple[tuple[int, int], ...]


def is_compressed(bucket: Bucket, tables: Sequence[nn.Parameter]) -> bool:
    """Whether it holds matrices, except tables, of which only touched rows travel (../touched.py)."""
    if bucket.is_table and any(bucket.parameters[0] is table for table in tables):
        return False
    return all(parameter.dim() >= 2 and parameter.numel() > 0 for parameter in bucket.parameters)


def units_of(bucket: Bucket, ranks: int) -> list[Unit]:
    """Returns the units of a bucket that is summed by so many ranks."""
    result = []
    for part in bucket.parts:
        begin, count = part.offset * bucket.width, part.lines * bucket.width
        if bucket.segments > 1:
            segment = bucket.segment_lines * bucket.width
            stretches = tuple((rank * segment + begin, count) for rank in range(ranks))
        else:
            stretches = shared_out(begin, count, ranks)
        rows = bucket.segments * part.share
        columns = part.lines * bucket.width // part.share
        result.append(Unit(part.key, rows, columns, rows * columns < LEAST, stretches))
    return result


def pieces_of(unit: Unit, most: int, is_cut: bool) -> list[Unit]:
    """Returns the unit if it has at most `most` elements, else runs of it of that many, rounded up. Every
    rank sums as much of each run, in whole blocks and rows: no rank has longer messages than another, or than
    without pieces. is_cut: the unit is cut over ranks, as its segments are; else runs follow its memory."""
    total, ranks = sum(count for _, count in unit.stretches), len(unit.stretches)
    if total <= most:
        return [unit]
    step = -(-most // (ranks * GRAIN)) * GRAIN  # of a rank
    if is_cut:
        longest = max(count for _, count in unit.stretches)
        runs = [
            tuple(
                (first + min(low, count), max(0, min(step, count - low))) for first, count in unit.stretches
            )
            for low in range(0, longest, step)
        ]
    else:
        begin, of_all = unit.stretches[0][0], ranks * step
        runs = [shared_out(begin + low, min(of_all, total - low), ranks) for low in range(0, total, of_all)]
    if len(runs) == 1:
        return [unit]
    return [
        Unit(f"{unit.key}[{i}]", 1, sum(count for _, count in run), False, run) for i, run in enumerate(runs)
    ]


def shared_out(begin: int, count: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Divides the elements [begin, begin + count) over ranks, as stretches of a unit, of whole blocks."""
    share = -(-count // (ranks * BLOCK)) * BLOCK
    cuts = [min(rank * share, count) for rank in range(ranks + 1)]
    return tuple((begin + low, high - low) for low, high in pairwise(cuts))


def places_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the place where each of so many bytes begins in a message, and the message's rows."""
    places, at = [], 0
    for size in sizes:
        places.append(at)
        at += -(-size // ROW) * ROW
    return places, at // ROW
