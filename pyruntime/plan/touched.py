"""Which rows of a token embedding a step touches: those alone have a gradient that travels between CPU ranks
(`pyruntime.data_parallel.touched`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

SHIFT = 2.7
"""Of Zipf's law as tokens follow it: that of number r, from 0, has a probability in proportion to
1 / (r + 1 + SHIFT). An assumption."""
MOST_TOUCHED = 0.5
"""Share of the rows; where more are touched all travel."""


@lru_cache(maxsize=256)
def travelling_share(vocab: int, ranks: int, tokens: int) -> float:
    """Of the rows of the first of `ranks` equal parts of a vocabulary, the share whose gradients travel when
    `tokens` tokens were drawn, on average. Frequent tokens have small numbers, so other parts have fewer."""
    chances = 1 / (np.arange(vocab) + 1 + SHIFT)
    rows = -(-vocab // ranks)
    own = chances[:rows] / chances.sum()
    touched = float((1 - (1 - own) ** tokens).mean())
    return 1.0 if touched > MOST_TOUCHED else touched
