"""Computes when chunks left their senders, by the reader's clock.

Every host has its own clock. For two ranks that sent each other chunks, the shortest transfer is assumed to
take the same time in both directions, as in the Network Time Protocol (RFC 5905, section 8). Half of the
measured difference is then the offset of their clocks. Its error is half of the true difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pyruntime.overlap.account import Entry, EntryKind
from pyruntime.overlap.files import RankLedger


@dataclasses.dataclass(frozen=True)
class Departure:
    """The departure of a chunk from another host."""

    rank: int
    """The rank of the run that sent it to the reader."""
    at: float
    """When it left, in seconds of the reader's clock."""


def departures(ledgers: Sequence[RankLedger]) -> list[dict[int, Departure]]:
    """Returns, for each ledger, the departures by the index of the entry that read the chunk. Left out are
    reads from ranks of the same host, and reads whose sender or clock offset is unknown."""
    ranks = {tuple(sorted(ledger.coordinate.items())): ledger.rank for ledger in ledgers}
    read = [
        [
            (index, entry, sender)
            for index, entry in enumerate(ledger.entries)
            if entry.kind is EntryKind.READ and (sender := _sender(ledger, entry, ranks)) is not None
        ]
        for ledger in ledgers
    ]
    shortest: dict[tuple[int, int], float] = {}
    for ledger, found in zip(ledgers, read, strict=True):
        for _, entry, sender in found:
            way = sender, ledger.rank
            shortest[way] = min(entry.arrived - entry.left, shortest.get(way, float("inf")))

    def ahead(reader: int, sender: int) -> float:
        return (shortest[sender, reader] - shortest[reader, sender]) / 2

    return [
        {
            index: Departure(sender, entry.left + ahead(ledger.rank, sender))
            for index, entry, sender in found
            if (ledger.rank, sender) in shortest
        }
        for ledger, found in zip(ledgers, read, strict=True)
    ]


def _sender(ledger: RankLedger, entry: Entry, ranks: dict[tuple, int]) -> int | None:
    """Returns the rank of the run that sent the chunk of `entry`; a group is a line of the mesh."""
    if entry.sender < 0 or entry.axis not in ledger.coordinate:
        return None
    return ranks.get(tuple(sorted({**ledger.coordinate, entry.axis: entry.sender}.items())))
