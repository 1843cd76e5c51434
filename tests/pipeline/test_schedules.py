"""Every schedule of every size passes the validator and stores no more than it says."""

import pytest

from pyruntime.pipeline import KINDS, Kind, check, make_schedule
from tests.pipeline.cases import sizes


def computes(schedule, rank):
    return [str(action) for action in schedule.actions[rank] if action.kind.is_compute]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.second_tier("zb-v", "terapipe", "seq1f1b")
def test_every_size_can_run_over_channels_of_two_messages(kind):
    for p, m, v, q in sizes(kind):
        schedule = make_schedule(kind, p, m, virtual=v, slices=q)
        check(schedule, channel_capacity=2)
        assert (schedule.kind, schedule.ranks, schedule.micro_batches, schedule.slices) == (kind, p, m, q)


@pytest.mark.parametrize(("kind", "virtual"), [("interleaved", 3), ("interleaved", 4), ("zb-v", 1)])
def test_deeper_pipelines_can_run(kind, virtual):
    for p in (2, 3, 6, 8):
        check(make_schedule(kind, p, 2 * p, virtual=virtual))


def test_stages_go_round_the_ranks_and_in_a_v():
    assert make_schedule("1f1b", 3, 1).placement == (0, 1, 2)
    assert make_schedule("interleaved", 3, 3, virtual=2).placement == (0, 1, 2, 0, 1, 2)
    v = make_schedule("zb-v", 3, 1)
    assert v.placement == (0, 1, 2, 2, 1, 0)
    assert [v.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_orders_are_those_of_the_papers():
    assert computes(make_schedule("gpipe", 2, 2), 1) == ["F1.0", "F1.1", "B1.0", "B1.1"]
    assert computes(make_schedule("1f1b", 2, 3), 0) == ["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "B0.2"]
    assert computes(make_schedule("zb-h1", 2, 2), 1) == ["F1.0", "I1.0", "F1.1", "I1.1", "W1.0", "W1.1"]
    assert computes(make_schedule("terapipe", 1, 2, slices=2), 0) == (
        ["F0.0", "F0.0/1", "F0.1", "F0.1/1", "B0.1/1", "B0.1", "B0.0/1", "B0.0"]
    )
    assert computes(make_schedule("seq1f1b", 2, 2, slices=2), 1) == (
        ["F1.0", "F1.0/1", "B1.0/1", "F1.1", "B1.0", "F1.1/1", "B1.1/1", "B1.1"]
    )
    # Megatron-LM, figure 4 (4 ranks, 2 stages each): device 4 begins 1 2 3 4, then 1 with its own backward.
    assert computes(make_schedule("interleaved", 4, 8, virtual=2), 3)[:8] == (
        ["F3.0", "F3.1", "F3.2", "F3.3", "F7.0", "B7.0", "F7.1", "B7.1"]
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "terapipe"])
def test_weight_gradients_come_in_ascending_order(kind):
    schedule = make_schedule(kind, 4, 8)
    for rank in range(4):
        for stage in schedule.stages_of(rank):
            weights = [
                action.micro_batch
                for action in schedule.actions[rank]
                if action.stage == stage and action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            ]
            assert weights == list(range(8))


def test_what_ranks_store():
    for p, m, _, _ in sizes("gpipe"):
        most = {
            kind: [make_schedule(kind, p, m).peak_in_flight(rank) for rank in range(p)]
            for kind in ("gpipe", "1f1b", "zb-h1", "zb-v")
        }
        assert most["gpipe"] == [m] * p
        assert most["1f1b"] == [min(p - rank, m) for rank in range(p)]
        assert most["zb-h1"] == most["1f1b"]
    for p, m, _, q in sizes("seq1f1b"):
        schedule = make_schedule("seq1f1b", p, m, slices=q)
        assert schedule.peak_in_flight(0) == min(p + q - 1, m * q)


@pytest.mark.parametrize("kind", ["zb-h1", "zb-v"])
def test_what_waits_for_its_weight_gradient_is_stored_too(kind):
    """In all no more than 1F1B stores; stages of zb-v are half as large."""
    for p in range(1, 9):
        for m in {1, p, 2 * p - 1, 2 * p, 2 * p + 1, 5 * p}:
            for actions in make_schedule(kind, p, m).actions:
                stored = most = 0
                for action in actions:
                    stored += (action.kind is Kind.FORWARD) - (
                        action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
                    )
                    most = max(most, stored)
                assert most <= (2 * p if kind == "zb-v" else p)


@pytest.mark.parametrize(
    ("kind", "sizes", "sentence"),
    [
        ("2f2b", {}, "There is no schedule 2f2b; use one of gpipe, 1f1b,"),
        ("1f1b", {"ranks": 0}, "ranks must be at least 1, found 0."),
        ("gpipe", {"micro_batches": 0}, "micro_batches must be at least 1, found 0."),
        ("1f1b", {"virtual": 2}, "1f1b fixes the number of stages a rank has, so virtual=2 is not possible;"),
        ("zb-v", {"virtual": 2}, "leave it at 1, or use interleaved."),
        ("zb-h1", {"slices": 2}, "zb-h1 does not cut sequences, so slices=2 is not possible; leave it at 1,"),
        ("interleaved", {"micro_batches": 6, "virtual": 2}, "does not divide micro_batches=6; use 8."),
    ],
)
def test_impossible_sizes_are_refused(kind, sizes, sentence):
    arguments = {"ranks": 4, "micro_batches": 8} | sizes
    with pytest.raises(ValueError) as refused:
        make_schedule(kind, **arguments)
    assert sentence in str(refused.value)
