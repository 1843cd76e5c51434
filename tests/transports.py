"""Runs a rank function over each transport, on the ranks of the pool.

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_sum(ranks, transport):
        ranks.run(on_transport, 3, transport, sums, torch.ones(3))

The pool's ranks share one machine; for transports between hosts they are configured as if on several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyruntime import comm
from pyruntime.comm import group_size

TRANSPORTS = ["symmetric_memory", "process_group", "hierarchical"]
CHUNK_BYTES = 96  # so few that even small operands travel in many pieces


def on_transport(group, transport: str, case: Callable[..., Any], *arguments: Any) -> Any:
    """Returns case(group, *arguments), with the group's chunks travelling by `transport`."""
    take(group, transport)
    return case(group, *arguments)


def take(group, transport: str) -> None:
    """Reconfigures the group unless it has this transport. "hierarchical" makes 2 hosts of 2 from 4 ranks;
    other sizes cannot be split into equal hosts of several ranks, and use the ring."""
    size = group_size(group)
    if size == 1:
        return
    settings: dict[str, Any] = {"transport": transport}
    expected = {
        "symmetric_memory": "symmetric memory, ",
        "process_group": "ring",
        "device": "symmetric memory and copy",
        "device between hosts": "sends and receives",
        "device on rails": "rails",
    }.get(transport, "")
    if transport == "hierarchical":
        hosts = [f"host {2 * rank // size}" for rank in range(size)]
        settings = {"hosts": hosts}
        expected = "hierarchical" if size == 4 else "ring"
    if transport == "device between hosts":
        settings = {"transport": "device", "hosts": [f"host {rank}" for rank in range(size)]}
    if transport == "device on rails":  # of two ranks a host
        settings = {"transport": "device", "hosts": [f"host {rank // 2}" for rank in range(size)]}
    if transport != "symmetric_memory":
        settings["chunk_bytes"] = CHUNK_BYTES
    if comm.transport_of(group).startswith(expected):
        return
    comm.close(group)
    comm.configure(group, **settings)
