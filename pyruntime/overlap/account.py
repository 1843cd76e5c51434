"""What follows from the entries of a ledger: where a rank's time went, and behind what its bytes were hidden.

Pure functions; nothing here asks the C++ core, a process group or a clock.

The time of the thread that computes is cut into five parts that close: waiting for peers (by axis), copying,
summing, computing (inside an operator of torch or of ours, less the first three) and the rest (Python, and
what else happens between operators).

A chunk that is read was on its way from the moment its op began on this rank until it was asked for and
there. It was exposed for as long as this rank waited meanwhile, for it or for another, and hidden the rest of
that time, behind the operators that this rank computed then.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

NOTHING = "nothing of torch"
"""Behind what bytes were hidden while the rank was between operators."""


class EntryKind(enum.IntEnum):
    """As csrc/core/ledger/ledger.h numbers them."""

    OP = 0
    WAIT = 1
    COPY = 2
    SUM = 3
    READ = 4
    SENT = 5
    ARRIVED = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One thing that a rank did. Times are seconds of one monotonic clock of its host."""

    kind: EntryKind
    axis: str
    """tp, cp, pp, dp or checkpoint; empty for operators."""
    name: str
    """The operator."""
    layer: str
    """Path of the module whose operator it belongs to; empty: of none."""
    peer: int
    """Rank of the process group; -1: several, or none."""
    thread: int
    bytes: int
    begin: float
    wanted: float
    """READ: when a thread asked for the bytes."""
    end: float
    sender: int = -1
    """READ: the rank of the process group that the bytes came from last, on another host; -1: this rank did
    not receive them itself."""
    left: float = 0.0
    """READ: when they left the sender, by its host's clock; 0 without one."""
    arrived: float = 0.0
    """READ: when they were all on this rank; 0 without a sender."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class AxisCost:
    """What one axis has cost a rank."""

    bytes_read: int
    bytes_sent: int
    """To other hosts; ranks of one host read each other's memory. Of checkpoints: to the disk, and
    `bytes_read` from it."""
    chunks: int
    hidden_bytes: float
    exposed_s: float
    """Seconds in which the thread that computes waited for peers."""

    @property
    def hidden(self) -> float:
        """Share of the bytes read."""
        return self.hidden_bytes / self.bytes_read if self.bytes_read else 1.0


@dataclasses.dataclass(frozen=True)
class Hidden:
    """The bytes that one operator of a layer has read over one axis."""

    axis: str
    layer: str
    name: str
    bytes: int
    hidden_bytes: float
    exposed_s: float
    behind: dict[str, float]
    """Bytes by what was computed while they were on their way, the most first: "layer: operator"."""


@dataclasses.dataclass(frozen=True)
class Account:
    """Where the seconds of a stretch of time went on one rank. The parts add up to `seconds`."""

    seconds: float
    computing_s: float
    copying_s: float
    summing_s: float
    rest_s: float
    axes: dict[str, AxisCost]
    lines: tuple[Hidden, ...]
    """Most exposed first, then by bytes."""
    lost: int = 0
    """Entries for which the ledger had no room: above 0 nothing here is complete."""

    @property
    def exposed_s(self) -> float:
        return sum(axis.exposed_s for axis in self.axes.values())


def account(entries: Sequence[Entry], begin: float, end: float, thread: int, lost: int = 0) -> Account:
    """The account of what `thread` did from `begin` to `end`, seconds of the entries' clock.

    What other threads have waited or computed is left out; what they have read and sent counts."""
    own = [entry for entry in entries if entry.thread == thread]
    ops = sorted((e for e in own if e.kind is EntryKind.OP), key=lambda entry: entry.begin)
    spent = [entry for entry in own if entry.kind in (EntryKind.WAIT, EntryKind.COPY, EntryKind.SUM)]
    copying = sum(entry.seconds for entry in spent if entry.kind is EntryKind.COPY)
    summing = sum(entry.seconds for entry in spent if entry.kind is EntryKind.SUM)
    waits = ThreadTimeline([entry for entry in spent if entry.kind is EntryKind.WAIT])
    computed = ThreadTimeline(_without(ops, waits))
    moving = [entry for entry in spent if entry.kind is not EntryKind.WAIT]
    computing = sum(op.seconds for op in computed.entries) - sum(
        computed.covered(entry.begin, entry.end) for entry in moving
    )
    lines = tuple(_lines(entries, waits, computed))
    axes = _axes(entries, lines)
    total = end - begin
    rest = total - computing - copying - summing - sum(wait.seconds for wait in waits.entries)
    return Account(total, computing, copying, summing, rest, axes, lines, lost)


def _without(ops: Sequence[Entry], waits: ThreadTimeline) -> list[Entry]:
    """The parts of operators in which the thread did not wait."""
    parts = []
    for op in ops:
        begin = op.begin
        for wait in waits.between(op.begin, op.end):
            if wait.begin > begin:
                parts.append(dataclasses.replace(op, begin=begin, end=wait.begin))
            begin = max(begin, wait.end)
        if op.end > begin:
            parts.append(dataclasses.replace(op, begin=begin))
    return parts


class ThreadTimeline:
    """What one thread did, one thing after the other."""

    def __init__(self, entries: Iterable[Entry]):
        self.entries = sorted(entries, key=lambda entry: entry.begin)
        self._begins = [entry.begin for entry in self.entries]

    def between(self, begin: float, end: float) -> Iterator[Entry]:
        """What lasted at some moment between two times, in order."""
        first = max(0, bisect_right(self._begins, begin) - 1)
        for entry in itertools.islice(self.entries, first, None):
            if entry.begin >= end:
                return
            if entry.end > begin:
                yield entry

    def during(self, begin: float, end: float) -> dict[str, float]:
        """Seconds of each operator, "layer: operator", between two times."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for op in self.between(begin, end):
            name = f"{op.layer}: {op.name}" if op.layer else op.name
            seconds[name] += min(end, op.end) - max(begin, op.begin)
        return dict(seconds)

    def covered(self, begin: float, end: float) -> float:
        """Seconds between two times in which something lasted."""
        return sum(self.during(begin, end).values())


