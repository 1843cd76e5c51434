"""Further groups over a process group, for ops that stay open.

A group has room for four ops at once, begun in one order on all ranks. Code that keeps ops open for long,
such as data parallelism and the ring of context parallelism, has workspaces of its own over the same process
group. Other code that calls ops on that group need not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from pyruntime.comm import pairs
from pyruntime.comm.core import _C
from pyruntime.comm.groups import Group, group_name, process_group


class OpenOps(Protocol):
    """Code that keeps ops open on a companion."""

    def drop(self) -> None:
        """Drops them, because the companion's memory is freed."""


@dataclass
class Companion:
    """A companion of a group. Ops of the C++ core know it by `name`; torch does not know it."""

    group: str
    """The name of the group that it belongs to."""
    name: str
    open: OpenOps | None = None
    """Data parallelism's ops, for all models that are sharded over the group."""
    sends: WeakSet[_C.LineSend] = field(default_factory=WeakSet)
    """Sends that are still referenced, if only by the traceback of an error."""
    agreed: set[int] = field(default_factory=set)
    """Digests of calls that its ranks have found to be alike."""
    pairs: list[str] = field(default_factory=list)
    """The names of the process groups that were made for it (pairs.py)."""

    def send(self, rows: int, width: int, dtype: torch.dtype, device: str, agreement: int = 0) -> _C.LineSend:
        """Opens a send of [rows, width] from rank 0 of this companion, which has two ranks."""
        send = _C.LineSend(self.name, rows, width, dtype, device, 0, agreement)
        # Added to the companion that close() finds.
        _companions.get(process_group(self.group), {}).get(self.name, self).sends.add(send)
        return send

    def let_go(self) -> None:
        """Drops the ops that are open."""
        if self.open is not None:
            self.open.drop()
        for send in list(self.sends):
            send.abandon()

    def end_pairs(self) -> None:
        """Destroys the process groups that were made for it, once its memory is freed."""
        while self.pairs:
            pairs.end(self.pairs.pop())


_companions: WeakKeyDictionary[dist.ProcessGroup, dict[str, Companion]] = WeakKeyDictionary()
"""The companions by process group and name. They end with their process group, which takes no attributes."""


def companion(
    group: Group, traffic_class: str, edge: tuple[int, int] | None = None, within: int = 0
) -> Companion:
    """Returns the companion of `group` in `traffic_class`, with the group's present transport and deadline:
    of all its ranks, or of the two of an `edge`. within: its place within the class; chunks of a lower place
    leave first. Every rank of it calls this alike."""
    served = process_group(group)
    served_name = group_name(served)
    name = _C.make_companion(served_name, traffic_class, edge, within)
    if served not in _companions:
        for ended in [each for each in _companions if not _is_registered(each)]:
            del _companions[ended]  # open ops may keep their mesh, and the mesh the process group
        _companions[served] = {}
    return _companions[served].setdefault(name, Companion(served_name, name))


def _make_pair(
    name: str, companion: str, served: str, ranks: Sequence[int], rank: int, device_type: str
) -> None:
    pairs.make(name, companion, served, ranks, rank, device_type)
    _companions[process_group(served)][companion].pairs.append(name)


_C.set_pair_maker(_make_pair)


def forget(name: str) -> None:
    """Closes the companions of the group of that name, because the group ends."""
    known = _of_group(name)
    for group in [each for each in _companions if each.group_name == name]:
        del _companions[group]
    for each in known:
        each.let_go()
        _C.close_group(each.name)
        each.end_pairs()


def close(group: Group) -> None:
    """Frees the workspaces of `group` and of its companions; deadline and transport stay.

    The next op makes the workspaces anew (collectively). Call it on all ranks to go on after an error. Data
    parallelism's open ops are dropped: shard the model anew.
    """
    companions = _of_group(group_name(group))
    for known in companions:
        known.let_go()
    _C.free_workspaces(group_name(group))
    for known in companions:
        _C.free_workspaces(known.name)
        known.end_pairs()


def _of_group(name: str) -> list[Companion]:
    return [each for known in _companions.values() for each in known.values() if each.group == name]


def _is_registered(group: dist.ProcessGroup) -> bool:
    try:
        return process_group(group.group_name) is group
    except ValueError:
        return False
