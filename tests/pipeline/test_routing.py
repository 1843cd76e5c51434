"""Schedules whose micro-batches are routed among replicas of stages: who gets which, order, and seconds."""

import dataclasses
import random
import time

import pytest
import torch
from torch import nn

from pyruntime.pipeline import (
    Costs,
    ScheduleError,
    check,
    from_csv,
    make_schedule,
    simulate,
    to_csv,
)
from pyruntime.pipeline.executor import Pipeline
from pyruntime.pipeline.routing import by_stage, costs_of_replicas, routes
from pyruntime.pipeline.split import deal

HALF = (1.0, 0.5, 1.0, 1.0)
"""Two stages of two replicas, one of them half as fast."""


def seconds(speeds, stages, micro_batches, costs=None):
    """The makespan of the routed schedule, and of equal shares in fixed columns."""
    costs = costs or Costs()
    table = by_stage(speeds, stages)
    of_places, replicas = costs_of_replicas(costs, table), len(table[0])
    routed = make_schedule("1f1b", stages, micro_batches, speeds=speeds, costs=costs)
    columns = [
        costs_of_replicas(costs, tuple((each[replica],) for each in table)) for replica in range(replicas)
    ]
    fixed = make_schedule("1f1b", stages, micro_batches // replicas)
    return simulate(routed, of_places).makespan, max(simulate(fixed, each).makespan for each in columns)


def test_a_micro_batch_goes_to_whom_would_end_it_first():
    dealt = deal([1 / 4, 1 / 2, 1], 14)
    assert dealt == [0, 0, 1, 0, 0, 1, 2, 0, 0, 1, 0, 0, 1, 2]
    assert [dealt.count(rank) / speed for rank, speed in enumerate((4, 2, 1))] == [2, 2, 2]


def test_a_path_has_one_replica_of_each_stage():
    paths = routes(by_stage((1, 0.5, 1, 1), 2), 6)
    assert paths == ((0, 2), (0, 3), (1, 2), (0, 3), (0, 2), (1, 3))


@pytest.mark.parametrize("speeds", [HALF, (0.5, 1, 1, 1), (1, 1, 1, 0.5), (1, 0.5, 0.5, 1)])
def test_a_half_speed_replica_costs_much_less_than_in_a_column(speeds):
    """Of 12 micro-batches the slow one takes 4 in the time in which the other takes 8; in equal shares 6."""
    routed, equal = seconds(speeds, 2, 12)
    assert equal >= 1.25 * routed


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("replicas", [2, 3])
def test_every_schedule_runs_is_dealt_by_speed_and_ends_when_it_says(stages, replicas):
    for _ in range(3):
        speeds = [random.choice((0.5, 0.7, 1.0)) for _ in range(stages * replicas)]
        table, micro_batches = by_stage(speeds, stages), replicas * random.randint(3, 8)
        costs = Costs(*([[random.uniform(0.5, 1.5)] for _ in range(stages)] for _ in range(3)))
        schedule = make_schedule("1f1b", stages, micro_batches, speeds=speeds, costs=costs)
        places = range(stages * replicas)
        check(schedule, most_in_flight=[2 * stages - place // replicas for place in places])
        assert schedule == make_schedule("1f1b", stages, micro_batches, speeds=speeds, costs=costs)
        assert from_csv(to_csv(schedule)) == schedule
        for stage, own in enumerate(table):
            counts = [schedule.visits(stage * replicas + replica) for replica in range(replicas)]
            assert sum(counts) == micro_batches
            least = max(count / speed for count, speed in zip(counts, own, strict=True))
            assert all((count + 1) / speed >= least for count, speed in zip(counts, own, strict=True))


def test_equal_speeds_take_turns():
    schedule = make_schedule("1f1b", 3, 8, speeds=[2.0] * 6)
    assert schedule.paths == 4 * ((0, 2, 4), (1, 3, 5))
    fixed = make_schedule("1f1b", 3, 4)
    assert simulate(schedule, Costs()).makespan == simulate(fixed, Costs()).makespan


@pytest.mark.parametrize(
    ("kind", "micro_batches", "options", "sentence"),
    [
        ("1f1b", 8, {"speeds": [1, 1, 1]}, r"speeds=\[1, 1, 1\] of 2 stages must be positive numbers"),
        ("1f1b", 8, {"speeds": [1, 0, 1, 1]}, r"speeds=\[1, 0, 1, 1\] of 2 stages must be positive"),
        ("1f1b", 8, {"speeds": [1, float("inf"), 1, 1]}, "must be positive numbers"),
        ("1f1b", 4, {"speeds": [1, 1, 9, 1]}, r"speeds \[9, 1\] .* stage 1 leave replica 1 without any of"),
        ("gpipe", 8, {"speeds": [1, 1, 1, 1]}, "gpipe takes micro-batches through fixed ranks, so speeds"),
        ("1f1b", 8, {"speeds": [1, 1, 1, 1], "skip": 1}, "skip=1 .*, so speeds"),
    ],
)
def test_what_has_no_schedule_is_said(kind, micro_batches, options, sentence):
    stages = 4 if "skip" in options else 2
    with pytest.raises(ValueError, match=sentence):
        make_schedule(kind, stages, micro_batches, **options)


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        (((0, 2), (0, 1)), r"Micro-batch 1 visits the stages \[0, 1\]; a path visits one of each 2 stages"),
        (((0, 2), (3,)), r"Micro-batch 1 visits the stages \[3\]; a path visits"),
        ((), "Stages have 2 replicas, but there are no paths"),
    ],
)
def test_paths_that_miss_a_stage_are_refused(paths, sentence):
    made = make_schedule("1f1b", 2, 2, speeds=[1.0] * 4)
    with pytest.raises(ScheduleError, match=sentence):
        check(dataclasses.replace(made, paths=paths))


# -- on ranks

ROWS, WIDTH, UNIT_S = 4, 8, 0.02


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds = seconds
        return x + weight

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, gradient.sum(0), None


class Sleeping(nn.Module):
    """Sleeps in a forward, and twice as long in a backward."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        time.sleep(self.seconds)
        return _Slept.apply(x, self.weight, 2 * self.seconds)


def slept(group, is_routed, micro_batches):
    """Seconds of the fastest of three steps on the slowest rank, in which replicas sleep by their speeds;
    the sum of the losses and this rank's gradient."""
    rank = group.rank()
    schedule = make_schedule("1f1b", 2, micro_batches, speeds=HALF if is_routed else [1.0] * 4)
    stage = Sleeping(UNIT_S / HALF[rank])
    pipeline = Pipeline(schedule, {rank: stage}, group, shapes=[(ROWS, WIDTH)], dtype=torch.float32)
    inputs = [[torch.full((ROWS, WIDTH), 1.0 + number)] for number in range(micro_batches)]
    took = []
    for _ in range(3):
        stage.weight.grad = None
        torch.distributed.barrier(group)
        began = time.perf_counter()
        losses = pipeline.step(inputs, lambda y, micro_batch, part: y.square().mean())
        torch.distributed.barrier(group)
        took.append(time.perf_counter() - began)
    pipeline.close()
    return min(took), sum(float(part) for parts in losses for part in parts), stage.weight.grad


@pytest.mark.alone
def test_ranks_that_sleep_by_their_speeds_gain_what_the_simulation_says(ranks):
    """Equal speeds deal as equal shares do."""
    equal, routed = (ranks.run(slept, 4, is_routed, 12) for is_routed in (False, True))
    assert equal[0][0] >= 1.25 * routed[0][0]
    expected = sum((1.0 + number) ** 2 for number in range(12))
    for found in (equal, routed):
        assert sum(loss for _, loss, _ in found) == pytest.approx(expected)
        gradient = torch.full((WIDTH,), sum(2.0 * (1 + number) for number in range(12)) / WIDTH)
        for first in (0, 2):  # summed over the replicas of a stage
            torch.testing.assert_close(found[first][2] + found[first + 1][2], gradient)


class Cubic(nn.Module):
    def __init__(self, stage):
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def inputs_of(micro_batches):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(micro_batches)]


