"""The learning rate rises linearly, then falls along half a cosine."""

import math

import pytest

from pyruntime.train.config import Optimizer, learning_rate, warmup_steps

PEAK = Optimizer(lr=0.5, min_lr_fraction=0.1, warmup_steps=10)


def test_warm_up_is_linear_and_reaches_the_peak():
    assert [learning_rate(step, 110, PEAK) for step in (1, 5, 10)] == pytest.approx([0.05, 0.25, 0.5])


def test_decay_is_half_a_cosine_to_the_smallest_rate():
    assert learning_rate(60, 110, PEAK) == pytest.approx(0.5 * (0.1 + 0.9 / 2))
    assert learning_rate(35, 110, PEAK) == pytest.approx(0.5 * (0.1 + 0.45 * (1 + math.sqrt(0.5))))
    assert learning_rate(110, 110, PEAK) == pytest.approx(0.05)


def test_no_warm_up_and_nothing_but_warm_up():
    assert learning_rate(1, 1, Optimizer(lr=0.5, min_lr_fraction=0.1, warmup_steps=0)) == pytest.approx(0.05)
    assert learning_rate(10, 10, PEAK) == pytest.approx(0.5)


def test_a_warm_up_that_is_not_named_follows_the_steps():
    plain = Optimizer(lr=0.5)
    assert [warmup_steps(plain, steps) for steps in (5, 10, 60, 200, 10**6)] == [0, 1, 6, 20, 20]
    assert warmup_steps(PEAK, 5) == 10
    assert learning_rate(1, 10, plain) == learning_rate(20, 500, plain) == 0.5
