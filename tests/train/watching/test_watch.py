"""What a step is compared with."""

import time

import pytest

from pyruntime.train.metrics import StepMetrics
from pyruntime.train.watching.peak import Peak
from pyruntime.train.watching.watch import Watch


def step(number, per_second=1000.0):
    return StepMetrics(number, 2.5, 1.25, 1e-3, per_second, 0.5, 0.05, 10**8)


def test_a_step_is_compared_with_the_peak_of_all_ranks_and_the_planner():
    watch = Watch(100, 4, 6e6, Peak(4 * 5e9, "stated"), predicted_step_s=0.45)
    found = watch.complete(step(1), 1)
    assert found.tokens_per_second_per_device == 250.0
    assert found.mfu == pytest.approx(1000 * 6e6 / 20e9)
    assert found.predicted_step_s == 0.45
    assert (found.step, found.loss, found.exposed_comm_s) == (1, 2.5, 0.05)


def test_what_is_not_known_is_left_out():
    found = Watch(100, 1, 6e6).complete(step(1), 1)
    assert found.mfu is None and found.predicted_step_s is None
    assert "mfu" not in found.to_json() and "predicted_step_s" not in found.to_json()


def test_the_time_to_go_is_of_the_steps_of_this_process(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = Watch(100, 1, 6e6)
    assert watch.complete(step(41), 41).eta_s == pytest.approx(0.5 * 59)
    now += 1.5  # a step and a validation
    assert watch.complete(step(42), 42).eta_s == pytest.approx(1.0 * 58)
    now += 0.1
    assert watch.complete(step(100), 100).eta_s == 0.0


def test_steps_that_are_read_late_have_the_pace_of_all_that_have_ended(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = Watch(100, 1, 6e6)
    for number in range(41, 51):  # of half a second each, read together
        assert watch.complete(step(number), 50).eta_s == pytest.approx(0.5 * (100 - number))
    now += 5.0
    for number in range(51, 61):
        assert watch.complete(step(number), 60).eta_s == pytest.approx(0.5 * (100 - number))
