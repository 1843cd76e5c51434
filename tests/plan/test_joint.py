"""The joint plan of batch and tokens is the best there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pyruntime.plan import best_joint, best_slicing
from tests.plan.cases import random, slice_seconds, slicings, total, toy

STAGES = (1, 2, 5, 24)


def batch_slicings(batch, most):
    """Every way to write `batch` as a sum of sizes up to `most`, the largest first."""
    if batch == 0:
        yield ()
    for size in range(min(batch, most), 0, -1):
        for rest in batch_slicings(batch - size, size):
            yield (size, *rest)


def by_trying_all(tables, batch, stages):
    units = len(tables[0])
    every = [[slice_seconds(costs, cut) for cut in slicings(units)] for costs in tables]
    return min(
        total([t for seconds in choice for t in seconds], stages)
        for sizes in batch_slicings(batch, len(tables))
        for choice in product(*(every[b - 1] for b in sizes))
    )


@pytest.mark.parametrize(("units", "batch", "sizes"), [(4, 3, 3), (4, 4, 2), (5, 3, 2), (3, 4, 4), (6, 2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_no_joint_plan_is_better(units, batch, sizes, seed):
    # More sequences in a slice take longer, and less than so many times longer.
    tables = [random(units, seed + 3 * b) * (b + 1.5) for b in range(sizes)]
    for stages in STAGES:
        found = best_joint(tables, batch, stages)
        assert found.total == pytest.approx(by_trying_all(tables, batch, stages), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_plans_figures_are_those_of_its_slices(seed):
    tables = [random(12, seed + 3 * b) * (b + 1.5) for b in range(3)]
    found = best_joint(tables, 7, 6)
    assert sum(b for b, _ in found.parts) == 7
    seconds = []
    for b, slicing in found.parts:
        assert sum(slicing.lengths) == 12
        assert list(slicing.seconds) == slice_seconds(tables[b - 1], slicing.lengths)
        seconds += slicing.seconds
    assert found.total == pytest.approx(total(seconds, 6), rel=1e-12)
    assert (found.busy, found.slowest) == (pytest.approx(sum(seconds)), max(seconds))


def test_one_sequence_is_sliced_as_by_itself():
    costs = random(20, 1)
    found = best_joint([costs], 1, 6)
    assert found.parts == ((1, best_slicing(costs, 6)),)
    assert found.total == pytest.approx(best_slicing(costs, 6).total, rel=1e-12)


def test_the_fill_counts_once_for_the_batch():
    costs = toy(12, 2, 5)
    alone = best_slicing(costs, 8)
    found = best_joint([costs], 4, 8)
    assert found.total <= 4 * alone.busy + 7 * alone.slowest < 4 * alone.total
    assert found.total < sum(slicing.total for _, slicing in found.parts)


def test_a_batch_is_cut_by_sequences_where_a_slice_is_dear_and_by_tokens_where_it_is_cheap():
    def tables(per_slice):
        i, j = np.arange(1, 17)[:, None], np.arange(17)[None]
        return [per_slice + b * (8.0 * i + i * j / 4) for b in range(1, 5)]

    dear = best_joint(tables(1000.0), 4, 2)
    assert [len(slicing.lengths) for _, slicing in dear.parts] == [1] * len(dear.parts)
    cheap = best_joint(tables(1.0), 4, 32)
    assert max(len(slicing.lengths) for _, slicing in cheap.parts) > 4


def test_batch_slices_that_the_tables_rule_out_are_not_used():
    tables = [toy(6, 0, 9), np.full((6, 7), np.inf), toy(6, 2, 9)]
    found = best_joint(tables, 5, 3)
    assert 2 not in [b for b, _ in found.parts]
    assert [b for b, _ in found.parts] == sorted((b for b, _ in found.parts), reverse=True)


def test_eps_costs_at_most_stages_times_eps():
    tables = [random(24, 1 + 3 * b) * (b + 1.5) for b in range(3)]
    best = best_joint(tables, 6, 16).total
    for eps in (0.01, 0.1, 10.0):
        assert best * (1 - 1e-12) <= best_joint(tables, 6, 16, eps=eps).total <= best + 16 * eps


@pytest.mark.parametrize(
    ("tables", "batch", "sentence"),
    [
        ([np.ones((3, 4))], 0, "batch must be at least 1 sequence, found 0"),
        ([], 2, "tables must be at least one and of one shape, found none"),
        ([np.ones((3, 4)), np.ones((2, 3))], 2, r"of one shape, found \[\(2, 3\), \(3, 4\)\]"),
        ([np.ones((3, 4)), -np.ones((3, 4))], 2, r"tables\[1\] must not have nan or negative seconds"),
        (
            [np.full((3, 4), np.inf), np.ones((3, 4))],
            3,
            "No plan for a batch of 3 sequences has a finite cost",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(tables, batch, sentence):
    with pytest.raises(ValueError, match=sentence):
        best_joint(tables, batch, 2)
