"""How the ranks of a job find each other, and come to a store that holds nothing of earlier openings.

The connections to the job's store are made once and live as long as the process: where rank 0 serves it,
others may still ask when rank 0 has closed its Runtime. Each opening has keys of its own, below the run's id,
the launcher's count of restarts, and a number that the ranks count alike.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from pyruntime.comm.core import _C
from pyruntime.comm.errors import CommTimeout

Result = TypeVar("Result")


def open_store(deadline_s: float) -> dist.Store:
    """This opening's store, once all ranks that the environment tells of are there and watch each other.

    Raises CommTimeout where the store or a rank does not come within `deadline_s` seconds, PeerLost where one
    has ended.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    doing = f"Start-up, rank {rank}"
    too_late = (
        f"{doing}: the job's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
        "(MASTER_ADDR:MASTER_PORT), which torchrun or rank 0 serves, did not answer within "
        f"{deadline_s:g} s; see whether it runs, and whether this host reaches that address."
    )
    store, watched = _within(deadline_s, lambda: _numbered(rank, deadline_s), too_late)
    if world_size > 1:
        _C.join_job(store, watched, rank, world_size)
        _meet(rank, world_size, doing, deadline_s)
    return store


def _meet(rank: int, world_size: int, doing: str, deadline_s: float) -> None:
    """Rank 0 waits for all, the others for its word."""
    if rank == 0:
        for other in range(1, world_size):
            _C.hear_job(f"pyruntime/here/{other}", other, doing, deadline_s)
        _C.tell_job("pyruntime/here/0", "", doing, deadline_s)
    else:
        _C.tell_job(f"pyruntime/here/{rank}", "", doing, deadline_s)
        # Rank 0 knows who is missing: its word comes first.
        _C.hear_job("pyruntime/here/0", 0, doing, deadline_s + 1.0)


def _numbered(rank: int, deadline_s: float) -> tuple[dist.Store, dist.Store]:
    """The store of this opening, through a connection for this thread and one for that which watches."""
    attempt = "/".join(
        os.environ.get(name, "-") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    )
    store, watched = _connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _serves(rank))
    store.set_timeout(timedelta(seconds=deadline_s))
    number = store.add(f"pyruntime/{attempt}/openings/{rank}", 1)
    prefix = f"pyruntime/{attempt}/{number}"
    return dist.PrefixStore(prefix, store), dist.PrefixStore(prefix, watched)


def _serves(rank: int) -> bool:
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


@functools.cache
def _connect(host: str, port: int, serves: bool) -> tuple[dist.Store, dist.Store]:
    # multi_tenant: whoever calls init_process_group besides finds the same store.
    store = dist.TCPStore(
        host, port, None, serves, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=120)
    )
    return store, store.clone()


def _within(seconds: float, work: Callable[[], Result], too_late: str) -> Result:
    """The result of `work`, which neither Ctrl-C nor a deadline could end by itself: in a thread that is left
    to itself when the time is over."""
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="pyr-rendezvous")
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and (left := end - time.monotonic()) > 0:
        thread.join(min(left, 0.1))
    if outcome:
        return outcome[0]
    if failure and not isinstance(failure[0], dist.DistError):
        raise failure[0]
    raise CommTimeout(too_late) from (failure[0] if failure else None)
