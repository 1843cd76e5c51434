"""A second group of the same ranks, for ops that stay open.

A group has room for four ops at once, begun in one order on all ranks. What keeps ops open for long, such as
data parallelism, has workspaces of its own over the same process group, so that whoever calls ops on the
first need not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from pyruntime.comm.core import _C
from pyruntime.comm.groups import Group, group_name, process_group


@dataclass
class Companion:
    """The companion of a group. `name` is what ops of the C++ core know it by; torch does not."""

    first: dist.ProcessGroup
    name: str
    drop: Callable[[], None] | None = None
    """Called before what the companion holds is freed: lets go of the ops that are open."""


_companions: dict[str, Companion] = {}
"""By the name of the first group."""


def companion(group: Group, traffic_class: str) -> Companion:
    """The companion of `group`, with its transport and deadline of this moment, in `traffic_class`. Every
    rank of the group calls this alike."""
    first = process_group(group)
    name = group_name(first)
    known = _companions.get(name)
    if known is None or known.first is not first:
        known = _companions[name] = Companion(first, f"{name}#{traffic_class}")
    _C.follow_settings(known.name, name)
    _C.set_traffic_class(known.name, traffic_class)
    return known


def forget(name: str) -> None:
    """Closes the companion of the group of that name, which ends."""
    known = _companions.pop(name, None)
    if known is not None:
        _drop(known)
        _C.close_group(known.name)


def close(group: Group) -> None:
    """Frees the workspaces of `group` and of its companion; deadline and transport stay.

    The next op makes the workspaces anew (collectively). The way back after an error, on all ranks. What data
    parallelism has under way is dropped: shard the model anew.
    """
    _C.free_workspaces(group_name(group))
    known = _companions.get(group_name(group))
    if known is not None:
        _drop(known)
        _C.free_workspaces(known.name)


def _drop(known: Companion) -> None:
    if known.drop is not None:
        known.drop()
