"""The validator names the first thing that is wrong."""

import dataclasses

import pytest

from pyruntime.pipeline import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    check,
    make_schedule,
    simulate,
    with_transfers,
)
from pyruntime.pipeline.simulated import Costs

F, B, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def changed(schedule, rank, change):
    """`schedule` with the list of `rank` changed in place by `change`."""
    lists = [list(own) for own in schedule.actions]
    change(lists[rank])
    return dataclasses.replace(schedule, actions=tuple(map(tuple, lists)))


def swap(first, second):
    def change(actions):
        places = [[str(action) for action in actions].index(name) for name in (first, second)]
        actions[places[0]], actions[places[1]] = actions[places[1]], actions[places[0]]

    return change


def without(name):
    return lambda actions: actions.remove(next(a for a in actions if str(a) == name))


def says(schedule, sentence, **options):
    with pytest.raises(ScheduleError) as wrong:
        check(schedule, **options)
    assert sentence in str(wrong.value)
    assert str(wrong.value).endswith(".") and "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("kind", "rank", "change", "sentence"),
    [
        ("1f1b", 1, without("RA1.2"), "Rank 1 never runs RA1.2."),
        ("1f1b", 1, without("SG1.3"), "Rank 1 never runs SG1.3."),
        ("1f1b", 0, without("F0.3"), "Rank 0 never runs F0.3."),
        ("zb-h1", 2, without("W2.1"), "Rank 2 never runs W2.1."),
        ("1f1b", 1, lambda own: own.append(own[0]), "Rank 1 runs RA1.0 2 times."),
        ("1f1b", 1, lambda own: own.append(Action(F, 0, 0)), "Rank 1 runs F0.0, but stage 0 is on rank 0."),
        ("1f1b", 1, lambda own: own.append(Action(F, 4, 0)), "F4.0, whose stage 4 does not exist"),
        ("1f1b", 1, lambda own: own.append(Action(F, 1, 4)), "F1.4, whose micro_batch 4 does not exist"),
        ("1f1b", 1, lambda own: own.append(Action(F, 1, 0, 1)), "F1.0/1, whose slice 1 does not exist"),
        (
            "1f1b",
            1,
            lambda own: own.append(Action(WEIGHT, 1, 0)),
            "Rank 1 runs B1.0 and also its part W1.0; run one of both.",
        ),
        (
            "1f1b",
            0,
            lambda own: own.append(Action(Kind.SEND_GRADIENT, 0, 0)),
            "Rank 0 runs SG0.0, but the stage at the other end is on the same rank or does not exist.",
        ),
        ("zb-h1", 2, swap("I2.0", "W2.0"), "Rank 2 runs W2.0 before I2.0."),
        (
            "1f1b",
            1,
            swap("RA1.0", "RA1.1"),
            "Rank 1 receives RA1.1, but the next message from rank 0 is SA0.0.",
        ),
        ("1f1b", 2, swap("F2.0", "B2.0"), "rank 2 waits at B2.0 for its own F2.0"),
        ("1f1b", 0, swap("F0.0", "SA0.0"), "rank 0 waits at SA0.0 for its own F0.0"),
        ("zb-h1", 1, swap("I1.0", "SG1.0"), "rank 1 waits at SG1.0 for its own I1.0"),
        ("1f1b", 1, swap("RA1.0", "F1.0"), "rank 1 waits at F1.0 for its own RA1.0"),
    ],
)
def test_a_broken_schedule_is_refused_with_its_reason(kind, rank, change, sentence):
    schedule = make_schedule(kind, 3, 4)
    check(schedule)
    says(changed(schedule, rank, change), sentence)


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        (((0, 1, 3),), "There are paths of 1 micro-batches, but 2 micro-batches."),
        (((0, 1, 3), (0, 2)), "visits the stages [0, 2]; a path begins at stage 0 and ends at stage 3."),
        (((0, 1, 3), (1, 2, 3)), "Micro-batch 1 visits the stages [1, 2, 3]; a path begins at stage 0"),
        (((0, 1, 3), (0, 7, 3)), "Micro-batch 1 visits the stages [0, 7, 3], but there is no stage 7."),
        (((0, 1, 3), (0, 2, 2, 3)), "Micro-batch 1 visits the stages [0, 2, 2, 3], one of them twice."),
        (((0, 1, 3), (0, 1, 3)), "No micro-batch visits stage 2."),
        (((0, 2, 3), (0, 1, 3)), "Rank 1 runs RA1.0, but micro-batch 0 skips stage 1."),
        (((0, 1, 3), (0, 1, 2, 3)), "Rank 1 never runs "),
    ],
)
def test_paths_that_do_not_fit_are_refused(paths, sentence):
    schedule = make_schedule("1f1b", 4, 2, skip=1)
    assert schedule.paths == ((0, 1, 3), (0, 2, 3))
    says(dataclasses.replace(schedule, paths=paths), sentence)


