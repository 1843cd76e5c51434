"""How to cut a batch into batch slices and each of those into token slices: TeraPipe's joint plan.

A batch of B sequences is cut into batch slices of b_1 + ... + b_D = B sequences, and each is sliced by tokens
on its own. They all go through the pipeline one behind the other, so with K stages the whole takes::

    sum over batch slices and their slices of t  +  (K - 1) max over all slices of t

The fill term counts once, not once per batch slice; so the batch is cut inside each ceiling on the slowest
slice. With F_b the least sum of a batch slice of b sequences below it, G(0) = 0 and ::

    G(n) = min over b <= n  of  G(n - b) + F_b

Source: TeraPipe, arXiv 2102.07988, equation 5, algorithm 1 and the section on batch slicing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pyruntime.plan.ceilings import Solution, best_under_ceilings
from pyruntime.plan.terapipe import (
    LEAST_AT_A_TIME,
    SUMS_AT_A_TIME,
    Floats,
    Slicing,
    ceilings_from,
    check_search,
    checked_table,
    least_below,
    scored,
    slowest_of,
)

Parts = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Joint:
    """A batch cut into batch slices, the largest first.

    parts: of each batch slice its number of sequences and its slicing. total: seconds until the last stage is
    done with the whole batch. It is not the sum of the slicings' own totals, which each count the fill term.
    """

    parts: tuple[tuple[int, Slicing], ...]
    total: float

    @property
    def busy(self) -> float:
        """Seconds that each stage works."""
        return sum(slicing.busy for _, slicing in self.parts)

    @property
    def slowest(self) -> float:
        """Seconds of the slowest slice."""
        return max(slicing.slowest for _, slicing in self.parts)


def best_joint(tables: Sequence[ArrayLike], batch: int, stages: int, *, eps: float = 0.0) -> Joint:
    """The plan of least total for a batch of `batch` sequences.

    tables: by the number b of sequences in a batch slice, from 1, the cost table of its slices (see
    `pyruntime.plan.terapipe`), all of one shape. A batch slice has at most as many sequences as there are
    tables.
    eps: seconds; the total is within stages * eps of the least, and 0 makes it the least.

    Raises ValueError where tables are malformed or leave no plan, or an argument is out of range.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1 sequence, found {batch}.")
    check_search(stages, eps)
    costs = [checked_table(table, f"tables[{b}]") for b, table in enumerate(tables)][:batch]
    shapes = sorted({table.shape for table in costs})
    if len(shapes) != 1:
        raise ValueError(f"tables must be at least one and of one shape, found {shapes or 'none'}.")
    least = float(_least_batches(costs, np.array([np.inf]), batch, np.maximum)[0][0])
    if math.isinf(least):
        raise ValueError(
            f"No plan for a batch of {batch} sequences has a finite cost; the tables rule out every one."
        )

    def solve(ceilings: Floats) -> list[Solution[Parts]]:
        busy, plans = _least_batches(costs, ceilings, batch)
        return [
            Solution(float(total), max(slowest_of(costs[b - 1], cut) for b, cut in parts), parts)
            for total, parts in zip(busy, plans, strict=True)
        ]

    ceilings = np.unique(np.concatenate([ceilings_from(table, least) for table in costs]))
    at_a_time = max(LEAST_AT_A_TIME, SUMS_AT_A_TIME // len(costs[0]))
    best = best_under_ceilings(ceilings, solve, stages, eps, at_a_time)
    parts = tuple((b, scored(costs[b - 1], cut, stages)) for b, cut in best.plan)
    return Joint(parts, best.total(stages))


def _least_batches(
    costs: list[Floats], ceilings: Floats, batch: int, combine: np.ufunc = np.add
) -> tuple[Floats, list[Parts]]:
    """Least sums for the batch below each of the ceilings [C], and the plans; see `least_below`."""
    below = [least_below(table, ceilings, None, combine) for table in costs]
    of_slice = np.stack([sums for sums, _ in below], axis=1)
    least = np.full((len(ceilings), batch + 1), np.inf)
    least[:, 0] = 0.0
    last = np.zeros(least.shape, dtype=np.int64)
    every = np.arange(len(ceilings))
    for n in range(1, batch + 1):
        sizes = min(n, len(costs))
        sums = combine(least[:, n - sizes : n][:, ::-1], of_slice[:, :sizes])
        choice = sums.argmin(axis=1)
        least[:, n], last[:, n] = sums[every, choice], choice + 1
    plans: list[Parts] = []
    for at in range(len(ceilings)):
        sizes_used: list[int] = []
        while math.isfinite(least[at, batch]) and sum(sizes_used) < batch:
            sizes_used.append(int(last[at, batch - sum(sizes_used)]))
        plans.append(tuple((b, below[b - 1][1][at]) for b in sorted(sizes_used, reverse=True)))
    return least[:, batch], plans
