"""How to cut a sequence into slices for a pipeline: TeraPipe's dynamic program, exact.

With a causal mask a token needs only earlier tokens of the layer below, so the stages of a pipeline can work
on slices of one sequence at once. With K stages and slices that take t_1..t_M seconds, where t depends on a
slice's length and on how much precedes it, all stages are done after::

    sum_i t_i + (K - 1) max_i t_i

The least sum below a ceiling c on the slowest slice is a shortest path: with t(k, j) the seconds of k units
after j, S(0) = 0 and ::

    S(i) = min over k <= i with t(k, i - k) <= c  of  S(i - k) + t(k, i - k)

`pyruntime.plan.ceilings` chooses the ceilings to try. Later slices attend to more, so the best slices are
long first and short later.

Lengths are in units of a grid, n of which make the sequence, and a cost table is what `slice_cost.table`
makes: [n, n + 1] seconds of a slice of a + 1 units after b units. inf stands for a slice that cannot be.

Source: TeraPipe, arXiv 2102.07988, equations 4 and 5, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyruntime.plan.ceilings import Solution, best_under_ceilings, total_seconds

Floats = NDArray[np.float64]

SUMS_AT_A_TIME = 2**13
LEAST_AT_A_TIME = 8
"""Ceilings are solved together until a step of the program makes so many sums, for numpy's calls to be worth
their overhead; more would be solved before their bounds are known."""


@dataclass(frozen=True)
class Slicing:
    """A sequence cut into slices, in the order of the tokens.

    lengths: in grid units. seconds: of each slice in one stage. total: seconds until the last stage is done
    with this one sequence, equation 5.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    total: float

    @property
    def busy(self) -> float:
        """Seconds that each stage works."""
        return sum(self.seconds)

    @property
    def slowest(self) -> float:
        """Seconds of the slowest slice."""
        return max(self.seconds)


