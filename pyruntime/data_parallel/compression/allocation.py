"""Chooses how each layer is compressed, in as few bytes as a total error allows (Markov et al. 2022,
"L-GreCo", arXiv 2210.17357).

    minimise   sum over layers l of size(l, c_l)     subject to   sum of error(l, c_l) <= E

There is one choice c_l for each layer, and E is the error of one choice for all layers. This knapsack with
classes is solved by a dynamic program over errors, in `levels` steps of E / levels.

With errors rounded down, the program allows whatever E allows, and more. If the true errors of its answer add
up to at most E, no answer is smaller. Otherwise it is solved with errors rounded up, which allows nothing
that E does not. That may exclude the uniform choice itself, which is then returned. So the answer is never
larger than the uniform choice, and its error never exceeds E.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyruntime.comm.core import _C

LEVELS = 10_000
"""The paper's number."""


def allocate(
    sizes: Sequence[Sequence[float]],
    errors: Sequence[Sequence[float]],
    uniform: Sequence[int],
    levels: int = LEVELS,
) -> list[int]:
    """Returns the choice of each layer.

    Args:
        sizes: for each layer the size of each of its choices, such as bytes.
        errors: for each layer the error of each choice, not negative, such as a squared norm.
        uniform: for each layer the choice whose errors add up to E.
        levels: time and memory are proportional to it: 8 bytes for each level and layer.

    Raises ValueError if an error is negative or not finite.
    """
    for layer, row in enumerate(errors):
        if not all(0 <= error < math.inf for error in row):
            raise ValueError(f"errors[{layer}]={list(row)}; an error is finite and not negative.")
    budget = _total(errors, uniform)
    if budget == 0:
        return [
            min((c for c, error in enumerate(row) if error == 0), key=lambda c: (size[c], c))
            for size, row in zip(sizes, errors, strict=True)
        ]
    best = list(uniform)
    for rounded in (math.floor, math.ceil):
        steps = [[_steps(error, budget, levels, rounded) for error in row] for row in errors]
        found = _C.least_choices(sizes, steps, levels)
        if not found or _total(errors, found) > budget:
            continue
        if _total(sizes, found) < _total(sizes, best):
            best = found
        break  # rounded down, no answer is smaller
    return best


def _total(of: Sequence[Sequence[float]], choices: Sequence[int]) -> float:
    return math.fsum(row[choice] for row, choice in zip(of, choices, strict=True))


def _steps(error: float, budget: float, levels: int, rounded) -> int:
    """Returns the error in steps; levels + 1 if one layer by itself exceeds the budget."""
    return min(rounded(min(error / budget, 2.0) * levels), levels + 1)
