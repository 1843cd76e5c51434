"""Finds process groups by whatever name the caller has for them, and sets and reads how they communicate."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pyruntime.comm.axis import Axis
from pyruntime.comm.core import _C

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | Axis | str
"""A process group, a one-dimensional DeviceMesh, an axis of a Runtime, or the name of a process group."""


def process_group(group: Group) -> dist.ProcessGroup:
    """Returns the torch process group behind `group`.

    Raises ValueError for a name that no group has and a mesh of several axes, TypeError for another type.
    """
    if isinstance(group, str):
        try:
            return dist.distributed_c10d._resolve_process_group(group)
        except (LookupError, RuntimeError) as error:
            raise ValueError(
                f"No process group has the name {group!r}; pass the group itself, or one axis of a mesh, "
                "such as runtime.tp."
            ) from error
    if isinstance(group, Axis):
        return group.group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"A group is one axis of a mesh, and this mesh has {group.ndim} {group.mesh_dim_names}; "
                'pass one of them, as in mesh["tp"].'
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "A group is a process group, its name, or one axis of a DeviceMesh, such as runtime.tp; found: "
            f"{type(group).__name__}."
        )
    return group


def group_name(group: Group) -> str:
    """Returns the name under which torch and the C++ core know `group`."""
    if isinstance(group, str):
        return group
    return process_group(group).group_name


def group_rank(group: Group) -> int:
    """Returns this process's rank in `group`."""
    return process_group(group).rank()


def group_size(group: Group) -> int:
    """Returns the number of ranks in `group`."""
    return process_group(group).size()


def rank_name(group: Group, rank: int) -> str:
    """Returns how messages name that rank of `group`: "rank 2 (tp 0, dp 1; process 4711 on node3)". The
    number is that in the job; the rest is there as far as it is known."""
    return job_rank_name(_job_ranks(group_name(group), group_size(group))[rank])


def job_rank_name(rank: int) -> str:
    """Returns the same for a rank of the job."""
    return _C.name_of_rank(rank)


def stats(group: Group) -> _C.CommStats:
    """Returns cumulative figures of this rank: `ops`, `bytes` read from peers, `waiting_s` and `moving_s`.

    waiting_s + moving_s are the seconds in which this rank's thread did nothing but wait for peers, copy
    and sum: its exposed communication.
    """
    return _C.stats(group_name(group))


def workspace_bytes(group: Group) -> int:
    """Returns the bytes of symmetric memory that this rank holds for `group`."""
    return _C.workspace_bytes(group_name(group))


def deadline(group: Group) -> float:
    """Returns the seconds that a wait on a peer of `group` may last."""
    return _C.deadline(group_name(group))


def set_deadline(group: Group, seconds: float) -> None:
    """Bounds every wait on a peer of `group` to `seconds`; then CommTimeout is raised."""
    check_deadline(seconds)
    _C.set_deadline(group_name(group), float(seconds))


def check_deadline(seconds: float) -> None:
    """Raises ValueError unless `seconds` may be a deadline."""
    if not 1e-3 <= seconds <= 1e6:
        raise ValueError(f"deadline_s={seconds} is no deadline; pass between 0.001 and 1e6 seconds.")


def configure(
    group: Group,
    *,
    deadline_s: float | None = None,
    transport: str | None = None,
    hosts: Sequence[str] | None = None,
    chunk_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    multicast: str | None = None,
    rings: Sequence[Sequence[int]] | None = None,
    traffic_class: str | None = None,
) -> None:
    """Sets how `group` communicates. All ranks must pass the same, before the first op or after `close`.
    transport, hosts, chunk_bytes, wire_dtype, multicast and rings are set together: if one of them is given,
    those left out return to their defaults.

    Args:
        deadline_s: seconds that a wait on a peer may last.
        transport: "auto" looks at where the ranks are. On one host they share memory ("symmetric_memory").
            If every host has the same number of ranks, more than one, they share memory inside a host and
            send round a ring of hosts ("hierarchical"). Otherwise they send round a ring of ranks, over the
            group's c10d backend ("process_group"). "collectives" leaves everything to the backend's own
            collectives, unfused. Tensors on a device take its copy engines inside a host; with "device"
            tensors on the CPU go the same way, to try it without a device.
        hosts: a name for each rank's host, instead of asking the ranks: to try on one machine what several
            do.
        chunk_bytes: bytes of a rank's rows that travel between hosts at once; by default chosen for each op
            from the latency and bandwidth that are measured when the group opens. On devices: the least that
            a GEMM waits for, by default 4 MiB; a rank's rows have 4 such pieces at most.
        wire_dtype: dtype of partial sums that travel between hosts: torch.bfloat16 or torch.float32; by
            default that of the operand. Each hop adds in fp32 and rounds to it.
        multicast: between GPUs of one NVLink domain. "gather": what goes to all ranks is stored once, under
            one address for all of them, and gives the same bits. "gather_and_reduce": the switch also takes
            the sums of a reduce-scatter or all-reduce, in its own order. Their bits are not those of the CPU,
            and may differ from run to run. By default "off".
        rings: between GPUs of one host of which not every two have a link of their own: orders of the group's
            ranks. In each a rank has a direct link to the next, and the last to the first. Gathered rows go
            around all of them, both ways at once, if a rank's rows have `chunk_bytes` for each of these ways;
            the same bits. By default straight to each peer.
        traffic_class: "tp", "cp", "pp", "dp" or "checkpoint": how urgent this group's chunks are beside
            those of other groups. May be changed at any time.

    Raises ValueError for other values, RuntimeError if the group has run ops already. The first op raises
    ValueError if its devices cannot do the multicast, or if rings were given for devices of several hosts.
    """
    if wire_dtype not in (None, torch.bfloat16, torch.float32):
        raise ValueError(f"wire_dtype={wire_dtype} does not travel; use torch.bfloat16 or torch.float32.")
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={chunk_bytes} is no size; pass at least 1 byte, or None.")
    if deadline_s is not None:
        set_deadline(group, deadline_s)
    name = group_name(group)
    if traffic_class is not None:
        _C.set_traffic_class(name, traffic_class)
    if any(setting is not None for setting in (transport, hosts, chunk_bytes, wire_dtype, multicast, rings)):
        named = None if hosts is None else list(hosts)
        _C.configure(name, transport, named, chunk_bytes, wire_dtype, multicast, rings)


