"""Estimates how many rows of a token embedding a step touches. Between CPU ranks only those rows' gradients
travel (`pyruntime.data_parallel.touched`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

SHIFT = 2.7
"""Shift of Zipf's law for tokens: token r, from 0, has a probability proportional to 1 / (r + 1 + SHIFT). An
assumption."""
MOST_TOUCHED = 0.5
"""Share of the rows above which all rows travel."""


@lru_cache(maxsize=256)
def travelling_share(vocab: int, ranks: int, tokens: int) -> float:
    """Returns the mean share of rows whose gradients travel after `tokens` random tokens, in the first of
    `ranks` equal parts of a vocabulary. Frequent tokens have small numbers, so the other parts have fewer
    such rows."""
    chances = 1 / (np.arange(vocab) + 1 + SHIFT)
    rows = -(-vocab // ranks)
    own = chances[:rows] / chances.sum()
    touched = float((1 - (1 - own) ** tokens).mean())
    return 1.0 if touched > MOST_TOUCHED else touched