def _lines(entries: Sequence[Entry], waits: ThreadTimeline, computed: ThreadTimeline) -> list[Hidden]:
    """By (axis, layer, operator)."""
    waited: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for wait in waits.entries:
        waited[wait.axis, wait.layer, wait.name] += wait.seconds
    read: defaultdict[tuple[str, str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.kind is EntryKind.READ:
            read[entry.axis, entry.layer, entry.name].append(entry)
    lines = []
    for key in sorted({*read, *waited}):
        hidden, behind = 0.0, defaultdict[str, float](float)
        for entry in read[key]:
            unexposed = entry.seconds - waits.covered(entry.begin, entry.end)
            share = unexposed / entry.seconds if entry.seconds > 0 else 1.0
            hidden += share * entry.bytes
            names = computed.during(entry.begin, entry.end)
            names[NOTHING] = unexposed - sum(names.values())
            for name, seconds in names.items():
                if seconds > 0 and unexposed > 0:
                    behind[name] += share * entry.bytes * seconds / unexposed
        total = sum(entry.bytes for entry in read[key])
        lines.append(Hidden(*key, total, hidden, waited[key], _most_first(behind)))
    return sorted(lines, key=_most_exposed)


def _axes(entries: Sequence[Entry], lines: Sequence[Hidden]) -> dict[str, AxisCost]:
    names = sorted({entry.axis for entry in entries if entry.axis})
    reads = [entry for entry in entries if entry.kind is EntryKind.READ]
    sent = [entry for entry in entries if entry.kind is EntryKind.SENT]
    return {
        name: AxisCost(
            bytes_read=sum(entry.bytes for entry in reads if entry.axis == name),
            bytes_sent=sum(entry.bytes for entry in sent if entry.axis == name),
            chunks=sum(entry.axis == name for entry in reads),
            hidden_bytes=sum(line.hidden_bytes for line in lines if line.axis == name),
            exposed_s=sum(line.exposed_s for line in lines if line.axis == name),
        )
        for name in names
    }


def total(accounts: Sequence[Account]) -> Account:
    """One account of several stretches of time. Raises ValueError for none."""
    if not accounts:
        raise ValueError("There are no accounts to add up; enter at least one step.")
    lines: dict[tuple[str, str, str], list[Hidden]] = defaultdict(list)
    axes: dict[str, list[AxisCost]] = defaultdict(list)
    for each in accounts:
        for line in each.lines:
            lines[line.axis, line.layer, line.name].append(line)
        for name, axis in each.axes.items():
            axes[name].append(axis)
    summed = [
        Hidden(
            *key,
            sum(line.bytes for line in found),
            sum(line.hidden_bytes for line in found),
            sum(line.exposed_s for line in found),
            _behind_of(found),
        )
        for key, found in lines.items()
    ]

    def seconds_of(part: str) -> float:
        return sum(getattr(each, part) for each in accounts)

    return Account(
        seconds=seconds_of("seconds"),
        computing_s=seconds_of("computing_s"),
        copying_s=seconds_of("copying_s"),
        summing_s=seconds_of("summing_s"),
        rest_s=seconds_of("rest_s"),
        axes={name: _sum_of_axes(found) for name, found in sorted(axes.items())},
        lines=tuple(sorted(summed, key=_most_exposed)),
        lost=sum(each.lost for each in accounts),
    )


def _behind_of(lines: Sequence[Hidden]) -> dict[str, float]:
    behind: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        for name, size in line.behind.items():
            behind[name] += size
    return _most_first(behind)


def _most_first(sizes: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _sum_of_axes(axes: Sequence[AxisCost]) -> AxisCost:
    return AxisCost(
        *(sum(getattr(axis, field.name) for axis in axes) for field in dataclasses.fields(AxisCost))
    )


def _most_exposed(line: Hidden) -> tuple:
    return -line.exposed_s, -line.bytes, line.axis, line.layer, line.name


def table(account: Account, most: int = 20) -> str:
    """The account in words, for a terminal: seconds by part, then an axis a row, then the layers that waited
    most, `most` at most."""
    whole = account.seconds or 1.0
    parts = [
        ("computing", account.computing_s),
        *((f"waiting, {name}", axis.exposed_s) for name, axis in account.axes.items()),
        ("copying", account.copying_s),
        ("summing", account.summing_s),
        ("the rest (Python)", account.rest_s),
    ]
    rows = [f"{name:<20}{seconds * 1e3:>10.1f} ms {seconds / whole:>7.1%}" for name, seconds in parts]
    rows += ["", f"{'axis':<12}{'chunks':>8}{'MB read':>10}{'MB sent':>10}{'hidden':>8}{'exposed ms':>12}"]
    for name, axis in account.axes.items():
        rows.append(
            f"{name:<12}{axis.chunks:>8}{axis.bytes_read / 1e6:>10.2f}{axis.bytes_sent / 1e6:>10.2f}"
            f"{axis.hidden:>8.1%}{axis.exposed_s * 1e3:>12.2f}"
        )
    rows += ["", f"{'layer and operator':<52}{'MB':>8}{'hidden':>8}{'exposed ms':>12}  mostly behind"]
    for line in account.lines[:most]:
        share = line.hidden_bytes / line.bytes if line.bytes else 1.0
        where = f"{line.axis} {line.layer}: {line.name}" if line.layer else f"{line.axis} {line.name}"
        rows.append(
            f"{where:<52}{line.bytes / 1e6:>8.2f}{share:>8.1%}{line.exposed_s * 1e3:>12.2f}"
            f"  {next(iter(line.behind), '-')}"
        )
    if len(account.lines) > most:
        rows.append(f"and {len(account.lines) - most} more")
    if account.lost:
        rows.append(f"{account.lost} entries found no room, so none of this is complete.")
    return "\n".join(rows)
