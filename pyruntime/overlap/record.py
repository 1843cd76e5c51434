"""Records this rank's ledger around any code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyruntime.comm.core import _C
from pyruntime.overlap.account import Account, Entry, EntryKind, ThreadTimeline, account, without

AXES = ("tp", "cp", "pp", "dp", "checkpoint", "offload")
"""Axes in the order of their numbers in csrc/core/ledger/traffic.h."""
_CPU = torch.device("cpu")
_TIMES = slice(7, 10)
"""Columns of the core's rows: begin, wanted, end."""
CAPACITY = 1 << 18
"""Number of entries, of 80 bytes each: some 50 steps of a model of 32 layers."""


def entered(
    kind: EntryKind,
    axis: str,
    name: str,
    begin: float,
    size: int = 0,
    peer: int = -1,
    end: float | None = None,
) -> None:
    """Records an entry of Python code from `begin` to `end` (None: now), seconds of time.monotonic, if a
    ledger is on. Raises ValueError for an `axis` that is not in AXES."""
    _C.ledger_enter(int(kind), axis, name, peer, size, begin, time.monotonic() if end is None else end)


def _plain(name: str) -> str:
    """Returns an operator's name without C++ namespaces and templates."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    node = re.fullmatch(r"torch::autograd::(.+)", name)
    if node is None:
        return name
    made_here = re.search(r"(\w+)>$", node[1])  # torch::autograd::CppNode<pyruntime::(...)::ColumnLinear>
    return f"{made_here[1]} backward" if made_here else node[1].rpartition("::")[2]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The entries of one rank from `begin` to `end`, seconds of time.monotonic. Those of a device's stream
    have points in place of times until they are `read`."""

    rows: Tensor
    """One row for each entry, in the C++ core's columns."""
    begin: float
    end: float
    thread: int
    """The computing thread."""
    lost: int
    """Number of entries for which there was no room."""
    device: torch.device = _CPU
    """The CPU once the times are known."""

    def read(self) -> Stretch:
        """Returns the same with the times of all points; waits until the device has come to the last."""
        return self if self.device.type == "cpu" else _with_times(self)

    @functools.cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The entries in the order in which they ended."""
        names, rows = [_plain(name) for name in _C.ledger_names()], self.rows.tolist()
        return tuple(
            Entry(
                EntryKind(int(kind)),
                AXES[int(axis)] if axis >= 0 else "",
                names[int(name)],
                names[int(layer)],
                int(peer),
                int(thread),
                int(size),
                begin,
                wanted,
                end,
                int(sender),
                left,
                arrived,
            )
            for kind, axis, name, layer, peer, thread, size, begin, wanted, end, sender, left, arrived in rows
        )

    def account(self) -> Account:
        """Returns the account of this period: the parts of its time, and what hid the bytes."""
        return account(self.entries, self.begin, self.end, self.thread, self.lost)


def _with_times(stretch: Stretch) -> Stretch:
    """See `Stretch.read`. Entries whose points are of too long ago to be known count as lost."""
    rows, ends = stretch.rows.clone(), [int(-stretch.begin), int(-stretch.end)]
    is_of_host = rows[:, _TIMES.start] >= 0
    times = rows[:, _TIMES]
    points, places = times[times < 0].neg().long().unique(return_inverse=True)
    found = torch.tensor(_C.stream_clock_read([*points.tolist(), *ends]), dtype=torch.float64)[:, 0]
    times[times < 0] = found[:-2][places]
    is_known = times.isfinite().all(1)
    begin, end = found[-2:].tolist()
    lost = stretch.lost + int((~is_known).sum())
    known = Stretch(rows[is_known], begin, end, stretch.thread, lost)
    return dataclasses.replace(known, rows=_on_one_line(known, is_of_host[is_known].tolist()))


def _on_one_line(known: Stretch, is_of_host: Sequence[bool]) -> Tensor:
    """Returns the rows, of which those of what the host's thread waited for, copied or summed are cut to
    where the stream did nothing: elsewhere the thread was only ahead of it."""
    entries, rows, thread = known.entries, list(known.rows), known.thread
    spent = [each.thread == thread and each.kind <= EntryKind.SUM for each in entries]
    own = [each for each, is_own, host in zip(entries, spent, is_of_host, strict=True) if is_own and not host]
    ops = ThreadTimeline(each for each in own if each.kind is EntryKind.OP)
    others = ThreadTimeline(each for each in own if each.kind is not EntryKind.OP)
    kept: list[Tensor] = []
    around: Entry | None = None
    for index in reversed(range(len(entries))):  # an operator is entered after what happened in it
        entry = entries[index]
        if not (spent[index] and is_of_host[index]):
            around = entry if spent[index] and entry.kind is EntryKind.OP else around
            kept.append(rows[index])
            continue
        entry = dataclasses.replace(entry, begin=max(entry.begin, known.begin), end=min(entry.end, known.end))
        busy = ThreadTimeline(op for op in ops.between(entry.begin, entry.end) if op is not around)
        for part in reversed(without(without([entry], busy), others)):
            row = rows[index].clone()
            row[_TIMES] = torch.tensor([part.begin, part.begin, part.end], dtype=row.dtype)
            kept.append(row)
    return torch.stack(kept[::-1]) if kept else known.rows


class Ledger:
    """This rank's ledger while it is on, and the recorded `stretch` afterwards."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        begin = time.monotonic()
        self.stretch = Stretch(torch.empty(0, 13), begin, begin, 0, 0)
        """The entries since the ledger was switched on, or since the last `take`. Set at the end."""
        self._device = device
        self._thread = _C.ledger_start(capacity, str(device))
        self._begin = self._now()

    def _now(self) -> float:
        return time.monotonic() if self._device.type == "cpu" else -float(_C.stream_clock_mark())

    def take(self) -> Stretch:
        """Returns the entries since the ledger was switched on, or since the last `take`."""
        begin, self._begin = self._begin, self._now()
        rows, lost = _C.ledger_take()
        return Stretch(rows, begin, self._begin, self._thread, lost, self._device)

    def account(self) -> Account:
        """Returns the account of `stretch`."""
        return self.stretch.account()


