"""Further groups over a process group, for ops that stay open.

A group has room for four ops at once, begun in one order on all ranks. What keeps ops open for long, such
as data parallelism and the ring of context parallelism, has workspaces of its own over the same process
group, so that whoever calls ops on the first need not know.
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

    first: dist.ProcessGroup
    name: str
    drop: Callable[[], None] | None = None
    """Called before what the companion holds is freed: lets go of the ops that are open."""
    sends: WeakSet[_C.LineSend] = field(default_factory=WeakSet)
    """Those that somebody still holds, be it the traceback of an error."""


_companions: dict[str, Companion] = {}
"""By name."""


def companion(group: Group, traffic_class: str, edge: tuple[int, int] | None = None) -> Companion:
    """The companion of `group` in `traffic_class`, with the group's transport and deadline of this moment:
    of all its ranks, or of the two of an `edge`. Every one of them calls this alike."""
    first = process_group(group)
    served = group_name(first)
    name = f"{served}#{traffic_class}" + ("" if edge is None else f":{edge[0]}>{edge[1]}")
    known = _companions.get(name)
    if known is None or known.first is not first:
        known = _companions[name] = Companion(first, name)
    _C.follow_settings(name, served)
    _C.set_traffic_class(name, traffic_class)
    return known


def line_send(
    name: str, lines: int, width: int, dtype: torch.dtype, device: str, agreement: int = 0
) -> _C.LineSend:
    """A send of [lines, width] from rank 0 of the companion of that name, which is of two ranks."""
    send = _C.LineSend(name, lines, width, dtype, device, 0, agreement)
    _companions[name].sends.add(send)
    return send


def forget(name: str) -> None:
    """Closes the companions of the group of that name, which ends."""
    for known in _of_group(name):
        del _companions[known.name]
        _drop(known)
        _C.close_group(known.name)


def close(group: Group) -> None:
    """Frees the workspaces of `group` and of its companions; deadline and transport stay.

    The next op makes the workspaces anew (collectively). The way back after an error, on all ranks. What data
    parallelism has under way is dropped: shard the model anew.
    """
    companions = _of_group(group_name(group))
    for known in companions:
        _drop(known)
    _C.free_workspaces(group_name(group))
    for known in companions:
        _C.free_workspaces(known.name)


def _of_group(name: str) -> list[Companion]:
    return [known for known in _companions.values() if known.name.partition("#")[0] == name]


def _drop(known: Companion) -> None:
    if known.drop is not None:
        known.drop()
    for send in list(known.sends):
        send.abandon()
