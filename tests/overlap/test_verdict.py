"""What a page says first: how much is exposed, most of it where, and why."""

from __future__ import annotations

import dataclasses

import pytest

from pyruntime.overlap import Entry, EntryKind, account
from pyruntime.overlap.files import RankLedger
from pyruntime.overlap.verdict import lateness, places, tiles, verdict, waited_more

STEP = {"step_time_s": 0.2, "exposed_comm_s": 0.05, "tokens_per_second": 2000.0}
METRICS = [
    {**STEP, "step": 1, "step_time_s": 9.0, "loss": 5.0},
    {**STEP, "step": 2, "loss": 4.0, "val_loss": 3.5, "mfu": 0.4},
    {**STEP, "step": 3, "loss": None},
]


def rank_ledger(rank: int, *ops: tuple[str, str, float, float, float], clock: float = 100.0) -> RankLedger:
    """Of a step of 1 s that begins at `clock`; `ops` are axis, layer, and when they began, wanted their bytes
    and had them, in seconds of the step."""
    entries = [Entry(EntryKind.OP, "", "aten::mm", "", -1, 7, 0, clock, clock, clock + 1)]
    for axis, layer, *times in ops:
        begin, wanted, end = (clock + at for at in times)
        entries.append(Entry(EntryKind.READ, axis, "all_gather", layer, 1, 7, 1000, begin, wanted, end))
        entries.append(Entry(EntryKind.WAIT, axis, "all_gather", layer, 1, 7, 0, wanted, wanted, end))
    found = account(entries, clock, clock + 1, 7)
    coordinate = {"pp": 0, "dp": 0, "cp": 0, "tp": rank}
    return RankLedger(rank, coordinate, 1, found, 4, clock, clock + 1, 7, tuple(entries))


def test_most_of_what_is_exposed_is_where_the_same_layer_of_all_blocks_waited():
    ops = (
        ("tp", "layers.0.qkv", 0.0, 0.2, 0.4),
        ("tp", "layers.1.qkv", 0.4, 0.5, 0.7),
        ("tp", "head", 0.8, 0.8, 0.9),
    )
    said = verdict([rank_ledger(0, *ops), rank_ledger(1, *ops)], METRICS)
    assert said == (
        "50 % of a step is exposed, most of it in layers.*.qkv, because ranks compute too little meanwhile "
        "to hide its bytes (42 % of them were hidden)."
    )
    lines = rank_ledger(0, *ops).account.lines
    assert [(place.name, len(place.lines), place.bytes) for place in places(lines)] == [
        ("layers.*.qkv", 2, 2000),
        ("head", 1, 1000),
    ]


def test_a_rank_that_comes_late_is_named():
    early = rank_ledger(0, ("tp", "head", 0.1, 0.2, 0.7))
    late = rank_ledger(1, ("tp", "head", 0.6, 0.7, 0.7))
    (place,) = places(early.account.lines)
    waited, by_rank = lateness(place, [early, late])
    assert waited == pytest.approx(0.5) and by_rank == {1: pytest.approx(0.4)}
    assert verdict([early, late], []) == (
        "25 % of a step is exposed, most of it in head, because rank 1 arrives there late (80 % of "
        "the waiting)."
    )


def test_of_ranks_with_clocks_of_their_own_it_is_known_who_is_waited_for_but_not_since_when():
    early = rank_ledger(0, ("tp", "head", 0.1, 0.2, 0.7))
    late = rank_ledger(1, ("tp", "head", 0.6, 0.7, 0.7), clock=500.0)
    (place,) = places(early.account.lines)
    assert lateness(place, [early, late]) == (pytest.approx(0.5), {})
    assert waited_more(place, [early, late]) == {1: pytest.approx(0.5)}
    assert verdict([early, late], []).endswith("in head, because the others wait there for rank 1.")


def test_a_rank_that_has_not_done_the_same_is_not_compared():
    early = rank_ledger(0, ("tp", "head", 0.1, 0.2, 0.7))
    other = rank_ledger(1, ("tp", "head", 0.3, 0.3, 0.3), ("tp", "head", 0.6, 0.7, 0.7))
    assert lateness(places(early.account.lines)[0], [early, other])[1] == {}


@pytest.mark.parametrize(
    ("axis", "cause"), [("pp", "the bubble of the pipeline"), ("checkpoint", "the disk takes that long")]
)
def test_a_stage_and_a_disk_are_waited_for_as_such(axis, cause):
    said = verdict([rank_ledger(0, (axis, "", 0.1, 0.2, 0.7), ("tp", "head", 0.8, 0.8, 0.9))], [])
    assert f"most of it in all_gather over {axis}, because" in said and said.endswith(f"{cause}.")


def test_what_is_hidden_alone_and_incomplete_is_said():
    hidden = rank_ledger(0, ("tp", "head", 0.1, 0.7, 0.7))
    assert (
        verdict([hidden], []) == "0 % of a step is exposed: 100 % of the bytes that ranks read were hidden."
    )
    assert verdict([rank_ledger(0)], []) == "Nothing was exchanged; 100 % of a step is computing."
    full = dataclasses.replace(hidden, account=dataclasses.replace(hidden.account, lost=3))
    assert verdict([full], []).endswith("hidden; the ledger ran full, so this is incomplete.")


def test_without_a_ledger_there_is_what_the_metrics_say():
    assert verdict([], METRICS).startswith("25 % of a step is exposed in the rank that waits most; a ledger")
    unmeasured = [{"step": 1, "loss": 1.0, "step_time_s": 1.0, "exposed_comm_s": None}]
    assert "was not measured" in verdict([], unmeasured)
    assert "no step" in verdict([], [])
    assert tiles([], []) == []


def test_four_tiles_are_of_the_steps_after_the_first():
    found = {tile.label: (tile.value, tile.note) for tile in tiles([], METRICS)}
    assert list(found) == ["tok/s", "MFU", "exposed", "validation loss"]
    assert found["tok/s"] == ("2,000", "200 ms a step")
    assert found["exposed"][0] == "25 %"
    assert found["validation loss"] == ("3.500", "nats per token, step 2")
    without = [{**line, "mfu": None, "val_loss": None} for line in METRICS]
    labels = {tile.label: tile.value for tile in tiles([], without)}
    assert labels == {"tok/s": "2,000", "of the limit": "75 %", "exposed": "25 %", "training loss": "4.000"}


def test_a_loop_of_one_s_own_has_the_tiles_of_its_ledgers():
    ledgers = [rank_ledger(0, ("tp", "head", 0.1, 0.2, 0.7)), rank_ledger(1, ("tp", "head", 0.6, 0.7, 0.7))]
    found = [(tile.label, tile.value, tile.note) for tile in tiles(ledgers, [])]
    assert found == [
        ("of the limit", "75 %", "100 % is nothing exposed"),
        ("exposed", "25 %", "of a step; ranks 0 to 50 %"),
        ("a step", "1,000 ms", "mean"),
        ("computing", "75 %", "of a step"),
    ]
    assert next(tile for tile in tiles(ledgers, METRICS) if tile.label == "exposed").note == found[1][2]
