"""Further groups over a process group, for ops that stay open.

A group has room for four ops at once, begun in one order on all ranks. What keeps ops open for long, such
as data parallelism and the ring of context parallelism, has workspaces of its own over the same process
group, so that whoever calls ops on that one need not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
import torch.distributed as dist

from pyruntime.comm.core import _C
from pyruntime.comm.groups import Group, group_name, process_group


@dataclass
class Companion:
    """A companion of a group. `name` is what ops of the C++ core know it by; torch does not."""

    process_group: dist.ProcessGroup
    group: str
    """The name of that one."""
    name: str
    drop: Callable[[], None] | None = None
    """Called before what the companion holds is freed: lets go of the ops that are open."""
    sends: WeakSet[_C.LineSend] = field(default_factory=WeakSet)
    """Those that somebody still holds, be it the traceback of an error."""

    def send(self, rows: int, width: int, dtype: torch.dtype, device: str, agreement: int = 0) -> _C.LineSend:
        """A send of [rows, width] from rank 0 of this companion, which is of two ranks."""
        send = _C.LineSend(self.name, rows, width, dtype, device, 0, agreement)
        _companions.get(self.name, self).sends.add(send)  # of the one that close() lets go
        return send

    def let_go(self) -> None:
        """Of the ops that are open."""
        if self.drop is not None:
            self.drop()
        for send in list(self.sends):
            send.abandon()


_companions: dict[str, Companion] = {}
"""By name."""


def companion(
    group: Group, traffic_class: str, edge: tuple[int, int] | None = None, within: int = 0
) -> Companion:
    """The companion of `group` in `traffic_class`, with the group's transport and deadline of this moment:
    of all its ranks, or of the two of an `edge`. within: its place within the class; chunks of a lower one
    leave first. Every rank of it calls this alike."""
    served = process_group(group)
    served_name = group_name(served)
    name = _C.make_companion(served_name, traffic_class, edge, within)
    known = _companions.get(name)
    if known is None or known.process_group is not served:
        known = _companions[name] = Companion(served, served_name, name)
    return known


def forget(name: str) -> None:
    """Closes the companions of the group of that name, which ends."""
    for known in _of_group(name):
        del _companions[known.name]
        known.let_go()
        _C.close_group(known.name)


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
    return [known for known in _companions.values() if known.group == name]
