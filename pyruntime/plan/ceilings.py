"""The least sum(t) + (K - 1) max(t) over plans, given the plan of least sum(t) below any ceiling on max(t).

A plan's slowest slice is one of the slice times, so it is enough to solve for each of them as the ceiling and
to score the solution by its own slowest slice. Let S(c) be the least sum below ceiling c; it never rises with
c. So few ceilings have to be solved:

* A plan whose slowest slice is from a to b has a sum of at least S(b), and of at least a; it scores at least
  max(S(b), a) + (K - 1) a. Where that is not below the best score found, the ceilings a to b are skipped. The
  paper's rule, to go through the ceilings upwards and stop at K c >= best, is the part of it without S.
* Where the plan for ceiling b has a slowest slice of m < b, S is constant from m to b: none but m is of use.
* Where S(a) = S(b), none above a is.

Ranges of ceilings are therefore split, first where the bound is lowest, and many ceilings are solved at a
time, because numpy is slow at small arrays.

Source: TeraPipe, arXiv 2102.07988, equation 5 and algorithm 1; the bounds are derived.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Plan = TypeVar("Plan")


def total_seconds(busy: float, slowest: float, stages: int) -> float:
    """Seconds until the last of `stages` stages is done: equation 5.

    busy, slowest: sum and maximum of the slices' seconds.
    """
    # Alone, a stage waits for nobody; 0 * inf would be nan.
    return busy + (stages - 1) * slowest if stages > 1 else busy


@dataclass(frozen=True)
class Solution(Generic[Plan]):
    """A plan, the sum of its slices' seconds and the slowest of them."""

    busy: float
    slowest: float
    plan: Plan

    def total(self, stages: int) -> float:
        return total_seconds(self.busy, self.slowest, stages)


@dataclass(frozen=True, order=True)
class _Range:
    """The ceilings begin..end - 1, by index. `bound`: no plan whose slowest slice is one of them scores less.
    `busy`: S(c) of a ceiling at or above them."""

    bound: float
    begin: int
    end: int
    busy: float


def best_under_ceilings(
    ceilings: Floats,
    solve: Callable[[Floats], list[Solution[Plan]]],
    stages: int,
    eps: float,
    at_a_time: int,
) -> Solution[Plan]:
    """The plan of least total, or one within stages * eps seconds of it.

    ceilings: the times that a plan's slowest slice can take, sorted, distinct; the first one is some plan's.
    solve: for each ceiling given, the plan of least sum whose slices take at most that; about `at_a_time`
    ceilings in one call.
    """

    def open_range(begin: int, end: int, busy: float) -> None:
        if begin < end:
            first = float(ceilings[begin])
            heapq.heappush(ranges, _Range(max(busy, first) + (stages - 1) * first, begin, end, busy))

    ranges: list[_Range] = []
    (best,) = solve(ceilings[-1:])
    open_range(0, _index(ceilings, best.slowest), best.busy)
    while True:
        promising: list[_Range] = []
        while ranges and len(promising) < at_a_time:
            taken = heapq.heappop(ranges)
            if taken.bound >= best.total(stages) - stages * eps:
                ranges.clear()
            else:
                promising.append(taken)
        if not promising:
            return best
        points = [_spread(taken, max(1, at_a_time // len(promising))) for taken in promising]
        solved = iter(solve(ceilings[np.concatenate(points)]))
        for taken, inside in zip(promising, points, strict=True):
            below, busy_below = taken.begin, math.inf
            for point in inside:
                found = next(solved)
                best = min(best, found, key=lambda solution: solution.total(stages))
                if found.busy < busy_below:
                    open_range(below, _index(ceilings, found.slowest), found.busy)
                below, busy_below = int(point) + 1, found.busy
            if taken.busy < busy_below:
                open_range(below, taken.end, taken.busy)


def _spread(taken: _Range, count: int) -> NDArray[np.int64]:
    """Up to `count` of the range's ceilings, evenly spread; of one, the middle."""
    size = taken.end - taken.begin
    count = min(count, size)
    return taken.begin + (2 * np.arange(count) + 1) * size // (2 * count)


def _index(ceilings: Floats, value: float) -> int:
    return int(np.searchsorted(ceilings, value))
