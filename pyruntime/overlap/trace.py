"""Converts the timeline of a step to the format of chrome://tracing and Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyruntime.overlap.account import Entry, EntryKind
from pyruntime.overlap.departures import Departure, departures
from pyruntime.overlap.files import RankLedger

COMPUTING = "computing"


def chrome_trace(ledgers: Sequence[RankLedger]) -> dict[str, Any]:
    """Returns the trace, with a process for each rank. In it, one row has computing, waiting, copying and
    summing. Each axis has a row with the chunks under way, which may overlap, and a row with the chunks sent
    to other hosts; an arrow leads from each to where it was read. Times are microseconds from the beginning
    of each rank's step, because every host has its own clock."""
    events: list[dict[str, Any]] = []
    begins = {ledger.rank: ledger.begin for ledger in ledgers}
    for ledger, left in zip(ledgers, departures(ledgers), strict=True):
        about = {"pid": ledger.rank, "ph": "M"}
        events.append({**about, "name": "process_name", "args": {"name": f"rank {ledger.rank}"}})
        for number, entry in enumerate(ledger.entries):
            events += _events(entry, ledger, number)
            if number in left:
                events += _flow(entry, ledger, number, left[number], begins[left[number].rank])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(entry: Entry, ledger: RankLedger, number: int) -> list[dict[str, Any]]:
    name = f"{entry.layer}: {entry.name}" if entry.layer else entry.name
    at, microseconds = (entry.begin - ledger.begin) * 1e6, entry.seconds * 1e6
    if entry.kind in (EntryKind.SENT, EntryKind.ARRIVED):
        return []
    if entry.kind is EntryKind.READ:
        about = {
            "pid": ledger.rank,
            "tid": entry.axis,
            "cat": entry.axis,
            "id": f"{ledger.rank}-{number}",
            "name": name,
        }
        waited = (entry.end - entry.wanted) * 1e6
        args = {
            "bytes": entry.bytes,
            "peer": f"{entry.axis} {entry.peer}" if entry.peer >= 0 else "",
            "waited_us": waited,
        }
        begin = {**about, "ph": "b", "ts": at, "args": args}
        return [begin, {**about, "ph": "e", "ts": at + microseconds}]
    row = COMPUTING if entry.thread == ledger.thread else f"thread {entry.thread}"
    if entry.kind is not EntryKind.OP:
        name = f"{entry.kind.name.lower()} {entry.axis} {name}"
    return [{"pid": ledger.rank, "tid": row, "ph": "X", "name": name, "ts": at, "dur": microseconds}]


def _flow(
    entry: Entry, ledger: RankLedger, number: int, left: Departure, sender_began: float
) -> list[dict[str, Any]]:
    """Returns the chunk on the sender's row, and the arrow from it to the reader's thread."""
    about = {"cat": entry.axis, "name": f"{entry.axis} chunk"}
    place = {"pid": left.rank, "tid": f"{entry.axis} sent", "ts": (entry.left - sender_began) * 1e6}
    row = COMPUTING if entry.thread == ledger.thread else f"thread {entry.thread}"
    read = {"pid": ledger.rank, "tid": row, "ts": (entry.end - ledger.begin) * 1e6}
    arrow = {**about, "id": f"{ledger.rank}-{number}"}
    under_way = {**about, **place, "ph": "X", "dur": (entry.arrived - left.at) * 1e6}
    return [under_way, {**arrow, **place, "ph": "s"}, {**arrow, **read, "ph": "f", "bp": "e"}]