def test_ranks_whose_micro_batches_cross_each_other_deadlock():
    paths = ((0, 1, 2, 3), (0, 2, 1, 3))
    own = [[Action(kind, stage, each) for kind in (F, B) for each in (0, 1)] for stage in (0, 3)]
    crossed = [[Action(F, stage, first), Action(F, stage, 1 - first)] for stage, first in ((1, 1), (2, 0))]
    for computes in crossed:
        computes += [Action(B, computes[0].stage, each) for each in (0, 1)]
    computes = [own[0], *crossed, own[1]]
    schedule = Schedule("mine", 2, 1, (0, 1, 2, 3), with_transfers(computes, range(4), paths), paths)
    says(schedule, "rank 1 waits at RA1.1 for rank 2 to run SA2.1, rank 2 waits at RA2.0 for rank 1 to run")


def test_slices_depend_on_each_other():
    schedule = make_schedule("terapipe", 1, 1, slices=2)
    says(changed(schedule, 0, swap("F0.0", "F0.0/1")), "waits at F0.0/1 for its own F0.0.")
    says(changed(schedule, 0, swap("B0.0", "B0.0/1")), "waits at B0.0 for its own B0.0/1.")


def test_stages_of_one_rank_depend_on_each_other():
    schedule = make_schedule("zb-v", 1, 1)
    says(changed(schedule, 0, swap("F0.0", "F1.0")), "rank 0 waits at F1.0 for its own F0.0.")


def test_memory_over_the_bound_is_refused():
    schedule = make_schedule("gpipe", 2, 6)
    check(schedule, most_in_flight=[6, 6])
    says(schedule, "Rank 1 stores 6 forwards at once, more than the 5 allowed.", most_in_flight=[6, 5])
    with pytest.raises(ValueError, match="has 1 bounds, but the schedule 2 ranks"):
        check(schedule, most_in_flight=[6])


def test_short_channels_can_deadlock_and_the_circle_is_named():
    schedule = make_schedule("interleaved", 2, 4, virtual=2)
    check(schedule, channel_capacity=2)
    says(
        schedule,
        "Deadlock: rank 0 waits at SA0.3 for rank 1 to receive SG2.0, "
        "rank 1 waits at SA1.2 for rank 0 to receive SG3.1.",
        channel_capacity=1,
    )
    with pytest.raises(ValueError, match="channel_capacity must be at least 1, found 0"):
        check(schedule, channel_capacity=0)


def test_ranks_that_wait_for_each_other_deadlock_at_any_capacity():
    computes = [[Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)]]
    computes += [[Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)]]
    schedule = Schedule("mine", 2, 1, (0, 1), with_transfers(computes, (0, 1)))
    says(
        schedule,
        "Deadlock: rank 0 waits at RG0.0 for rank 1 to run SG1.0, "
        "rank 1 waits at RA1.1 for rank 0 to run SA0.1.",
    )
    with pytest.raises(ScheduleError, match="Deadlock"):
        simulate(schedule, Costs())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"micro_batches": 0}, "micro_batches must be at least 1, found 0."),
        ({"placement": (0, 2)}, "Stage 1 is placed on rank 2, but there are actions for 2 rank(s)."),
        ({"placement": (0, 0)}, "No stage is placed on rank 1."),
        ({"actions": ()}, "ranks must be at least 1, found 0."),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, sentence):
    says(dataclasses.replace(make_schedule("1f1b", 2, 2), **change), sentence)


def test_a_rank_receives_in_the_order_of_sending_even_what_it_needs_later():
    computes = [
        [Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 1), Action(B, 0, 0)],
        [Action(F, 1, 1), Action(F, 1, 0), Action(B, 1, 1), Action(B, 1, 0)],
    ]
    actions = with_transfers(computes, (0, 1))
    assert list(map(str, actions[1][:4])) == ["RA1.0", "RA1.1", "F1.1", "F1.0"]
    check(Schedule("mine", 2, 1, (0, 1), actions))
