"""Process groups by whatever name the caller has for them."""

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
    """The torch process group behind `group`.

    Raises ValueError for a name that no group has and a mesh of several axes, TypeError for what is no group.
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
    """The name under which torch and the C++ core know `group`."""
    if isinstance(group, str):
        return group
    return process_group(group).group_name


def group_rank(group: Group) -> int:
    """This process's rank in `group`."""
    return process_group(group).rank()


def group_size(group: Group) -> int:
    """Number of ranks in `group`."""
    return process_group(group).size()


def rank_name(group: Group, rank: int) -> str:
    """What messages call that rank of `group`: "rank 2 (tp 0, dp 1; process 4711 on node3)", by its number in
    the job, as far as the rest is known."""
    return job_rank_name(_job_ranks(group_name(group), group_size(group))[rank])


def job_rank_name(rank: int) -> str:
    """The same of a rank of the job."""
    return _C.name_of_rank(rank)


def stats(group: Group) -> _C.CommStats:
    """Cumulative figures of this rank: `ops`, `bytes` read from peers, `waiting_s` and `moving_s`.

    waiting_s + moving_s are the seconds in which this rank's thread did nothing but wait for peers, copy
    and sum: its exposed communication.
    """
    return _C.stats(group_name(group))


def workspace_bytes(group: Group) -> int:
    """Bytes of symmetric memory that this rank holds for `group`."""
    return _C.workspace_bytes(group_name(group))


def deadline(group: Group) -> float:
    """Seconds that a wait on a peer of `group` may last."""
    return _C.deadline(group_name(group))


def set_deadline(group: Group, seconds: float) -> None:
    """Bounds every wait on a peer of `group` to `seconds`; then CommTimeout is raised."""
    check_deadline(seconds)
    _C.set_deadline(group_name(group), float(seconds))


def check_deadline(seconds: float) -> None:
    """Raises ValueError where that is no deadline."""
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
    """Settles how `group` communicates. All ranks must pass the same, before the first op or after `close`.
    transport, hosts, chunk_bytes, wire_dtype, multicast and rings are settled together: where one of them is
    given, those left out return to their defaults.

    Args:
        deadline_s: seconds that a wait on a peer may last.
        transport: "auto" looks at where the ranks are: on one host they share memory ("symmetric_memory");
            where every host has the same number of ranks, more than one, they share memory inside a host
            and send round a ring of hosts ("hierarchical"); otherwise round a ring of ranks
            ("process_group"), over the group's c10d backend. "collectives" leaves everything to the
            backend's own collectives, unfused. Tensors on a device take its copy engines inside a host;
            "device" makes tensors on the CPU go the same way, to try that without one.
        hosts: a name for each rank's host, instead of asking the ranks: to try on one machine what several
            do.
        chunk_bytes: bytes of a rank's rows that travel between hosts at once; by default chosen for each op
            from the latency and bandwidth that are measured when the group is opened. On devices: the least
            that a GEMM waits for on its own, by default 4 MiB; a rank's rows have 4 such pieces at most.
        wire_dtype: what partial sums travel as between hosts: torch.bfloat16 or torch.float32; by default
            the dtype of the operand. Each hop adds in fp32 and rounds to this.
        multicast: between GPUs of one NVLink domain. "gather": what goes to all ranks is stored once, under
            one address for all of them, and gives the same bits. "gather_and_reduce": sums of a
            reduce-scatter or all-reduce are taken in the switch too, in an order that is the switch's: not
            the same bits as on the CPU, nor surely those of the next run. By default "off".
        rings: between GPUs of one host of which not every two have a link of their own: orders of the group's
            ranks, in each of which a rank has a direct link to the next, and the last to the first. What is
            gathered goes around all of them, both ways at once, where a rank's rows are at least so many
            times `chunk_bytes`; the same bits. By default straight to each peer.
        traffic_class: "tp", "cp", "pp", "dp" or "checkpoint": how urgent this group's chunks are beside
            those of other groups. May be changed at any time.

    Raises ValueError for what is none of these, RuntimeError when the group has run ops already. The first op
    raises ValueError where its devices cannot do the multicast that was asked for, or are on several hosts
    and rings were.
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
    """How the chunks of `group` travel, in words; "" before its first op."""
    return _C.transport_description(group_name(group))


def crosses_hosts(group: Group, device: torch.device | str = "cpu") -> bool:
    """Whether rows of tensors on `device` travel between hosts in `group`. Collective where the group has run
    no op yet."""
    return _C.crosses_hosts(group_name(group), str(device))


@dataclass(frozen=True)
class Traffic:
    """What one class of traffic has cost this rank since the start. Seconds and bytes.

    waiting_s + moving_s are exposed: this rank's thread did nothing but wait for peers, copy and sum. What
    was sent to other hosts went on beside it, in `chunks_sent` chunks: each queued from the moment when it
    might leave until the arbiter let it go, then took its transfer time until the receiver had it.
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
    """Of each of the last chunks (4,096 at most), in no order; for percentiles."""
    recent_transfer_s: tuple[float, ...] = ()


def exposed_s() -> float:
    """Seconds in which this rank has done nothing but wait for peers, copy and sum, over all its open groups
    and their companions."""
    return sum(exposed_by_class().values())


def exposed_by_class() -> dict[str, float]:
    """The same by class of traffic."""
    return {name: stats.waiting_s + stats.moving_s for name, stats in _C.group_stats_by_class().items()}


def bytes_read(traffic_class: str) -> int:
    """What this rank has read from its peers in that class of traffic, over all its open groups."""
    stats = _C.group_stats_by_class().get(traffic_class)
    return 0 if stats is None else stats.bytes


def traffic() -> dict[str, Traffic]:
    """The figures of this process by class of traffic ("tp", "cp", ...), over all its open groups."""
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
    """What another rank has cost this one since the start. Seconds and bytes."""

    waiting_s: float = 0.0
    """In which this rank's thread waited for it."""
    bytes_sent: int = 0
    """To it, on another host."""
    transfer_s: float = 0.0
    """Of them, from leaving to being acknowledged, summed over chunks."""


def peers() -> dict[tuple[str, int], Peer]:
    """The figures of this process by class of traffic and rank of the job, over the process groups that there
    are. A wait that is for several ranks at once, as in the backend's own collectives, is in none of them."""
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
    """Who calls torch's API alone closes no group of ours: it ends with the process group of that name."""
    destroyed = weakref.finalize(process_group(name), _C.forget_destroyed_groups)
    destroyed.atexit = False  # core.py ends what is open then


def _job_ranks(name: str, size: int) -> list[int]:
    """Of the process group of that name, by rank in it: its ranks in torch's default group, which is the job.
    Where torch does not know the group by these, it is a job of its own."""
    ranks = dist.distributed_c10d._world.pg_group_ranks.get(process_group(name))
    return list(range(size)) if ranks is None else sorted(ranks, key=ranks.__getitem__)


_C.set_job_ranks_finder(_job_ranks)
_C.on_new_group(_forget_when_destroyed)
