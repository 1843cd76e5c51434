"""Cost tables, and slicings by trying every one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np


def toy(units: int, per_token: float, per_slice: float) -> np.ndarray:
    """A token costs its place in the sequence and `per_token`, a slice `per_slice` more."""
    table = np.full((units, units + 1), np.inf)
    for length in range(1, units + 1):
        for context in range(units - length + 1):
            places = sum(range(context + 1, context + length + 1))
            table[length - 1, context] = places + per_token * length + per_slice
    return table


def random(units: int, seed: int) -> np.ndarray:
    """Positive seconds in no order whatever; of every third seed few distinct ones, so many are equal."""
    rng = np.random.default_rng(seed)
    table = rng.uniform(0.1, 1.0, (units, units + 1))
    if seed % 3 == 1:
        # Longer slices take longer, or the best is nearly always one slice.
        table *= np.arange(1, units + 1)[:, None]
    return np.ceil(table * 4) if seed % 3 == 2 else table


def slicings(units: int) -> Iterator[tuple[int, ...]]:
    """All 2^(units - 1) of them."""
    for cuts in range(units):
        for places in combinations(range(1, units), cuts):
            ends = (0, *places, units)
            yield tuple(end - begin for begin, end in pairwise(ends))


def slice_seconds(table: np.ndarray, lengths: tuple[int, ...]) -> list[float]:
    ends = np.cumsum((0, *lengths))
    return [float(table[length - 1, begin]) for length, begin in zip(lengths, ends, strict=False)]


def total(seconds: list[float], stages: int) -> float:
    return sum(seconds) + (stages - 1) * max(seconds)
