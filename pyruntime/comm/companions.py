"""Further groups over a process group, for ops that stay open.

A group has room for four ops at once, begun in one order on all ranks. What keeps ops open for long, such
as data parallelism and the ring of context parallelism, has workspaces of its own over the same process
group, so that whoever calls ops on that one need not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from pyruntime.comm.core import _C
from pyruntime.comm.groups import Group, group_name, process_group


class OpenOps(Protocol):
    """Keeps ops open on a companion."""

    def drop(self) -> None:
        """Lets go of them: what the companion holds is freed."""


@dataclass
class Companion:
    """A companion of a group. `name` is what ops of the C++ core know it by; torch does not."""

    group: str
    """The name of that one."""
    name: str
    open: OpenOps | None = None
    """Of data parallelism, for all models that are sharded over the group."""
    sends: WeakSet[_C.LineSend] = field(default_factory=WeakSet)
    """Those that somebody still holds, be it the traceback of an error."""
    agreed: set[int] = field(default_factory=set)
    """Digests of the calls that its ranks have found to be alike."""

    def send(self, rows: int, width: int, dtype: torch.dtype, device: str, agreement: int = 0) -> _C.LineSend:
        """A send of [rows, width] from rank 0 of this companion, which is of two ranks."""
        send = _C.LineSend(self.name, rows, width, dtype, device, 0, agreement)
        # Of the one that close() lets go.
        _companions.get(process_group(self.group), {}).get(self.name, self).sends.add(send)
        return send

    def let_go(self) -> None:
        """Of the ops that are open."""
        if self.open is not None:
            self.open.drop()
        for send in list(self.sends):
            send.abandon()


_companions: WeakKeyDictionary[dist.ProcessGroup, dict[str, Companion]] = WeakKeyDictionary()
"""By name. They end with their process group, which takes no attributes."""


def companion(
    group: Group, traffic_class: str, edge: tuple[int, int] | None = None, within: int = 0
) -> Companion:
    """The companion of `group` in `traffic_class`, with the group's transport and deadline of this moment:
    of all its ranks, or of the two of an `edge`. within: its place within the class; chunks of a lower one
    leave first. Every rank of it calls this alike."""
    served = process_group(group)
    served_name = group_name(served)
    name = _C.make_companion(served_name, traffic_class, edge, within)
    if served not in _companions:
        for ended in [each for each in _companions if not _is_registered(each)]:
            del _companions[ended]  # what is open there may keep its mesh, and that the process group
        _companions[served] = {}
    return _companions[served].setdefault(name, Companion(served_name, name))


def forget(name: str) -> None:
    """Closes the companions of the group of that name, which ends."""
    known = _of_group(name)
    for group in [each for each in _companions if each.group_name == name]:
        del _companions[group]
    for each in known:
        each.let_go()
        _C.close_group(each.name)


def close(group: Group) -> None:
    """Frees the workspaces of `group` and of its companions; deadline and transport stay.

    The next op makes the workspaces anew (collectively). The way back after an error, on all ranks. What data
    parallelism has under way is dropped: shard the model anew.
    """
    companions = _of_group(group_name(group))
    for known in companions:
        known.let_go()
    _C.free_workspaces(group_name(group))
    for known in companions:
        _C.free_workspaces(known.name)


def _of_group(name: str) -> list[Companion]:
    return [each for known in _companions.values() for each in known.values() if each.group == name]


def _is_registered(group: dist.ProcessGroup) -> bool:
    try:
        return process_group(group.group_name) is group
    except ValueError:
        return False
