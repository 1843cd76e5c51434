"""Accounts of a rank's time: how it was spent, and which operators hid the transfers.

These are pure functions of a ledger's entries; they need no C++ core, process group or clock.

The computing thread's time has five parts, which add up: waiting for peers (by axis), copying, summing,
computing and the rest. Computing is time inside an operator of torch or of ours, less the first three. The
rest is Python, and all else between operators. On a device its stream stands in place of the thread, and in
the rest it has nothing to do.

A chunk is under way from the moment its op began on this rank until it was requested and had arrived. While
the rank waited in that time, for this chunk or another, the chunk was exposed. The rest of that time it was
hidden behind the operators that the rank computed.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

NOTHING = "nothing of torch"
"""Stands for an operator where bytes were hidden while the rank was between operators."""


class EntryKind(enum.IntEnum):
    """Kinds of entries, with the numbers of csrc/core/ledger/ledger.h."""

    OP = 0
    WAIT = 1
    COPY = 2
    SUM = 3
    READ = 4
    SENT = 5
    ARRIVED = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """An operator, wait, copy, sum or transfer of a rank. Times are seconds of its host's monotonic clock."""

    kind: EntryKind
    axis: str
    """tp, cp, pp, dp, checkpoint or offload; empty for operators."""
    name: str
    """The operator."""
    layer: str
    """Path of the module whose operator it belongs to; empty: none."""
    peer: int
    """Rank of the process group; -1: several or none."""
    thread: int
    bytes: int
    begin: float
    wanted: float
    """READ: when a thread requested the bytes."""
    end: float
    sender: int = -1
    """READ: the rank of the process group, on another host, that sent the bytes to this rank; -1: this rank
    did not receive them itself."""
    left: float = 0.0
    """READ: when they left the sender, by its host's clock; 0 without a sender."""
    arrived: float = 0.0
    """READ: when they had all arrived on this rank; 0 without a sender."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class AxisCost:
    """A rank's bytes and exposed time over one axis."""

    bytes_read: int
    bytes_sent: int
    """Bytes sent to other hosts; ranks of one host read each other's memory. For checkpoints
    and offloaded states: written to the disk (to host memory), and `bytes_read` from it."""
    chunks: int
    hidden_bytes: float
    exposed_s: float
    """Seconds in which the computing thread waited for peers."""

    @property
    def hidden(self) -> float:
        """Hidden share of the bytes read."""
        return self.hidden_bytes / self.bytes_read if self.bytes_read else 1.0


@dataclasses.dataclass(frozen=True)
class Hidden:
    """The bytes that one operator of a layer read over one axis."""

    axis: str
    layer: str
    name: str
    bytes: int
    hidden_bytes: float
    exposed_s: float
    behind: dict[str, float]
    """Hidden bytes by the operator that hid them ("layer: operator"), the most first."""


@dataclasses.dataclass(frozen=True)
class Account:
    """A rank's time over a period, by parts that add up to `seconds`."""

    seconds: float
    computing_s: float
    copying_s: float
    summing_s: float
    rest_s: float
    axes: dict[str, AxisCost]
    lines: tuple[Hidden, ...]
    """Most exposed first, then by bytes."""
    lost: int = 0
    """Entries for which the ledger had no room: above 0 all figures are incomplete."""

    @property
    def exposed_s(self) -> float:
        return sum(axis.exposed_s for axis in self.axes.values())


def account(entries: Sequence[Entry], begin: float, end: float, thread: int, lost: int = 0) -> Account:
    """Returns the account of `thread` from `begin` to `end`, in seconds of the entries' clock.

    Waits and operators of other threads are left out; their reads and sends count."""
    own = [entry for entry in entries if entry.thread == thread]
    ops = sorted((e for e in own if e.kind is EntryKind.OP), key=lambda entry: entry.begin)
    spent = [entry for entry in own if entry.kind in (EntryKind.WAIT, EntryKind.COPY, EntryKind.SUM)]
    copying = sum(entry.seconds for entry in spent if entry.kind is EntryKind.COPY)
    summing = sum(entry.seconds for entry in spent if entry.kind is EntryKind.SUM)
    waits = ThreadTimeline([entry for entry in spent if entry.kind is EntryKind.WAIT])
    computed = ThreadTimeline(without(ops, waits))
    moving = [entry for entry in spent if entry.kind is not EntryKind.WAIT]
    computing = sum(op.seconds for op in computed.entries) - sum(
        computed.covered(entry.begin, entry.end) for entry in moving
    )
    lines = tuple(_lines(entries, waits, computed))
    axes = _axes(entries, lines)
    total = end - begin
    rest = total - computing - copying - summing - sum(wait.seconds for wait in waits.entries)
    return Account(total, computing, copying, summing, rest, axes, lines, lost)


def without(entries: Sequence[Entry], others: ThreadTimeline) -> list[Entry]:
    """Returns the parts of entries outside all of `others`."""
    parts = []
    for entry in entries:
        begin = entry.begin
        for other in others.between(entry.begin, entry.end):
            if other.begin > begin:
                parts.append(dataclasses.replace(entry, begin=begin, end=other.begin))
            begin = max(begin, other.end)
        if entry.end > begin:
            parts.append(dataclasses.replace(entry, begin=begin))
    return parts


class ThreadTimeline:
    """Entries of one thread that do not overlap, in order."""

    def __init__(self, entries: Iterable[Entry]):
        self.entries = sorted(entries, key=lambda entry: entry.begin)
        self._begins = [entry.begin for entry in self.entries]

    def between(self, begin: float, end: float) -> Iterator[Entry]:
        """Yields the entries that overlap the time from `begin` to `end`, in order."""
        first = max(0, bisect_right(self._begins, begin) - 1)
        for entry in itertools.islice(self.entries, first, None):
            if entry.begin >= end:
                return
            if entry.end > begin:
                yield entry

    def during(self, begin: float, end: float) -> dict[str, float]:
        """Returns the seconds of each operator ("layer: operator") between two times."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for op in self.between(begin, end):
            name = f"{op.layer}: {op.name}" if op.layer else op.name
            seconds[name] += min(end, op.end) - max(begin, op.begin)
        return dict(seconds)

    def covered(self, begin: float, end: float) -> float:
        """Returns the seconds between two times that entries cover."""
        return sum(self.during(begin, end).values())


def _lines(entries: Sequence[Entry], waits: ThreadTimeline, computed: ThreadTimeline) -> list[Hidden]:
    """Returns one `Hidden` for each (axis, layer, operator)."""
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
    """Adds up the accounts of several periods. Raises ValueError for none."""
    if not accounts:
        raise ValueError("There are no accounts to add up; record at least one step.")
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
    """Returns the account as text for a terminal: seconds by part, then a row for each axis, then the layers
    that waited most, at most `most`."""
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
        rows.append(f"The ledger had no room for {account.lost} entries, so all figures are incomplete.")
    return "\n".join(rows)
