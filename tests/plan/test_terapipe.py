"""The slicing found is the best there is, and has the shape the paper says it has."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pyruntime.plan import (
    SliceCost,
    best_slicing,
    best_uniform_slicing,
    score_slicing,
    table,
    uniform_slicing,
)
from tests.plan.cases import random, slice_seconds, slicings, total, toy

STAGES = (1, 2, 3, 8, 48)


def consistent(slicing, costs, stages):
    """The slicing's own figures are those of its lengths."""
    assert sum(slicing.lengths) == len(costs)
    assert list(slicing.seconds) == slice_seconds(costs, slicing.lengths)
    assert slicing.total == pytest.approx(total(list(slicing.seconds), stages), rel=1e-12)
    return slicing


def test_the_best_three_slices_of_the_toy_cost():
    found = best_slicing(toy(12, 0, 0), 3, slices=3)
    assert (found.lengths, found.seconds, found.total) == ((7, 3, 2), (28, 27, 23), 134)
    assert (found.busy, found.slowest) == (78, 28)


def test_the_best_three_slices_where_tokens_cost_by_themselves():
    costs = toy(12, 2, 0)
    known = score_slicing(costs, (5, 4, 3), 3)
    assert (known.seconds, known.total) == ((25, 38, 39), 180)
    # 6 + 3 + 3 costs the same.
    assert consistent(best_slicing(costs, 3, slices=3), costs, 3).total == 180


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
def test_no_slicing_is_better(units, seeds):
    for seed in range(seeds):
        costs = random(units, seed)
        every = [slice_seconds(costs, lengths) for lengths in slicings(units)]
        for stages in STAGES:
            best = min(total(seconds, stages) for seconds in every)
            found = consistent(best_slicing(costs, stages), costs, stages)
            assert found.total == pytest.approx(best, rel=1e-12), (seed, stages)


@pytest.mark.parametrize("seed", range(6))
def test_no_slicing_of_as_many_slices_is_better(seed):
    costs = random(9, seed)
    every = list(slicings(9))
    for slices in range(1, 10):
        for stages in STAGES:
            best = min(total(slice_seconds(costs, cut), stages) for cut in every if len(cut) == slices)
            found = consistent(best_slicing(costs, stages, slices=slices), costs, stages)
            assert len(found.lengths) == slices
            assert found.total == pytest.approx(best, rel=1e-12), (slices, stages)


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
def test_no_ceiling_is_missed_where_slicings_cannot_be_counted(seed):
    noise = np.random.default_rng(seed).uniform(0.8, 1.2, (24, 25))
    costs = np.where(np.isfinite(toy(24, 3, 20)), toy(24, 3, 20) * noise, np.inf)
    for stages in (2, 7, 40):
        assert best_slicing(costs, stages).total == pytest.approx(every_ceiling(costs, stages), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_eps_costs_at_most_stages_times_eps(seed):
    noise = np.random.default_rng(seed).uniform(0.8, 1.2, (40, 41))
    costs = np.where(np.isfinite(toy(40, 3, 20)), toy(40, 3, 20) * noise, np.inf)
    best = best_slicing(costs, 16).total
    for eps in (0.1, 3.0, 100.0):
        found = best_slicing(costs, 16, eps=eps).total
        assert best * (1 - 1e-12) <= found <= best + 16 * eps


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
        for slices in (None, 5):
            lengths = best_slicing(costs, stages, slices=slices).lengths
            assert list(lengths) == sorted(lengths, reverse=True)
            if slices:
                assert len(set(lengths)) > 1


def test_equal_slices_give_what_is_left_over_to_the_first():
    assert uniform_slicing(toy(14, 0, 0), 2, 4).lengths == (4, 4, 3, 3)


def test_a_slicing_of_ones_own_is_scored():
    costs = random(10, 0)
    consistent(score_slicing(costs, (1, 5, 4), 6), costs, 6)


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


@pytest.mark.parametrize("slices", [None, 24])
def test_2048_tokens_in_steps_of_8_over_48_stages_take_seconds(slices):
    lengths = tuple(range(8, 2049, 8))
    tiles = tuple(2e-4 + 1e-4 * -(-n // 128) for n in lengths)
    costs = table(SliceCost(lengths, tiles, 1e-5, 1e-8, 1e-8, 2e-9), 2048, 8)
    noise = np.random.default_rng(0).uniform(0.95, 1.05, costs.shape)
    begin = time.perf_counter()
    found = best_slicing(costs * noise, 48, slices=slices)
    assert time.perf_counter() - begin < 10
    if slices is None:
        assert found.total < 0.95 * best_uniform_slicing(costs * noise, 48).total


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"table": np.ones((3, 3))}, r"table must be \[n, n \+ 1\] seconds.*found shape \(3, 3\)"),
        ({"table": np.full((2, 3), np.nan)}, r"nan or negative seconds, found nan at \[0, 0\]"),
        ({"table": -np.ones((2, 3))}, r"found -1.0 at \[0, 0\]"),
        ({"stages": 0}, "stages must be at least 1, found 0"),
        ({"eps": -1.0}, "eps must be a finite number of seconds, at least 0, found -1.0"),
        ({"slices": 5}, "slices=5: a sequence of 4 units has 1 to 4 slices"),
        ({"slices": 0}, "slices=0"),
        ({"table": np.full((4, 5), np.inf), "slices": 2}, "No slicing of 4 units into 2 slices has a finite"),
    ],
)
def test_what_cannot_be_sliced_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        best_slicing(**({"table": np.ones((4, 5)), "stages": 2} | arguments))


def test_slices_that_are_not_the_sequence_are_refused():
    with pytest.raises(ValueError, match=r"Slices of 2, 1 units: .* add up to the table's 4"):
        score_slicing(np.ones((4, 5)), (2, 1), 2)
    with pytest.raises(ValueError, match="Slices of 5, -1 units"):
        score_slicing(np.ones((4, 5)), (5, -1), 2)