def routed_step(group, micro_batches):
    rank = group.rank()
    schedule = make_schedule("1f1b", 2, micro_batches, speeds=HALF)
    stage = Cubic(rank // 2)
    pipeline = Pipeline(schedule, {rank: stage}, group, shapes=[(ROWS, WIDTH)], dtype=torch.float64)
    visited = [rank in path for path in schedule.paths]
    inputs = [[x] if comes else [] for x, comes in zip(inputs_of(micro_batches), visited, strict=True)]

    def loss(y, micro_batch, part):
        return (1 + micro_batch) * y.square().mean()

    losses = pipeline.step(inputs if rank < 2 else None, loss if rank >= 2 else None)
    # Each column evaluates its own.
    own = [[inputs_of(2)[rank % 2]]]
    with torch.no_grad():
        evaluated = pipeline.evaluate(own if rank < 2 else None, loss if rank >= 2 else None)
    pipeline.close()
    grads = [parameter.grad for parameter in stage.parameters()]
    return [float(part) for parts in losses for part in parts], grads, [float(e[0]) for e in evaluated]


def test_losses_and_summed_gradients_are_those_of_one_rank(ranks):
    stages = [Cubic(0), Cubic(1)]
    losses = []
    for number, x in enumerate(inputs_of(7)):
        loss = (1 + number) * stages[1](stages[0](x)).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        evaluated = [float(stages[1](stages[0](x)).square().mean()) for x in inputs_of(2)]
    found = ranks.run(routed_step, 4, 7)
    assert sorted(found[2][0] + found[3][0]) == pytest.approx(sorted(losses), rel=1e-12)
    assert found[2][2] + found[3][2] == pytest.approx(evaluated, rel=1e-12)
    for stage, first in zip(stages, (0, 2), strict=True):
        of_both = zip(found[first][1], found[first + 1][1], strict=True)
        for parameter, (one, other) in zip(stage.parameters(), of_both, strict=True):
            torch.testing.assert_close(one + other, parameter.grad, rtol=1e-12, atol=1e-12)
    again = ranks.run(routed_step, 4, 7)
    for (_, first, _), (_, second, _) in zip(found, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
