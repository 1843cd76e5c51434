"""Schedules whose micro-batches skip stages: paths, order, and the seconds that are known of some."""

import random
from collections import Counter

import pytest

from pyruntime.pipeline import Costs, Schedule, check, make_schedule, placement_of, simulate, with_transfers
from pyruntime.pipeline.list_schedule import list_schedule
from pyruntime.pipeline.skipping import best_paths, shares
from pyruntime.pipeline.split import split_layers

# One rank a stage; the head is a stage of its own on the first rank, as in the paper.
PLACEMENT, HEAD, STORED = (0, 1, 2, 3, 0), 4, [4] * 4
PAPER = Costs([[1.0]] * 4 + [[0.25]], [[1.5]] * 4 + [[0.0]], [[0.0]] * 5)
TURNS = "012 013 023 012 013 023"
BEST = "012 013 012 023 013 023"
ONE_EXCHANGED = "013 012 021 023 023 013"


def paths_of(words):
    return tuple((*map(int, word), HEAD) for word in words.split())


def alike(*seconds):
    """Costs of stages whose input and weight gradients take as long as their forward."""
    table = [[each] for each in seconds]
    return Costs(table, table, table)


@pytest.mark.parametrize(
    ("words", "seconds"), [(" ".join(["0123"] * 6), 26.25), (TURNS, 23), (BEST, 21), (ONE_EXCHANGED, 19.75)]
)
def test_known_makespans(words, seconds):
    paths = paths_of(words)
    computes, found = list_schedule(PLACEMENT, paths, PAPER, STORED)
    assert found == seconds
    schedule = Schedule("1f1b", 6, 1, PLACEMENT, with_transfers(computes, PLACEMENT, paths), paths)
    check(schedule)
    assert simulate(schedule, PAPER).makespan == seconds


def test_the_best_order_is_found():
    assert best_paths(PLACEMENT, 6, 1, PAPER, STORED) == paths_of(BEST)


def test_micro_batches_that_meet_at_a_stage_wait_for_each_other():
    """Released at 0, 1 and 2, they want stage 2 at second 2 (the first two) and stage 1 at second 3 (the last
    two). The second comes first to neither."""
    paths = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 2, 3))
    costs = Costs(1.0, 100.0, 0.0)  # no backward ends in time to matter
    computes, _ = list_schedule(range(4), paths, costs, [3] * 4)
    schedule = Schedule("1f1b", 3, 1, (0, 1, 2, 3), with_transfers(computes, range(4), paths), paths)
    spans = {str(span.action): span.start for span in simulate(schedule, costs).spans}
    assert [spans[f"F0.{each}"] for each in range(3)] == [0, 1, 2]
    assert (spans["F2.0"], spans["F2.1"]) == (2, 3)
    assert (spans["F1.2"], spans["F1.1"]) == (3, 4)


@pytest.mark.parametrize("stages", [4, 5, 6, 8])
def test_every_schedule_runs_is_balanced_stores_no_more_and_ends_when_it_says(stages):
    for _ in range(3):
        skip = random.randint(1, stages - 3)
        micro_batches = random.randint(-(-(stages - 2) // (stages - 2 - skip)), 12)
        costs = alike(*(random.uniform(0.5, 1.5) for _ in range(stages)))
        schedule = make_schedule("1f1b", stages, micro_batches, skip=skip, costs=costs)
        check(schedule, most_in_flight=[stages - rank for rank in range(stages)])
        assert all(len(path) == stages - skip and list(path) == sorted(path) for path in schedule.paths)
        visits = [schedule.visits(stage) for stage in range(stages)]
        assert visits[0] == visits[-1] == micro_batches
        assert max(visits[1:-1]) - min(visits[1:-1]) <= 1
        assert schedule == make_schedule("1f1b", stages, micro_batches, skip=skip, costs=costs)
        whole = simulate(make_schedule("1f1b", stages, micro_batches), costs).makespan
        made = list_schedule(
            schedule.placement, schedule.paths, costs, [stages - rank for rank in range(stages)]
        )
        seconds = simulate(schedule, costs).makespan
        assert seconds < whole and seconds == pytest.approx(made[1])


def test_messages_on_their_way_delay_the_list_schedule_as_they_delay_the_simulation():
    costs = Costs([[0.5], [1], [1], [0.6]], [[1]] * 4, [[0.5]] * 4, transfer=0.3)
    schedule = make_schedule("1f1b", 4, 8, skip=1, costs=costs)
    made = list_schedule(schedule.placement, schedule.paths, costs, [4, 3, 2, 1])
    assert simulate(schedule, costs).makespan == pytest.approx(made[1])


def test_a_search_among_more_orders_is_no_worse_than_taking_turns():
    costs = alike(0.6, *[1.0] * 4, 0.8)
    found = best_paths(range(6), 12, 2, costs, range(6, 0, -1))
    in_turn = tuple((0, *((1, 2), (3, 4))[number % 2], 5) for number in range(12))
    seconds = [list_schedule(range(6), paths, costs, range(6, 0, -1))[1] for paths in (found, in_turn)]
    assert seconds[0] <= seconds[1]
    assert Counter(stage for path in found for stage in path)[1] == 6


@pytest.mark.parametrize(("layers", "head", "micro_batches"), [(8, 0.3, 8), (32, 0.6, 8), (32, 0.6, 12)])
def test_with_light_first_and_last_stages_a_step_is_two_thirds_of_the_whole_model_s(
    layers, head, micro_batches
):
    """Each stage's layers make all ranks equally busy, for either schedule."""
    seconds = []
    for skip in (1, 0):
        runs = split_layers([1.0] * layers, 4, last=head, shares=shares(4, skip))
        costs = alike(*(len(run) + head * (stage == 3) for stage, run in enumerate(runs)))
        schedule = make_schedule("1f1b", 4, micro_batches, skip=skip, costs=costs)
        seconds.append(simulate(schedule, costs).makespan)
    assert seconds[0] <= 0.68 * seconds[1]


@pytest.mark.parametrize(
    ("kind", "ranks", "micro_batches", "skip", "sentence"),
    [
        ("1f1b", 3, 4, 1, "skip=1 of 3 stages: the first and the last are always visited, .*; use 0 to 0"),
        ("1f1b", 5, 4, 3, "skip=3 of 5 stages: .* use 0 to 2"),
        ("1f1b", 5, 4, -1, "skip=-1 of 5 stages"),
        ("1f1b", 5, 2, 2, "2 micro-batch.* that skip 2 of the 3 stages .* without work; use 3 or more"),
        ("zb-h1", 4, 4, 1, "zb-h1 takes every micro-batch through all stages, so skip=1 is not possible"),
    ],
)
def test_what_has_no_schedule_is_said(kind, ranks, micro_batches, skip, sentence):
    with pytest.raises(ValueError, match=sentence):
        placement_of(kind, ranks, micro_batches, skip=skip)


def test_skipping_that_gains_nothing_is_refused():
    with pytest.raises(ValueError, match=r"skip=1 does not shorten a step: 20 s, and 20 s through all"):
        make_schedule("1f1b", 4, 2, skip=1, costs=Costs([[5], [0], [0], [0]], [[5], [0], [0], [0]], 0))


def test_stages_that_wait_for_each_other_in_a_circle_have_no_list_schedule():
    paths = ((0, 1, 2, 3), (0, 2, 1, 3))
    assert list_schedule(range(4), paths, Costs([[0.25], [1], [1], [1]]), [2, 1, 1, 1]) is None
