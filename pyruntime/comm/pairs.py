"""Process groups of two ranks, for the messages of one direction between devices of several hosts.

The core asks for one for each edge (csrc/transport/device/hosts/pairs.h says why). torch's own `new_group` is
no way to one: all ranks of the job have to call it, or it takes a name that the two ranks may not agree on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from pyruntime.comm.exchange import named_failures
from pyruntime.comm.groups import deadline, process_group

_MOST_BLOCKS = 8
"""Most blocks of an NCCL kernel in such a group. A rank has at most four such kernels, which together fill
the blocks that the core leaves for NCCL, kBlocksOfNccl."""


def make(name: str, companion: str, served: str, ranks: Sequence[int], rank: int, device_type: str) -> None:
    """Makes a process group `name` of two `ranks` of the job, for the edge `companion` of the process group
    `served`, with its backend for devices of that type and its deadline. rank: this one's place in `ranks`.
    Both ranks call it alike. Raises CommTimeout and PeerLost."""
    backend = process_group(served)._get_backend(torch.device(device_type)).name()
    options = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = _MOST_BLOCKS
    world = dist.distributed_c10d
    timeout = timedelta(seconds=deadline(companion))
    with named_failures(served, f"Making the process group of '{companion}'"), _alone():
        made, _ = world._new_process_group_helper(
            len(ranks),
            rank,
            list(ranks),
            dist.Backend(f"{device_type}:{backend}"),
            world._get_default_store(),
            name,
            backend_options=options,
            timeout=timeout,
            group_desc=companion,
        )
    world._world.pg_group_ranks[made] = {of_job: place for place, of_job in enumerate(ranks)}
    # NCCL connects the two at their first message, and the host waits for it. They meet here, edge by edge:
    # in a ring of ranks that wait for their first receive, none would come to its send.
    token = torch.zeros(1, device=device_type)
    meet = dist.P2POp(dist.isend if rank == 0 else dist.irecv, token, ranks[1 - rank], made)
    for work in dist.batch_isend_irecv([meet]):
        work.wait()


def end(name: str) -> None:
    """Destroys the process group of that name, if there is one. Both ranks call it."""
    with contextlib.suppress(ValueError):  # torch has destroyed it with all others
        dist.destroy_process_group(process_group(name))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keeps torch from splitting a communicator of all ranks, for which all would have to come: it does so if
    torch.distributed was initialized with `device_id=`."""
    job = dist.group.WORLD
    bound, job.bound_device_id = job.bound_device_id, None
    try:
        yield
    finally:
        job.bound_device_id = bound
