"""What follows from entries, on entries whose every second is known."""

from __future__ import annotations

import random

import pytest

from pyruntime.overlap import Entry, EntryKind, account
from pyruntime.overlap.account import NOTHING, table, total


def entry(kind: EntryKind, begin: float, end: float, **facts) -> Entry:
    given = {"axis": "", "name": "op", "layer": "", "peer": -1, "thread": 0, "bytes": 0, "wanted": begin}
    return Entry(kind, begin=begin, end=end, **{**given, **facts})


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_of_a_step_are_what_it_was_made_of_and_add_up(seed):
    """A step laid end to end of operators with and without waits, copies and sums in them, and gaps."""
    chance = random.Random(seed)
    now, entries = 100.0, []
    expected = dict.fromkeys(("compute", "tp", "dp", "copy", "sum", "rest"), 0.0)

    def spend(part: str) -> tuple[float, float]:
        nonlocal now
        seconds = chance.uniform(0.001, 0.1)
        expected[part] += seconds
        begin, now = now, now + seconds
        return begin, now

    def nested() -> None:
        part = chance.choice(["tp", "dp", "copy", "sum"])
        begin, end = spend(part)
        kind = {"copy": EntryKind.COPY, "sum": EntryKind.SUM}.get(part, EntryKind.WAIT)
        entries.append(entry(kind, begin, end, axis=part if kind is EntryKind.WAIT else "tp"))

    for _ in range(200):
        spend("rest")
        begin, _ = spend("compute")
        for _ in range(chance.randrange(3)):
            nested()
            spend("compute")
        entries.append(entry(EntryKind.OP, begin, now))
        if chance.random() < 0.3:
            nested()  # outside any operator
    entries.append(entry(EntryKind.WAIT, 100.0, 100.5, axis="tp", thread=1))  # of another thread
    found = account(entries, 100.0, now, thread=0)
    assert found.computing_s == pytest.approx(expected["compute"])
    assert found.axes["tp"].exposed_s == pytest.approx(expected["tp"])
    assert found.axes["dp"].exposed_s == pytest.approx(expected["dp"])
    assert found.copying_s == pytest.approx(expected["copy"])
    assert found.summing_s == pytest.approx(expected["sum"])
    assert found.rest_s == pytest.approx(expected["rest"])
    parts = found.computing_s + found.exposed_s + found.copying_s + found.summing_s + found.rest_s
    assert parts == pytest.approx(now - 100.0)


def test_a_chunk_is_hidden_but_for_the_time_in_which_it_was_waited_for_and_behind_what_ran_then():
    entries = [
        entry(EntryKind.OP, 0.0, 2.0, layer="layers.0.up", name="mm"),
        entry(EntryKind.OP, 3.0, 9.0, layer="layers.1.up", name="mm"),
        entry(EntryKind.WAIT, 3.0, 4.0, axis="tp", layer="layers.1.up", name="gather"),
        entry(EntryKind.READ, 0.0, 4.0, wanted=3.0, axis="tp", layer="layers.1.up", name="gather", bytes=400),
        entry(EntryKind.READ, 4.0, 4.0, wanted=4.0, axis="tp", layer="layers.1.up", name="gather", bytes=100),
        entry(EntryKind.SENT, 0.5, 3.5, axis="tp", name="gather", bytes=70),
    ]
    found = account(entries, 0.0, 10.0, thread=0)
    (line,) = found.lines
    assert (line.axis, line.layer, line.name, line.bytes) == ("tp", "layers.1.up", "gather", 500)
    assert line.hidden_bytes == pytest.approx(400 * 3 / 4 + 100)
    assert line.exposed_s == pytest.approx(1.0)
    assert line.behind == pytest.approx({"layers.0.up: mm": 200.0, NOTHING: 100.0})
    tp = found.axes["tp"]
    assert (tp.bytes_read, tp.bytes_sent, tp.chunks) == (500, 70, 2)
    assert tp.hidden == pytest.approx(0.8)
    assert found.computing_s == pytest.approx(7.0)
    assert found.rest_s == pytest.approx(2.0)


def test_what_was_waited_for_another_chunk_hides_nothing():
    """Of three chunks that a gather without any GEMM reads the first is waited for, the others are there."""
    reads = [
        entry(EntryKind.READ, 0.0, 4.0, wanted=wanted, axis="tp", name="all_gather", bytes=100)
        for wanted in (0.0, 4.0, 4.0)
    ]
    entries = [
        entry(EntryKind.OP, 0.0, 4.0, name="all_gather"),
        entry(EntryKind.WAIT, 0.0, 4.0, axis="tp", name="all_gather"),
        *reads,
    ]
    (line,) = account(entries, 0.0, 4.0, thread=0).lines
    assert (line.hidden_bytes, line.exposed_s, line.behind) == (0.0, 4.0, {})


def test_accounts_add_up_line_by_line():
    entries = [
        entry(EntryKind.OP, 0.0, 1.0, layer="a"),
        entry(EntryKind.READ, 0.0, 1.0, wanted=0.5, axis="dp", layer="a", bytes=10),
        entry(EntryKind.WAIT, 0.5, 1.0, axis="dp", layer="a"),
    ]
    one = account(entries, 0.0, 2.0, thread=0, lost=1)
    both = total([one, one])
    assert both.seconds == 2 * one.seconds
    assert both.computing_s == 2 * one.computing_s
    assert both.axes["dp"].bytes_read == 20
    assert both.lines[0].exposed_s == pytest.approx(1.0)
    assert both.lines[0].behind == pytest.approx({"a: op": 10.0})
    assert both.lost == 2
    with pytest.raises(ValueError, match="at least one step"):
        total([])


def test_the_table_shows_axes_layers_and_that_entries_were_lost():
    entries = [
        entry(EntryKind.OP, 0.0, 1.0, layer="a"),
        entry(
            EntryKind.READ, 0.0, 1.0, wanted=0.5, axis="dp", layer="a.b", name="all_gather", bytes=2_000_000
        ),
        entry(EntryKind.WAIT, 0.5, 1.0, axis="dp", layer="a.b", name="all_gather"),
    ]
    text = table(account(entries, 0.0, 2.0, thread=0, lost=3))
    (row,) = [line for line in text.splitlines() if "a.b: all_gather" in line]
    assert row.split() == ["dp", "a.b:", "all_gather", "2.00", "50.0%", "500.00", "a:", "op"]
    assert "no room for 3 entries" in text
