"""Sizes that schedules are tested at."""

import itertools

from pyruntime.choices import SLICED_KINDS


def sizes(kind, most_ranks=5, most_micro_batches=9):
    """Ranks, micro-batches, virtual stages and slices that `kind` has schedules for."""
    virtual = (1, 2) if kind == "interleaved" else (1,)
    slices = (1, 2, 3) if kind in SLICED_KINDS else (1,)
    for p, m, v, q in itertools.product(
        range(1, most_ranks + 1), range(1, most_micro_batches + 1), virtual, slices
    ):
        if kind != "interleaved" or m % p == 0:
            yield p, m, v, q
