"""When the chunks that a rank read left the ranks that sent them, by one clock.

Every host has a clock of its own. Of two ranks that sent each other chunks, the shortest time from leaving to
arriving is taken to be the same both ways, as the Network Time Protocol does (RFC 5905, section 8); what it
differs by, halved, is how far their clocks are apart. It is wrong by half of what the two really differ by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pyruntime.overlap.account import Entry, EntryKind
from pyruntime.overlap.files import RankLedger


@dataclasses.dataclass(frozen=True)
class Departure:
    """Of a chunk from another host."""

    rank: int
    """The rank of the run that it left last."""
    at: float
    """Seconds of the reader's clock."""


def departures(ledgers: Sequence[RankLedger]) -> list[dict[int, Departure]]:
    """For each ledger, by the index of an entry in it. What was read from ranks of the same host is not in
    it, nor where it is not known who sent it, or how far the clocks are apart."""
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
    """The rank of the run that sent what was read; groups are the lines of the mesh."""
    if entry.sender < 0 or entry.axis not in ledger.coordinate:
        return None
    return ranks.get(tuple(sorted({**ledger.coordinate, entry.axis: entry.sender}.items())))
