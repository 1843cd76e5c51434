"""The ledger of this rank: switched on around any code, read when it is over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pyruntime.comm.core import _C
from pyruntime.overlap.account import Account, Entry, EntryKind, account

AXES = ("tp", "cp", "pp", "dp", "checkpoint")
"""As csrc/core/ledger/traffic.h numbers them."""
CAPACITY = 1 << 18
"""Entries, of 80 bytes each: some 50 steps of a model of 32 layers."""


def entered(
    kind: EntryKind,
    axis: str,
    name: str,
    begin: float,
    size: int = 0,
    peer: int = -1,
    end: float | None = None,
) -> None:
    """Enters what Python code has done from `begin` to `end` (None: now), seconds of time.monotonic, where a
    ledger is on. Raises ValueError for an `axis` that is none of AXES."""
    _C.ledger_enter(int(kind), axis, name, peer, size, begin, time.monotonic() if end is None else end)


def _plain(name: str) -> str:
    """An operator's name without what only C++ wants to know."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    node = re.fullmatch(r"torch::autograd::(.+)", name)
    if node is None:
        return name
    made_here = re.search(r"(\w+)>$", node[1])  # torch::autograd::CppNode<pyruntime::(...)::ColumnLinear>
    return f"{made_here[1]} backward" if made_here else node[1].rpartition("::")[2]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """What one rank has entered from `begin` to `end`, seconds of time.monotonic."""

    rows: Tensor
    """As the C++ core hands them out, a row an entry."""
    begin: float
    end: float
    thread: int
    """The one that computes."""
    lost: int
    """Entries for which there was no room."""

    @functools.cached_property
    def entries(self) -> tuple[Entry, ...]:
        """In the order in which they ended."""
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
        """Where the time went, and behind what the bytes were hidden."""
        return account(self.entries, self.begin, self.end, self.thread, self.lost)


class Ledger:
    """What this rank enters while its ledger is on."""

    def __init__(self, capacity: int) -> None:
        begin = time.monotonic()
        self.stretch = Stretch(torch.empty(0, 13), begin, begin, 0, 0)
        """What was entered since the ledger was switched on, or since the last `take`; once it is off."""
        self._thread = _C.ledger_start(capacity)
        self._begin = time.monotonic()

    def take(self) -> Stretch:
        """What was entered since the ledger was switched on, or since the last `take`."""
        begin, self._begin = self._begin, time.monotonic()
        rows, lost = _C.ledger_take()
        return Stretch(rows, begin, self._begin, self._thread, lost)

    def account(self) -> Account:
        """The account of `stretch`."""
        return self.stretch.account()


@contextlib.contextmanager
def ledger(capacity: int = CAPACITY) -> Iterator[Ledger]:
    """Enters what this rank computes, waits for, copies, sums, reads and sends while the block runs:

        with pyruntime.ledger() as ledger:
            model(x).sum().backward()
        print(table(ledger.account()))  # pyruntime.overlap.table

    Ranks may switch theirs on and off independently. Tensors on the CPU only: on devices operators run after
    the host has called them, and what is entered of them are the calls.

    Args:
        capacity: entries that there is room for; what comes after them is counted as `lost`.

    Raises:
        RuntimeError: the ledger of this process is on already.
    """
    found = Ledger(capacity)
    try:
        with _layers_named():
            yield found
    finally:
        _C.ledger_stop()
        found.stretch = found.take()


@contextlib.contextmanager
def _layers_named() -> Iterator[None]:
    """Every operator is entered under the path of the module that calls it, below the outermost module that
    was called while the block ran.

    In the place of nn.Module.__call__, as torch.fx traces: a module with hooks, be they global ones, takes
    four times as long to call."""
    numbers: dict[int, int] = {}
    seen: dict[int, weakref.ref] = {}  # which forget an id before another module can have it
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
