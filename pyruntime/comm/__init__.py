"""Groups, their figures and deadlines, and the Runtime that owns them."""

from pyruntime.comm.axis import Axis
from pyruntime.comm.companions import close, companion
from pyruntime.comm.core import keep_freed_memory, symmetric_memory_bytes
from pyruntime.comm.errors import CommError, CommTimeout, PeerLost
from pyruntime.comm.exchange import named_failures, post_failure
from pyruntime.comm.groups import (
    Group,
    Peer,
    Traffic,
    bytes_read,
    configure,
    deadline,
    exposed_s,
    group_name,
    group_rank,
    group_size,
    peers,
    process_group,
    rank_name,
    set_deadline,
    stats,
    traffic,
    transport_of,
    waiting_on_host_s,
    workspace_bytes,
)
from pyruntime.comm.rendezvous import keep, kept
from pyruntime.comm.runtime import Runtime

__all__ = [
    "Axis",
    "CommError",
    "CommTimeout",
    "Group",
    "Peer",
    "PeerLost",
    "Runtime",
    "Traffic",
    "bytes_read",
    "close",
    "companion",
    "configure",
    "deadline",
    "exposed_s",
    "group_name",
    "group_rank",
    "group_size",
    "keep",
    "keep_freed_memory",
    "kept",
    "named_failures",
    "peers",
    "post_failure",
    "process_group",
    "rank_name",
    "set_deadline",
    "stats",
    "symmetric_memory_bytes",
    "traffic",
    "transport_of",
    "waiting_on_host_s",
    "workspace_bytes",
]
