"""Which parameter each layer is compressed by: as few bytes as a total error allows (Markov et al. 2022,
"L-GreCo", arXiv 2210.17357).

    minimise   sum over layers l of size(l, c_l)     subject to   sum of error(l, c_l) <= E

over one choice c_l each, with E the error of the choice that would be the same for all: a knapsack with
classes, solved by a dynamic program over errors in `levels` steps of E / levels.

Rounded down, the program allows whatever E allows, and more: where the errors of its answer add up to no more
than E, nothing is smaller. Otherwise it is solved with errors rounded up, which allows nothing that E does
not; but that may exclude the uniform choice itself, which is then what is returned. So what is returned is
never larger than the uniform choice, and its error never above E.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyruntime.comm.core import _C

LEVELS = 10_000
"""Of the paper."""


def allocate(
    sizes: Sequence[Sequence[float]],
    errors: Sequence[Sequence[float]],
    uniform: Sequence[int],
    levels: int = LEVELS,
) -> list[int]:
    """The choice of each layer.

    Args:
        sizes: of each layer the size of each of its choices, such as bytes.
        errors: of each layer the error of each choice, not negative, such as a squared norm.
        uniform: of each layer the choice whose errors add up to E.
        levels: time and memory are in proportion to it: 8 bytes for each of them and each layer.

    Raises ValueError where an error is negative or not finite.
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
        break  # rounded down it is the best there is
    return best


def _total(of: Sequence[Sequence[float]], choices: Sequence[int]) -> float:
    return math.fsum(row[choice] for row, choice in zip(of, choices, strict=True))


def _steps(error: float, budget: float, levels: int, rounded) -> int:
    """More than `levels`, and no more of it, where one layer alone goes beyond the budget."""
    return min(rounded(min(error / budget, 2.0) * levels), levels + 1)
