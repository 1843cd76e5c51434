"""Cuts a sequence into slices for a pipeline: TeraPipe's dynamic program, exact.

With a causal mask a token needs only earlier tokens of the layer below. So the stages of a pipeline can work
on slices of one sequence at once. Take K stages and slices of t_1..t_M seconds, where t depends on a slice's
length and on how much precedes it. All stages are done after::

    sum_i t_i + (K - 1) max_i t_i

The least sum below a ceiling c on the slowest slice is a shortest path: with t(k, j) the seconds of k units
after j, S(0) = 0 and ::

    S(i) = min over k <= i with t(k, i - k) <= c  of  S(i - k) + t(k, i - k)

The slowest slice takes one of the times in the table, so only those need solving as ceilings. Few of them are
needed. S falls as c rises: a slicing whose slowest slice takes from a to b has a sum of at least S(b), and a
total of at least max(S(b), a) + (K - 1) a. Ranges of ceilings are halved, the most promising first, and
dropped if that bound is not below the best total (derived; the paper tries all ceilings upwards).

Lengths are in units of a grid, n of which make the sequence. `slice_cost.table` makes a cost table
[n, n + 1]: entry [a, b] is the seconds of a slice of a + 1 units after b units, inf for an impossible one.
Later slices attend to more, so the best slices are long first and short later.

Source: TeraPipe, arXiv 2102.07988, equations 4 and 5, algorithm 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Slicing:
    """A sequence cut into slices, in the order of the tokens."""

    lengths: tuple[int, ...]
    """Grid units of each slice."""
    seconds: tuple[float, ...]
    """Seconds of each slice in one stage."""
    total: float
    """Seconds until the last stage has finished this one sequence, equation 5."""


def best_slicing(table: ArrayLike, stages: int) -> Slicing:
    """Returns the slicing of least total. Among slicings of equal sum under a ceiling it takes the one with
    the shortest last slice, so slices are no longer than needed.

    Raises ValueError for a malformed table, one without a finite slicing, or `stages` below 1.
    """
    costs = _checked(table, stages)
    ending = _by_end(costs)
    ceilings = np.unique(costs[np.isfinite(costs)])
    unlimited = _least_below(ending, math.inf)
    if not unlimited:
        raise ValueError(
            f"No slicing of {len(costs)} units has a finite cost; the table rules out every one."
        )
    best = _scored(costs, unlimited, stages)
    # (bound, first ceiling, end of ceilings (exclusive), S of a ceiling at or above them)
    ranges: list[tuple[float, int, int, float]] = []

    def open_range(begin: int, end: int, busy: float) -> None:
        if begin < end:
            lowest = float(ceilings[begin])
            heapq.heappush(ranges, (max(busy, lowest) + (stages - 1) * lowest, begin, end, busy))

    open_range(0, int(np.searchsorted(ceilings, max(best.seconds))), sum(best.seconds))
    while ranges:
        bound, begin, end, busy = heapq.heappop(ranges)
        if bound >= best.total:
            break
        middle = (begin + end) // 2
        lengths = _least_below(ending, float(ceilings[middle]))
        busy_below = math.inf
        if lengths:
            found = _scored(costs, lengths, stages)
            best = min(best, found, key=lambda slicing: slicing.total)
            busy_below = sum(found.seconds)
            # Between its slowest slice and this ceiling S is constant.
            open_range(begin, int(np.searchsorted(ceilings, max(found.seconds))), busy_below)
        if busy < busy_below:
            open_range(middle + 1, end, busy)
    return best


def uniform_slicing(table: ArrayLike, stages: int, slices: int) -> Slicing:
    """Returns the slicing into `slices` equal slices; the first are a unit longer if uneven.

    Raises ValueError for a malformed table or an argument out of range.
    """
    costs = _checked(table, stages)
    units = len(costs)
    if not 1 <= slices <= units:
        raise ValueError(f"slices={slices}: a sequence of {units} units has 1 to {units} slices.")
    length, longer = divmod(units, slices)
    return _scored(costs, [length + 1] * longer + [length] * (slices - longer), stages)


def best_uniform_slicing(table: ArrayLike, stages: int) -> Slicing:
    """Returns the `uniform_slicing` of least total over the number of slices. Raises as that does."""
    of_each = (uniform_slicing(table, stages, slices) for slices in range(1, len(np.asarray(table)) + 1))
    return min(of_each, key=lambda slicing: slicing.total)


def _checked(table: ArrayLike, stages: int) -> Floats:
    """Returns `table` as float64 [n, n + 1], inf where a slice exceeds the sequence.

    Raises ValueError for another shape, for nan or negative seconds, and for fewer stages than one.
    """
    if stages < 1:
        raise ValueError(f"stages must be at least 1, found {stages}.")
    costs = np.asarray(table, dtype=np.float64)
    if costs.ndim != 2 or len(costs) < 1 or costs.shape[1] != len(costs) + 1:
        raise ValueError(
            f"table must be [n, n + 1]: seconds of a slice of a + 1 units after b units; found shape "
            f"{costs.shape}."
        )
    n = len(costs)
    inside = np.arange(1, n + 1)[:, None] + np.arange(n + 1) <= n
    wrong = np.argwhere(inside & ~(costs >= 0))
    if wrong.size:
        a, b = wrong[0]
        raise ValueError(f"table must not have nan or negative seconds, found {costs[a, b]} at [{a}, {b}].")
    return np.where(inside, costs, np.inf)


def _by_end(costs: Floats) -> Floats:
    """Returns [n, n]: seconds of the slice of k + 1 units that ends with unit i (from 0); inf for k > i."""
    n = len(costs)
    i, k = np.arange(n)[:, None], np.arange(n)[None]
    return np.where(k <= i, costs[k, np.maximum(i - k, 0)], np.inf)


def _least_below(ending: Floats, ceiling: float) -> list[int]:
    """Returns the lengths of the slices of least sum, none longer than `ceiling`; empty if impossible."""
    n = len(ending)
    allowed = np.where(ending <= ceiling, ending, np.inf)
    # Prefix i is stored at n - i, so that its predecessors are one run, ordered by the last slice's length.
    least = np.full(n + 1, np.inf)
    least[n] = 0.0
    last = np.zeros(n + 1, dtype=np.int64)
    for i in range(1, n + 1):
        sums = least[n - i + 1 :] + allowed[i - 1, :i]
        shortest = int(sums.argmin())  # the first of equals
        least[n - i], last[n - i] = sums[shortest], shortest + 1
    lengths: list[int] = []
    while math.isfinite(least[0]) and sum(lengths) < n:
        lengths.append(int(last[sum(lengths)]))
    return lengths[::-1]


def _scored(costs: Floats, lengths: Sequence[int], stages: int) -> Slicing:
    begins = np.cumsum([0, *lengths[:-1]])
    seconds = tuple(float(costs[length - 1, begin]) for length, begin in zip(lengths, begins, strict=True))
    # A single stage waits for nobody; 0 * inf would be nan.
    waits = (stages - 1) * max(seconds) if stages > 1 else 0.0
    return Slicing(tuple(lengths), seconds, sum(seconds) + waits)