def transport_of(group: Group) -> str:
    """Returns in words how the chunks of `group` travel; "" before its first op."""
    return _C.transport_description(group_name(group))


def crosses_hosts(group: Group, device: torch.device | str = "cpu") -> bool:
    """Whether rows of tensors on `device` travel between hosts in `group`. Collective if the group has run no
    op yet."""
    return _C.crosses_hosts(group_name(group), str(device))


@dataclass(frozen=True)
class Traffic:
    """The costs of one traffic class for this rank since the start. Seconds and bytes.

    waiting_s + moving_s are exposed: this rank's thread did nothing but wait for peers, copy and sum. Sends
    to other hosts went on beside it, in `chunks_sent` chunks. Each was queued from the moment when it might
    leave until the arbiter sent it, then took its transfer time until the receiver had it.
    """

    ops: int = 0
    bytes_read: int = 0
    waiting_s: float = 0.0
    moving_s: float = 0.0
    chunks_sent: int = 0
    bytes_sent: int = 0
    queued_s: float = 0.0
    transfer_s: float = 0.0
    recent_queued_s: tuple[float, ...] = ()
    """One for each of the last chunks (4,096 at most), in no order; for percentiles."""
    recent_transfer_s: tuple[float, ...] = ()


def exposed_s() -> float:
    """Returns the seconds in which this rank has done nothing but wait for peers, copy and sum, over all its
    open groups and their companions. Of a device's stream: in which it waited, while it is watched."""
    return sum(exposed_by_class().values())


def exposed_by_class() -> dict[str, float]:
    """Returns the same by traffic class."""
    return {name: stats.waiting_s + stats.moving_s for name, stats in _C.group_stats_by_class().items()}


def waiting_on_host_s() -> float:
    """Returns the seconds in which this rank's thread has waited for peers, over all its open groups and
    their companions, without the waits of a device's stream."""
    return _C.waiting_on_host_s()


def bytes_read(traffic_class: str) -> int:
    """Returns the bytes that this rank has read from peers in that class, over all its open groups."""
    stats = _C.group_stats_by_class().get(traffic_class)
    return 0 if stats is None else stats.bytes


def traffic() -> dict[str, Traffic]:
    """Returns the figures of this process by traffic class ("tp", "cp", ...), over all its open groups."""
    read, sent = _C.group_stats_by_class(), _C.traffic()
    result = {}
    for name in sorted({*read, *sent}):
        figures = {}
        if name in read:
            stats = read[name]
            figures = {
                "ops": stats.ops,
                "bytes_read": stats.bytes,
                "waiting_s": stats.waiting_s,
                "moving_s": stats.moving_s,
            }
        if name in sent:
            figures |= {
                "chunks_sent": sent[name]["chunks"],
                "bytes_sent": sent[name]["bytes"],
                "queued_s": sent[name]["queued_s"],
                "transfer_s": sent[name]["transfer_s"],
                "recent_queued_s": tuple(sent[name]["recent_queued_s"]),
                "recent_transfer_s": tuple(sent[name]["recent_transfer_s"]),
            }
        result[name] = Traffic(**figures)
    return result


@dataclass(frozen=True)
class Peer:
    """The costs of another rank for this one since the job began. Seconds and bytes."""

    waiting_s: float = 0.0
    """Seconds in which this rank's thread waited for it."""
    bytes_sent: int = 0
    """Bytes sent to it, on another host."""
    transfer_s: float = 0.0
    """Seconds from leaving to being acknowledged, summed over chunks."""


def peers() -> dict[tuple[str, int], Peer]:
    """Returns the figures of this process by traffic class and rank of the job, over the process groups that
    exist. A wait for several ranks at once, as in the backend's own collectives, is in none of them."""
    there = set(dist.distributed_c10d._world.pg_names.values())
    result: dict[tuple[str, int], Peer] = {}
    for (name, traffic_class, rank), figures in _C.peer_figures().items():
        if name in there:
            key = traffic_class, _job_ranks(name, group_size(name))[rank]
            known, (waiting_s, size, transfer_s) = result.get(key, Peer()), figures
            result[key] = Peer(
                known.waiting_s + waiting_s, known.bytes_sent + size, known.transfer_s + transfer_s
            )
    return result


def _forget_when_destroyed(name: str) -> None:
    """Makes the core forget a group that torch destroys: code that uses only torch never closes ours."""
    destroyed = weakref.finalize(process_group(name), _C.forget_destroyed_groups)
    destroyed.atexit = False  # core.py ends what is open then


def _job_ranks(name: str, size: int) -> list[int]:
    """Returns the ranks of the process group of that name in torch's default group, which is the job, by rank
    in it. A group that torch does not know by these is a job of its own."""
    ranks = dist.distributed_c10d._world.pg_group_ranks.get(process_group(name))
    return list(range(size)) if ranks is None else sorted(ranks, key=ranks.__getitem__)


_C.set_job_ranks_finder(_job_ranks)
_C.on_new_group(_forget_when_destroyed)
