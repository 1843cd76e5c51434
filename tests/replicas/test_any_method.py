"""Methods of one's own: any settings that fit together do what the docstring of `OuterOptimizer` says, and
those that make one method another do."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from pyruntime import replicas
from pyruntime.replicas import Method
from tests.replicas import cases


def drawn(seed: int) -> Method:
    draw = random.Random(seed)
    while True:
        try:
            return Method(
                "own",
                tau=draw.randint(1, 6),
                delay=draw.choice([None, 0, draw.randint(1, 5)]),
                lr=draw.choice([1.0, 0.7, 0.3]),
                momentum=draw.choice([0.0, 0.4, 0.9]),
                nesterov=draw.random() < 0.4,
                pull=draw.choice([1.0, 0.6, 0.3]),
                penalty=draw.choice([None, replicas.gap_penalty]),
                clip=draw.choice([math.inf, 0.05]),
                fragments=draw.choice([1, 2]),
            )
        except ValueError:  # they do not fit together
            continue


class ByHand:
    """One fragment of all replicas, `own` of the elements; step by step, by the docstring."""

    def __init__(self, replicas: cases.Replicas, method: Method, own: np.ndarray, before_first: int):
        self.replicas, self.method, self.own = replicas, method, own
        self.z = replicas.x[0][own].copy()
        self.m = np.zeros_like(self.z)
        self.at, self.steps = before_first, 0
        """Within tau steps, and since the last meeting."""
        self.left: tuple[np.ndarray, float] | None = None
        """The mean displacement that is on its way, and the reach of its round."""
        self.came_from, self.since = self.z, 0

    @property
    def x(self) -> np.ndarray:
        return self.replicas.x[:, self.own]

    def step(self) -> None:
        method = self.method
        self.at, self.steps, self.since = self.at + 1, self.steps + 1, self.since + 1
        if self.steps == 1:
            self.first = math.sqrt(np.square(self.z - self.x).sum(1).mean())
        if self.left is not None and method.delay and self.since == method.delay:
            self.outer_step(*self.left)
            self.pull()
            self.left = None
        if self.at % method.tau == 0:
            self.meet()
            self.steps = 0

    def meet(self) -> None:
        begun, before, x = self.z, self.left, self.x
        if self.method.delay is None:
            if before is not None:
                self.outer_step(*before)
            self.pull()
            begins_anew = self.method.pull == 1
            d = (begun - x if begins_anew else self.z - self.x).mean(0)
            self.left, self.came_from = (d, self.steps * self.first), begun
        elif self.method.delay == 0:
            self.outer_step((begun - x).mean(0), math.inf)
            self.pull()
        else:
            self.left, self.since = ((begun - x).mean(0), math.inf), 0

    def outer_step(self, d: np.ndarray, reach: float) -> None:
        method = self.method
        if method.penalty is not None:
            d = d / method.penalty(float(np.linalg.norm(self.z - (self.came_from - d))), reach)
        self.m = np.clip(method.momentum * self.m + d, -method.clip, method.clip)
        self.z = self.z - method.lr * (d + method.momentum * self.m if method.nesterov else self.m)

    def pull(self) -> None:
        self.replicas.x[:, self.own] += self.method.pull * (self.z - self.x)


def by_hand(count: int, method: Method) -> np.ndarray:
    replicas = cases.Replicas(count)
    fragments = [
        ByHand(
            replicas,
            method,
            replicas.layer % method.fragments == number,
            number * method.tau // method.fragments,
        )
        for number in range(method.fragments)
    ]
    for _ in range(cases.STEPS):
        replicas.inner()
        for fragment in fragments:
            fragment.step()
        replicas.keep()
    return np.stack(replicas.found, 1)


def trajectories(group, methods):
    return [cases.trajectory(group, method) for method in methods]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.second_tier("2", "3")
def test_any_settings_that_fit_together_do_what_they_say(ranks, replicas):
    methods = [drawn(random.randrange(10**6)) for _ in range(8)]
    of_ranks = ranks.run(trajectories, replicas, methods)
    for number, method in enumerate(methods):
        expected = by_hand(replicas, method)
        for replica, found in enumerate(of_ranks):
            curve, last = found[number]
            np.testing.assert_allclose(
                cases.flat(curve), expected[replica], rtol=0, atol=1e-10, err_msg=str(method)
            )
            for name in cases.SIZES:
                np.testing.assert_array_equal(last[name], of_ranks[0][number][1][name])


def test_co2_that_waits_without_momentum_and_penalty_is_local_sgd(ranks):
    plain = replicas.co2(4, lr=1.0, momentum=0.0, penalty=None)
    waits = dataclasses.replace(plain, delay=0)
    for replica, ((found, _), (late, _)) in enumerate(ranks.run(trajectories, 2, [waits, plain])):
        expected = cases.local_sgd(2, 4)[replica]
        np.testing.assert_allclose(cases.flat(found), expected, rtol=0, atol=1e-11)
        assert np.abs(cases.flat(late) - expected).max() > 0.01
