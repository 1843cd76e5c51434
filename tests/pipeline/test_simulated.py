"""Simulated times against the formulas of the papers, and the drawings of timelines."""

import random

import pytest

from pyruntime.pipeline import (
    KINDS,
    Costs,
    bubble_1f1b,
    bubble_interleaved,
    bubble_zb_h1,
    closed_form_bubble,
    make_schedule,
    png,
    simulate,
    text,
)
from tests.pipeline.cases import sizes

WITH_FORMULA = [kind for kind in KINDS if kind != "zb-v"]


def bubbles(schedule, costs):
    timeline = simulate(schedule, costs)
    return [timeline.bubble(rank) for rank in range(schedule.ranks)]


@pytest.mark.parametrize("kind", WITH_FORMULA)
@pytest.mark.second_tier("terapipe", "seq1f1b")
def test_bubbles_are_those_of_the_formula(kind):
    for p, m, v, q in sizes(kind):
        forward, of_input = (random.uniform(0.5, 2) for _ in range(2))
        of_weight = random.uniform(0, min(forward, of_input))
        costs = Costs(forward, of_input, of_weight)
        schedule = make_schedule(kind, p, m, virtual=v, slices=q)
        expected = closed_form_bubble(schedule, costs)
        if expected is None:
            assert kind == "zb-h1" and m < p
            continue
        assert bubbles(schedule, costs) == pytest.approx([expected] * p), (p, m, v, q, costs)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (4, 16), (8, 24)])
def test_zb_h1_leaves_a_third_of_the_bubble_of_1f1b(ranks, micro_batches):
    costs = Costs()
    assert bubbles(make_schedule("zb-h1", ranks, micro_batches), costs) == [ranks - 1] * ranks
    assert bubbles(make_schedule("1f1b", ranks, micro_batches), costs) == [3 * (ranks - 1)] * ranks
    assert bubble_zb_h1(ranks, 1, 1, 1) == ranks - 1
    assert bubble_1f1b(ranks, 1, 2) == 3 * (ranks - 1)


@pytest.mark.parametrize(("ranks", "virtual", "expected"), [(4, 2, 4.5), (8, 4, 5.25)])
def test_interleaved_vectors(ranks, virtual, expected):
    costs = Costs(1 / virtual, 1 / virtual, 1 / virtual)
    schedule = make_schedule("interleaved", ranks, 2 * ranks, virtual=virtual)
    assert bubbles(schedule, costs) == pytest.approx([expected] * ranks)
    assert bubble_interleaved(ranks, virtual, 1, 2) == expected


def test_no_rank_of_zb_v_waits_once_it_has_begun():
    for p in range(1, 7):
        for m in {2 * p, 2 * p + 1, 3 * p}:
            timeline = simulate(make_schedule("zb-v", p, m), Costs())
            assert [timeline.waits(rank) for rank in range(p)] == [0] * p
            # What is left is that the last rank begins p - 1 steps after the first.
            assert timeline.makespan == 6 * m + p - 1


def test_a_message_on_its_way_delays_who_needs_it_and_nobody_else():
    timeline = simulate(make_schedule("gpipe", 2, 2), Costs(transfer=10))
    starts = [(str(span.action), span.start) for span in timeline.spans]
    assert starts == [
        ("F0.0", 0),
        ("F0.1", 1),
        ("B0.0", 25),
        ("B0.1", 27),
        ("F1.0", 11),
        ("F1.1", 12),
        ("B1.0", 13),
        ("B1.1", 15),
    ]


def test_stages_and_slices_may_cost_differently():
    costs = Costs([[1, 2], [3, 4]], [[0, 0], [0, 0]], [[5, 6], [0, 0]])
    timeline = simulate(make_schedule("terapipe", 2, 1, slices=2), costs)
    assert [timeline.work(rank) for rank in range(2)] == [14, 7]
    assert timeline.makespan == 1 + 3 + 4 + 11
    with pytest.raises(ValueError, match="forward has no seconds for slice 2 of stage 0"):
        simulate(make_schedule("terapipe", 2, 1, slices=3), costs)
    assert closed_form_bubble(timeline.schedule, costs) is None


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_impossible_costs_are_refused(seconds):
    with pytest.raises(ValueError, match="transfer must be from 0 to"):
        Costs(transfer=seconds)
    with pytest.raises(ValueError, match="forward must be from 0 to"):
        Costs([[seconds]], [[1]], [[1]])


def test_the_text_shows_who_computes_what_when():
    shown = text(simulate(make_schedule("zb-h1", 2, 2), Costs()), 40).splitlines()
    assert shown[:2] == ["rank 0  F0F1  B0--B1--", "rank 1    F0I0F1I1W0W1"]
    assert shown[2].startswith("a column is 0.5 s; F forward, B backward, I input gradient, W weight")
    narrow = text(simulate(make_schedule("zb-v", 4, 12), Costs()), 60).splitlines()
    assert max(map(len, narrow[:4])) <= 60


def test_second_stages_are_small_letters():
    shown = text(simulate(make_schedule("zb-v", 1, 1), Costs()), 40)
    assert shown.splitlines()[0] == "rank 0  F0f0i0I0w0W0"


def test_the_plot_is_a_png(tmp_path):
    path = tmp_path / "schedule.any"
    png(simulate(make_schedule("seq1f1b", 2, 2, slices=2), Costs()), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
