"""Schedules survive their CSV, and what cannot be read is named by line and cell."""

import dataclasses

import pytest

from pyruntime.pipeline import KINDS, check, from_csv, make_schedule, to_csv
from tests.pipeline.cases import sizes

TABLE = """kind,1f1b,micro_batches,2,slices,1,placement,0 1
F0.0,F0.1,B0.0,B0.1
F1.0,B1.0,F1.1,B1.1
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_survives_its_table(kind):
    for p, m, v, q in sizes(kind, 4, 4):
        schedule = make_schedule(kind, p, m, virtual=v, slices=q)
        assert from_csv(to_csv(schedule)) == schedule


def test_paths_survive_their_table():
    for ranks, micro_batches, skip in ((4, 3, 1), (5, 4, 2), (6, 5, 1)):
        schedule = make_schedule("1f1b", ranks, micro_batches, skip=skip)
        assert from_csv(to_csv(schedule)) == schedule


def test_the_table_reads_as_documented():
    schedule = make_schedule("1f1b", 2, 2)
    assert to_csv(schedule) == TABLE
    spread = TABLE.replace("B1.0,", "B1.0, ,") + "\n"
    assert from_csv(spread) == schedule


def test_transfers_in_unusual_places_are_kept():
    schedule = make_schedule("1f1b", 2, 2)
    first = schedule.actions[1]
    early = (first[0], next(a for a in first if str(a) == "RA1.1"))
    own = early + tuple(action for action in first if action not in early)
    schedule = dataclasses.replace(schedule, kind='mine, "early"', actions=(schedule.actions[0], own))
    check(schedule)
    written = to_csv(schedule)
    assert "RA1.0,RA1.1,F1.0" in written
    assert from_csv(written) == schedule


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("F1.1", "Q1.1", "line 3, cell 3: Q1.1 begins with none of F, B, I, W, SA, RA, SG, RG."),
        ("B0.0", "B0", "line 2, cell 3: B0 is no action; write e.g. F0.3, or F0.3/1 for slice 1."),
        ("F1.1", "F2.1", "line 3, cell 3: F2.1 names stage 2, but line 1 places 2 stage(s)."),
        ("F1.1", "F1.9999999999", "line 3, cell 3: expected a number"),
        ("kind,", "kin,", "line 1, cell 1: expected kind, found kin."),
        ("batches,2", "batches,two", "line 1, cell 4: expected a number, found two."),
        ("placement,0 1", "placement,", "line 1, cell 8: expected the rank of each stage, found nothing;"),
        (",placement,0 1", "", "line 1, cell 7: expected placement, found nothing."),
        ("0 1\n", "0 1,2\n", "line 1, cell 9: expected paths, found 2."),
        ("0 1\n", "0 1,paths,0-1 0-x\n", "line 1, cell 10: expected a number, found x."),
        ("0 1\n", "0 1,paths,0-1,2\n", "line 1: expected 10 cells, found 11."),
        ("0 1\n", "0 2\n", "stages are placed on 3 rank(s), but there are 2 line(s) of actions below it;"),
        (TABLE, "", "The table is empty; its first line must be kind,micro_batches,slices,placement,"),
    ],
)
def test_what_cannot_be_read_is_named(old, new, sentence):
    assert old in TABLE
    with pytest.raises(ValueError) as unread:
        from_csv(TABLE.replace(old, new))
    assert sentence in str(unread.value)
