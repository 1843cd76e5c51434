"""The learning rate rises linearly, then falls along half a cosine, linearly, or at last; over as many steps
as were asked for, or reach as many tokens."""

import dataclasses
import math

import pytest

from pyruntime.train import validate
from pyruntime.train.config import (
    Optimizer,
    RunConfig,
    Train,
    learning_rate,
    tokens_per_step,
    warmup_steps,
    with_steps,
)

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


def test_linear_decay_is_a_straight_line():
    linear = dataclasses.replace(PEAK, schedule="linear")
    assert [learning_rate(step, 110, linear) for step in (5, 10, 60, 110)] == pytest.approx(
        [0.25, 0.5, 0.5 * 0.55, 0.05]
    )


def test_wsd_stays_at_the_peak_and_falls_at_last_as_a_square_root():
    wsd = dataclasses.replace(PEAK, schedule="wsd", decay_fraction=0.4, min_lr_fraction=0.0)
    assert [learning_rate(step, 100, wsd) for step in (5, 10, 40, 60)] == [0.25, 0.5, 0.5, 0.5]
    assert [learning_rate(step, 100, wsd) for step in (70, 90, 100)] == pytest.approx(
        [0.25, 0.5 * (1 - math.sqrt(0.75)), 0.0]
    )
    without_decay = dataclasses.replace(wsd, decay_fraction=0.0)
    assert learning_rate(100, 100, without_decay) == 0.5
    at_once = dataclasses.replace(wsd, decay_fraction=1.0)  # behind the warm-up
    assert learning_rate(55, 100, at_once) == pytest.approx(0.5 * (1 - math.sqrt(0.5)))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 50])
@pytest.mark.parametrize("steps", [1, 2, 7, 8, 40])
def test_rates_rise_then_fall_whatever_the_numbers(schedule, warmup, steps):
    optimizer = Optimizer(lr=0.5, schedule=schedule, warmup_steps=warmup)
    rates = [learning_rate(step, steps, optimizer) for step in range(1, steps + 1)]
    top = min(max(warmup, 1), steps) - 1
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert min(rates) > 0 and max(rates) <= 0.5
    if 0 < warmup <= steps:
        assert rates[top] == 0.5
    elif warmup:
        assert rates[-1] == 0.5  # a short run's warm-up is all of it


def test_a_warm_up_may_be_a_share_of_the_steps():
    half = Optimizer(lr=0.5, warmup_fraction=0.5)
    assert [warmup_steps(half, steps) for steps in (1, 10, 11, 1000)] == [0, 5, 6, 500]
    assert warmup_steps(Optimizer(warmup_fraction=0.0), 10**6) == 0
    assert [learning_rate(step, 10, half) for step in (1, 5)] == pytest.approx([0.1, 0.5])


def test_a_warm_up_that_is_not_named_follows_the_steps():
    plain = Optimizer(lr=0.5)
    assert [warmup_steps(plain, steps) for steps in (5, 10, 60, 200, 10**6)] == [0, 1, 6, 20, 20]
    assert learning_rate(1, 10, plain) == learning_rate(20, 500, plain) == 0.5


def test_a_warm_up_longer_than_the_run_is_cut_to_it():
    assert warmup_steps(PEAK, 5) == 5
    validate.check(RunConfig(train=Train(steps=5), optimizer=PEAK), 1)


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (2048, 1), (2049, 2), (204_800, 100), (0, 200)])
def test_a_budget_of_tokens_is_as_many_steps_as_reach_it(tokens, steps):
    config = RunConfig(train=Train(tokens=tokens))
    assert tokens_per_step(config) == 2048
    settled = with_steps(config)
    assert (settled.train.steps, settled.train.tokens) == (steps, 0)
    validate.check(config, 1)
