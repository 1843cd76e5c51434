"""The search over ceilings misses no plan, and solves few of them."""

from __future__ import annotations

import numpy as np
import pytest

from pyruntime.plan.ceilings import Solution, best_under_ceilings


class Plans:
    """Plans of given sums and slowest slices, solved for by looking at all."""

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        slowest = rng.uniform(1, 10, count)
        # A lower ceiling costs, as it does for slices; and a sum is at least what its slowest slice takes.
        busy = 100 / slowest * rng.uniform(1, 1.3, count)
        if seed % 2:
            slowest, busy = np.ceil(slowest * 4), np.ceil(busy)
        self.slowest, self.busy = slowest, np.maximum(busy, slowest)
        self.ceilings = np.unique(slowest)
        self.solved = 0

    def solve(self, ceilings):
        self.solved += len(ceilings)
        found = [int(np.where(self.slowest <= c, self.busy, np.inf).argmin()) for c in ceilings]
        return [Solution(float(self.busy[at]), float(self.slowest[at]), at) for at in found]

    def best_total(self, stages):
        return (self.busy + (stages - 1) * self.slowest).min()


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_better(at_a_time, seed):
    for count in (1, 2, 5, 30, 200):
        plans = Plans(count, seed)
        for stages in (1, 2, 3, 8, 48):
            found = best_under_ceilings(plans.ceilings, plans.solve, stages, 0.0, at_a_time)
            assert found.total(stages) == pytest.approx(plans.best_total(stages), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_eps_costs_at_most_stages_times_eps_and_saves_work(seed):
    plans = Plans(2000, seed)
    work = []
    for eps in (0.0, 0.1, 1.0, 100.0):
        plans.solved = 0
        found = best_under_ceilings(plans.ceilings, plans.solve, 8, eps, 4)
        assert found.total(8) <= plans.best_total(8) + 8 * eps
        work.append(plans.solved)
    assert work == sorted(work, reverse=True)
    assert work[-1] < work[0]


@pytest.mark.parametrize("stages", [1, 2, 8, 48])
def test_few_of_many_ceilings_are_solved(stages):
    plans = Plans(20_000, 0)
    best_under_ceilings(plans.ceilings, plans.solve, stages, 0.0, 8)
    assert plans.solved < 200


def test_eps_skips_no_plan_that_is_better_by_more():
    plans = Plans(2, 0)
    plans.slowest, plans.busy = np.array([5.0, 10.0]), np.array([101.0, 100.0])
    # 136 and 170 seconds over 8 stages, so 8 times 4.2 does not excuse the second.
    assert best_under_ceilings(plans.slowest, plans.solve, 8, 4.2, 1).plan == 0
    assert best_under_ceilings(plans.slowest, plans.solve, 8, 4.4, 1).plan == 1