@contextlib.contextmanager
def ledger(capacity: int = CAPACITY, device: torch.device | str = "cpu") -> Iterator[Ledger]:
    """Records what this rank computes, waits for, copies, sums, reads and sends while the block runs:

        with pyruntime.ledger() as ledger:
            model(x).sum().backward()
        print(table(ledger.account()))  # pyruntime.overlap.table

    Ranks may switch their ledgers on and off independently.

    Args:
        capacity: number of entries that there is room for; later ones are counted as `lost`.
        device: where the tensors are. For a device other than the CPU the ledger is that of its current
            stream, by events: operators run there after the host has called them. What a fused kernel waits
            for counts as computing.

    Raises:
        RuntimeError: the ledger of this process is already on.
    """
    device = torch.device(device)
    if device.type != "cpu":
        _C.stream_clock_start(str(device))
    try:
        found = Ledger(capacity, device)
        try:
            with _layers_named():
                yield found
        finally:
            _C.ledger_stop()
            found.stretch = found.take().read()
    finally:
        if device.type != "cpu":
            _C.stream_clock_stop()


@contextlib.contextmanager
def _layers_named() -> Iterator[None]:
    """Within this context every operator is recorded under the path of the module that calls it, below the
    outermost module that was called.

    Replaces nn.Module.__call__, as torch.fx does to trace: a module with hooks, even global ones, takes four
    times as long to call."""
    numbers: dict[int, int] = {}
    seen: dict[int, weakref.ref] = {}  # forgets an id before another module can have it
    plain = nn.Module.__call__

    def forget(module: int, _: weakref.ref) -> None:
        del numbers[module], seen[module]

    def name_all(root: nn.Module) -> None:
        for path, module in root.named_modules():
            key = id(module)
            if key not in numbers:
                numbers[key] = _C.ledger_number_of(path or type(root).__name__)
                seen[key] = weakref.ref(module, functools.partial(forget, key))

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        number = numbers.get(id(module))
        if number is None:
            outer = _C.ledger_set_layer(0)
            if outer != 0:  # a module without a path, in one that has one
                _C.ledger_set_layer(outer)
                return plain(module, *args, **kwargs)
            name_all(module)
            number = numbers[id(module)]
        outer = _C.ledger_set_layer(number)
        try:
            return plain(module, *args, **kwargs)
        finally:
            _C.ledger_set_layer(outer)

    nn.Module.__call__ = call
    try:
        yield
    finally:
        nn.Module.__call__ = plain
        _C.ledger_set_layer(0)