def best_slicing(table: ArrayLike, stages: int, *, slices: int | None = None, eps: float = 0.0) -> Slicing:
    """The slicing of least total, of all or of those with exactly `slices` slices.

    eps: seconds; the total is within stages * eps of the least, and 0 makes it the least. Of slicings equal
    under a ceiling the one with the shortest last slice is taken, so slices do not become longer where none
    needs to.

    Raises ValueError where the table is malformed or leaves no slicing, or an argument is out of range.
    """
    costs = checked_table(table)
    check_search(stages, eps)
    if slices is not None:
        check_slices(slices, len(costs))
    least = float(least_below(costs, np.array([np.inf]), slices, np.maximum)[0][0])
    if math.isinf(least):
        raise ValueError(
            f"No slicing of {len(costs)} units{'' if slices is None else f' into {slices} slices'} has a "
            "finite cost; the table rules out every one."
        )

    def solve(ceilings: Floats) -> list[Solution[tuple[int, ...]]]:
        busy, lengths = least_below(costs, ceilings, slices)
        return [
            Solution(float(total), slowest_of(costs, cut), cut)
            for total, cut in zip(busy, lengths, strict=True)
        ]

    at_a_time = max(LEAST_AT_A_TIME, SUMS_AT_A_TIME // (len(costs) * (slices or 1)))
    best = best_under_ceilings(ceilings_from(costs, least), solve, stages, eps, at_a_time)
    return scored(costs, best.plan, stages)


def uniform_slicing(table: ArrayLike, stages: int, slices: int) -> Slicing:
    """The slicing into `slices` equal slices, the first ones a unit longer where they do not divide evenly.

    Raises ValueError where the table is malformed or an argument is out of range.
    """
    costs = checked_table(table)
    check_search(stages)
    check_slices(slices, len(costs))
    return scored(costs, _equal_lengths(len(costs), slices), stages)


def best_uniform_slicing(table: ArrayLike, stages: int) -> Slicing:
    """The `uniform_slicing` of least total over the number of slices. Raises ValueError as that does."""
    costs = checked_table(table)
    check_search(stages)
    n = len(costs)
    return min(
        (scored(costs, _equal_lengths(n, slices), stages) for slices in range(1, n + 1)),
        key=lambda slicing: slicing.total,
    )


def score_slicing(table: ArrayLike, lengths: Sequence[int], stages: int) -> Slicing:
    """What a slicing of one's own choice costs; inf where the table rules a slice out.

    Raises ValueError where the table is malformed or the slices do not add up to the sequence.
    """
    costs = checked_table(table)
    check_search(stages)
    if min(lengths, default=0) < 1 or sum(lengths) != len(costs):
        raise ValueError(
            f"Slices of {', '.join(map(str, lengths)) or 'no'} units: they must be at least 1 each and "
            f"add up to the table's {len(costs)}."
        )
    return scored(costs, lengths, stages)


def scored(costs: Floats, lengths: Sequence[int], stages: int) -> Slicing:
    """`score_slicing` of what was checked already."""
    seconds = tuple(_seconds(costs, lengths))
    return Slicing(tuple(map(int, lengths)), seconds, total_seconds(sum(seconds), max(seconds), stages))


def least_below(
    costs: Floats, ceilings: Floats, slices: int | None, combine: np.ufunc = np.add
) -> tuple[Floats, list[tuple[int, ...]]]:
    """Least sums of slice seconds below each of the ceilings [C], and the slices' lengths; no lengths where
    the sum is inf. combine: np.maximum for the least slowest slice instead of the least sum.
    """
    n = len(costs)
    ending = _by_end(costs)
    usable = np.flatnonzero(ending.min(axis=0) <= ceilings.max())
    longest = int(usable[-1]) + 1 if usable.size else 1
    # Rows of `least` are numbers of slices where that number is given; otherwise one row is for any number.
    rows, before, after = (1, slice(0, 1), slice(0, 1))
    if slices is not None:
        rows, before, after = (slices + 1, slice(0, slices), slice(1, slices + 1))
    # Prefix i is at n - i, so that what precedes it is one run, ordered by the length of its last slice.
    least = np.full((len(ceilings), rows, n + 1), np.inf)
    least[:, 0, n] = 0.0
    last = np.zeros(least.shape, dtype=np.int64)
    every = np.arange(len(ceilings) * (slices or 1))
    for i in range(1, n + 1):
        window = min(i, longest)
        cost = ending[i - 1, :window]
        allowed = np.where(cost <= ceilings[:, None], cost, np.inf)
        sums = combine(least[:, before, n - i + 1 : n - i + 1 + window], allowed[:, None])
        flat = sums.reshape(-1, window)
        # The first of equals: the shortest last slice. See `best_slicing`.
        choice = flat.argmin(axis=1)
        least[:, after, n - i] = flat[every, choice].reshape(len(ceilings), -1)
        last[:, after, n - i] = choice.reshape(len(ceilings), -1) + 1
    sums = least[:, -1, 0]
    lengths = [
        _walk_back(back, slices) if math.isfinite(total) else ()
        for back, total in zip(last, sums, strict=True)
    ]
    return sums, lengths


def ceilings_from(costs: Floats, least: float) -> Floats:
    """The times that a plan's slowest slice can take, of which `least` is the least: sorted, distinct."""
    return np.unique(costs[(costs >= least) & np.isfinite(costs)])


def slowest_of(costs: Floats, lengths: Sequence[int]) -> float:
    """Seconds of the slowest slice."""
    return max(_seconds(costs, lengths))


def checked_table(table: ArrayLike, name: str = "table") -> Floats:
    """`table` as float64 [n, n + 1], inf where a slice exceeds the sequence.

    Raises ValueError for another shape, and for nan or negative seconds.
    """
    costs = np.asarray(table, dtype=np.float64)
    if costs.ndim != 2 or len(costs) < 1 or costs.shape[1] != len(costs) + 1:
        raise ValueError(
            f"{name} must be [n, n + 1] seconds, of a slice of a + 1 units after b units, found shape "
            f"{costs.shape}."
        )
    n = len(costs)
    inside = np.arange(1, n + 1)[:, None] + np.arange(n + 1) <= n
    wrong = np.argwhere(inside & ~(costs >= 0))
    if wrong.size:
        a, b = wrong[0]
        raise ValueError(f"{name} must not have nan or negative seconds, found {costs[a, b]} at [{a}, {b}].")
    return np.where(inside, costs, np.inf)


def check_search(stages: int, eps: float = 0.0) -> None:
    """Raises ValueError unless these are a number of stages and a tolerance in seconds."""
    if stages < 1:
        raise ValueError(f"stages must be at least 1, found {stages}.")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be a finite number of seconds, at least 0, found {eps}.")


def check_slices(slices: int, units: int) -> None:
    """Raises ValueError unless so many units can be cut into so many slices."""
    if not 1 <= slices <= units:
        raise ValueError(f"slices={slices}: a sequence of {units} units has 1 to {units} slices.")


def _by_end(costs: Floats) -> Floats:
    """[n, n]: seconds of the slice of k + 1 units that ends behind unit i; inf for k > i."""
    n = len(costs)
    i, k = np.arange(n)[:, None], np.arange(n)[None]
    return np.where(k <= i, costs[k, np.maximum(i - k, 0)], np.inf)


def _equal_lengths(units: int, slices: int) -> list[int]:
    length, longer = divmod(units, slices)
    return [length + 1] * longer + [length] * (slices - longer)


def _seconds(costs: Floats, lengths: Sequence[int]) -> list[float]:
    seconds, context = [], 0
    for length in lengths:
        seconds.append(float(costs[length - 1, context]))
        context += length
    return seconds


def _walk_back(last: NDArray[np.int64], slices: int | None) -> tuple[int, ...]:
    """The lengths that the back-pointers [rows, n + 1] tell, from the last slice to the first, reversed."""
    lengths: list[int] = []
    row, at, end = len(last) - 1, 0, last.shape[1] - 1
    while at < end:
        lengths.append(int(last[row, at]))
        at += lengths[-1]
        row -= slices is not None
    return tuple(reversed(lengths))
