"""When chunks left their senders, by one clock: of entries made up here, and of ranks that sent chunks."""

from __future__ import annotations

import random

import pytest

import pyruntime
from pyruntime.overlap import Entry, EntryKind, account
from pyruntime.overlap.departures import departures
from pyruntime.overlap.files import RankLedger
from pyruntime.overlap.trace import chrome_trace
from tests.overlap.test_ledger import all_acknowledged, step, two_blocks
from tests.transports import on_transport


def ledger_of(rank: int, coordinate: dict[str, int], entries: list[Entry], begin: float) -> RankLedger:
    end = begin + 1.0
    return RankLedger(rank, coordinate, 1, account(entries, begin, end, 0), 1, begin, end, 0, tuple(entries))


def chunk(axis: str, sender: int, left: float, arrived: float) -> Entry:
    times = {"begin": arrived - 0.5, "wanted": arrived, "end": arrived + 0.001}
    return Entry(
        EntryKind.READ, axis, "op", "", sender, 0, 100, **times, sender=sender, left=left, arrived=arrived
    )


@pytest.mark.parametrize("seed", range(3))
def test_clocks_that_are_apart_are_brought_together(seed):
    """Four ranks of tp x dp, whose clocks differ by minutes: when each chunk left is found."""
    chance = random.Random(seed)
    places = [{"dp": dp, "tp": tp} for dp in range(2) for tp in range(2)]
    ahead = [chance.uniform(-500, 500) for _ in places]
    entries: list[list[Entry]] = [[] for _ in places]
    expected: list[list[tuple[int, float]]] = [[] for _ in places]
    for reader, place in enumerate(places):
        for axis in ("dp", "tp"):
            sender = places.index({**place, axis: 1 - place[axis]})
            for wire in (0.002, *(chance.uniform(0.002, 0.05) for _ in range(5))):
                left = 1000.0 + chance.uniform(0, 1)
                seen = chunk(axis, 1 - place[axis], left + ahead[sender], left + wire + ahead[reader])
                entries[reader].append(seen)
                expected[reader].append((sender, left + ahead[reader]))
    ledgers = [
        ledger_of(rank, place, entries[rank], 1000.0 + ahead[rank]) for rank, place in enumerate(places)
    ]
    for found, told in zip(departures(ledgers), expected, strict=True):
        assert [each.rank for each in found.values()] == [sender for sender, _ in told]
        assert [each.at for each in found.values()] == pytest.approx([at for _, at in told], abs=1e-9)


def test_of_one_way_traffic_of_ranks_without_a_file_and_of_one_host_no_time_is_made_up():
    one_way = chunk("tp", 1, 50.0, 50.1)
    of_nobody = chunk("tp", 7, 50.0, 50.1)
    other_axis = chunk("checkpoint", 1, 50.0, 50.1)
    of_this_host = Entry(EntryKind.READ, "tp", "op", "", 1, 0, 100, 50.0, 50.1, 50.2)
    reader = ledger_of(0, {"tp": 0}, [one_way, of_nobody, other_axis, of_this_host], 50.0)
    assert departures([reader, ledger_of(1, {"tp": 1}, [], 50.0)]) == [{}, {}]


def test_an_arrow_leads_from_the_sender_to_the_reader():
    ledgers = [
        ledger_of(0, {"tp": 0}, [chunk("tp", 1, 70.2, 50.3)], 50.0),
        ledger_of(1, {"tp": 1}, [chunk("tp", 0, 50.4, 70.5)], 70.0),
    ]
    events = chrome_trace(ledgers)["traceEvents"]
    (begin,) = [event for event in events if event["ph"] == "s" and event["pid"] == 1]
    (end,) = [event for event in events if event["ph"] == "f" and event["id"] == begin["id"]]
    assert begin["tid"] == "tp sent"
    assert begin["ts"] == pytest.approx(0.2e6)
    assert (end["pid"], end["tid"], end["ts"]) == (0, "computing", pytest.approx(0.301e6))
    (sent,) = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert sent["dur"] == pytest.approx(0.1e6)


def reads(group) -> RankLedger:
    model = two_blocks(group)
    step(model)
    with pyruntime.ledger() as ledger:
        step(model)
        all_acknowledged(group)
    rank, stretch = group.rank(), ledger.stretch
    return RankLedger(
        rank,
        {"tp": rank},
        1,
        ledger.account(),
        1,
        stretch.begin,
        stretch.end,
        stretch.thread,
        stretch.entries,
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.second_tier("2")
def test_a_chunk_left_its_sender_before_it_arrived_and_arrived_before_it_was_read(ranks, size):
    """These ranks have one clock, so what is found must be where it was without any finding."""
    ledgers = ranks.run(on_transport, size, "process_group", reads)
    for ledger, left in zip(ledgers, departures(ledgers), strict=True):
        read = {number: entry for number, entry in enumerate(ledger.entries) if entry.kind is EntryKind.READ}
        assert read.keys() == left.keys()
        for number, entry in read.items():
            assert entry.left < entry.arrived <= entry.end
            assert left[number].rank == entry.sender != ledger.rank
            assert left[number].at == pytest.approx(entry.left, abs=0.5)
            # The sender has entered that it left then: one clock, and one moment.
            sent = {each.begin for each in ledgers[entry.sender].entries if each.kind is EntryKind.SENT}
            assert entry.left in sent or entry.left < ledgers[entry.sender].begin


def test_ranks_that_share_memory_read_what_nobody_sent(ranks):
    for ledger in ranks.run(on_transport, 2, "symmetric_memory", reads):
        found = [entry for entry in ledger.entries if entry.kind is EntryKind.READ]
        assert found
        assert all((entry.sender, entry.left, entry.arrived) == (-1, 0.0, 0.0) for entry in found)
