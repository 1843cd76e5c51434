"""The slicing found is the best there is, and has the shape the paper says it has."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pyruntime.plan.slice_cost import SliceCost, table
from pyruntime.plan.terapipe import best_slicing, best_uniform_slicing, uniform_slicing
from tests.plan.cases import random, slice_seconds, slicings, total, toy

STAGES = (1, 2, 3, 8, 48)


def consistent(slicing, costs, stages):
    """The slicing's own figures are those of its lengths."""
    assert sum(slicing.lengths) == len(costs)
    assert list(slicing.seconds) == slice_seconds(costs, slicing.lengths)
    assert slicing.total == pytest.approx(total(list(slicing.seconds), stages), rel=1e-12)
    return slicing


def test_three_equal_slices_of_the_toy_cost():
    assert uniform_slicing(toy(12, 0, 0), 3, 3).lengths == (4, 4, 4)
    assert uniform_slicing(toy(12, 0, 0), 3, 3).total == 162


@pytest.mark.parametrize(("per_token", "per_slice", "expected"), [(0, 0, 102), (2, 0, 130), (2, 5, 185)])
def test_the_best_of_any_number_of_slices_of_the_toy_cost(per_token, per_slice, expected):
    costs = toy(12, per_token, per_slice)
    assert consistent(best_slicing(costs, 3), costs, 3).total == expected


def test_a_slice_that_costs_by_itself_is_worth_fewer_slices():
    found = best_slicing(toy(12, 2, 5), 3)
    assert found.lengths == (3, 2, *[1] * 7)
    assert found.seconds == (17, 18, *range(13, 20))


@pytest.mark.parametrize(("units", "seeds"), [(1, 1), (2, 3), (7, 12), (11, 6), (12, 6), (14, 3)])
@pytest.mark.second_tier("12-6", "14-3")
def test_no_slicing_is_better(units, seeds):
    for seed in range(seeds):
        costs = random(units, seed)
        every = [slice_seconds(costs, lengths) for lengths in slicings(units)]
        for stages in STAGES:
            best = min(total(seconds, stages) for seconds in every)
            found = consistent(best_slicing(costs, stages), costs, stages)
            assert found.total == pytest.approx(best, rel=1e-12), (seed, stages)


def every_ceiling(costs, stages):
    """The paper's algorithm as it is written, every slice time a ceiling."""
    n = len(costs)
    best = np.inf
    for ceiling in np.unique(costs[np.isfinite(costs)]):
        least = [0.0]
        for i in range(1, n + 1):
            times = [costs[k - 1, i - k] for k in range(1, i + 1)]
            least.append(min(least[i - k] + t if t <= ceiling else np.inf for k, t in enumerate(times, 1)))
        best = min(best, least[n] + (stages - 1) * ceiling)
    return best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.second_tier("0", "2")
def test_no_ceiling_is_missed_where_slicings_cannot_be_counted(seed):
    noise = np.random.default_rng(seed).uniform(0.8, 1.2, (24, 25))
    costs = np.where(np.isfinite(toy(24, 3, 20)), toy(24, 3, 20) * noise, np.inf)
    for stages in (2, 7, 40):
        assert best_slicing(costs, stages).total == pytest.approx(every_ceiling(costs, stages), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_best_is_no_worse_than_the_best_of_equal_slices(seed):
    for costs in (random(30, seed), toy(30, seed, 5)):
        for stages in STAGES:
            uniform = best_uniform_slicing(costs, stages)
            assert best_slicing(costs, stages).total <= uniform.total * (1 + 1e-12)
            of_each = [uniform_slicing(costs, stages, slices).total for slices in range(1, 31)]
            assert uniform.total == min(of_each)


@pytest.mark.parametrize("seed", range(8))
def test_later_slices_are_not_longer_where_context_costs(seed):
    rng = np.random.default_rng(seed)
    per_slice, per_token, per_pair = (int(n) for n in rng.integers((0, 0, 1), (300, 50, 8)))
    i, j = np.arange(1, 49)[:, None], np.arange(49)[None]
    costs = (per_slice + per_token * i + per_pair * i * j).astype(float)
    for stages in STAGES:
        lengths = best_slicing(costs, stages).lengths
        assert list(lengths) == sorted(lengths, reverse=True)


def test_equal_slices_give_what_is_left_over_to_the_first():
    assert uniform_slicing(toy(14, 0, 0), 2, 4).lengths == (4, 4, 3, 3)


def test_what_the_table_rules_out_is_not_used():
    costs = toy(12, 0, 0)
    costs[3:] = np.inf
    assert max(best_slicing(costs, 1).lengths) <= 3
    for stages in (1, 2):
        assert uniform_slicing(costs, stages, 2).total == np.inf
    costs[:, 5] = np.inf
    assert 5 not in np.cumsum(best_slicing(costs, 1).lengths)


def test_entries_past_the_end_of_the_sequence_do_not_matter():
    costs = toy(8, 0, 3)
    assert best_slicing(np.where(np.isfinite(costs), costs, np.nan), 4) == best_slicing(costs, 4)


def test_2048_tokens_in_steps_of_8_over_48_stages_take_seconds():
    lengths = tuple(range(8, 2049, 8))
    tiles = tuple(2e-4 + 1e-4 * -(-n // 128) for n in lengths)
    costs = table(SliceCost(lengths, tiles, 1e-5, 1e-8, 1e-8, 2e-9), 2048, 8)
    noise = np.random.default_rng(0).uniform(0.95, 1.05, costs.shape)
    begin = time.perf_counter()
    found = best_slicing(costs * noise, 48)
    assert time.perf_counter() - begin < 10
    assert found.total < 0.95 * best_uniform_slicing(costs * noise, 48).total


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"table": np.ones((3, 3))}, r"table must be \[n, n \+ 1\]: seconds.*found shape \(3, 3\)"),
        ({"table": np.full((2, 3), np.nan)}, r"nan or negative seconds, found nan at \[0, 0\]"),
        ({"table": -np.ones((2, 3))}, r"found -1.0 at \[0, 0\]"),
        ({"stages": 0}, "stages must be at least 1, found 0"),
        ({"table": np.full((4, 5), np.inf)}, "No slicing of 4 units has a finite"),
    ],
)
def test_what_cannot_be_sliced_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        best_slicing(**({"table": np.ones((4, 5)), "stages": 2} | arguments))


@pytest.mark.parametrize("slices", [0, 5])
def test_more_slices_than_units_are_refused(slices):
    with pytest.raises(ValueError, match=f"slices={slices}: a sequence of 4 units has 1 to 4 slices"):
        uniform_slicing(np.ones((4, 5)), 2, slices)
