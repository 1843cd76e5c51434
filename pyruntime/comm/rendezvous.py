"""Lets the ranks of a job find each other: each start of a Runtime has a store without keys of earlier ones.

The connections to the job's store are made once and live as long as the process: if rank 0 serves it, others
may still ask it when rank 0 has closed its Runtime. The keys of a start begin with the run's id, a
generation, and the number of the start in that generation, which every rank counts for itself.

The generation is the number of processes that have been rank 0 so far. Rank 0 counts it, and the others ask
rank 0 at each start, because what launchers on several hosts count (TORCHELASTIC_RESTART_COUNT) differs
between them. Each question has its own answer, so that no rank takes the answer of a process that has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from pyruntime.comm.core import _C
from pyruntime.comm.errors import CommTimeout

Result = TypeVar("Result")

POLL_S = 0.01


def open_store(deadline_s: float, groups: str) -> dist.Store:
    """Returns the store of this start of a Runtime, once all ranks of the job (WORLD_SIZE in the environment)
    are there and watch each other. `groups` says which groups this rank is about to make.

    Raises CommTimeout if the store or a rank does not come within `deadline_s` seconds, PeerLost if one has
    ended, and ValueError, on all ranks, if ranks make different groups.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    doing = f"Start-up, rank {rank}"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    run = _run_id()
    too_late = (
        f"{doing}: the job's store at {host}:{port} (MASTER_ADDR:MASTER_PORT), which torchrun or rank 0 "
        f"serves, did not answer within {deadline_s:g} s; see whether it runs, and whether this host reaches "
        "that address."
    )
    store, watched, answering = _within(deadline_s, lambda: _connect(host, port, _serves(rank)), too_late)
    store.set_timeout(timedelta(seconds=deadline_s))
    if rank == 0:
        generation = _within(deadline_s, lambda: _generation(host, port, run, _serves(rank)), too_late)
    else:
        not_there = (
            f"{doing} waiting for rank 0: it did not open its Runtime within {deadline_s:g} s; "
            "see whether it has started, and what it printed."
        )
        asked = _within(deadline_s, lambda: store.add(f"{run}/asked/{rank}", 1), too_late)
        key = f"{run}/answers/{rank}/{asked}"
        generation = _within(deadline_s + 1.0, lambda: _answer(store, key, deadline_s + 1.0), not_there)
    starts = f"{run}/{generation}"
    number = _within(deadline_s, lambda: store.add(f"{starts}/starts/{rank}", 1), too_late)
    prefix = f"{starts}/{number}"
    store, watched = dist.PrefixStore(prefix, store), dist.PrefixStore(prefix, watched)
    if world_size > 1:
        with _answers(answering, run, generation, prefix, world_size if rank == 0 else 0):
            _C.join_job(store, watched, rank, world_size, 0 if _serves(0) else -1)
            _meet(rank, world_size, doing, deadline_s, groups)
    return store


def keep(name: str, value: str) -> None:
    """Keeps `value` for the processes that torchrun starts in place of this job's, if torchrun serves the
    job's store. Raises CommTimeout."""
    if (store := _store_of_torchrun()) is not None:
        with _answering():
            store.set(f"{_run_id()}/kept/{name}", value)


def kept(name: str) -> str:
    """Returns what earlier processes in the place of this job's have kept under `name`; empty if there were
    none, or if they kept nothing. Raises CommTimeout."""
    if (store := _store_of_torchrun()) is None:
        return ""
    key = f"{_run_id()}/kept/{name}"
    with _answering():
        return store.get(key).decode() if store.check([key]) else ""


def _run_id() -> str:
    """Returns what all keys of a job begin with."""
    return f"pyruntime/{os.environ.get('TORCHELASTIC_RUN_ID', '-')}"


def _store_of_torchrun() -> dist.Store | None:
    """Returns the job's store, after `open_store`, if it outlives the job's processes; else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or _serves(0):
        return None
    return _connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), False)[0]


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise CommTimeout(
            "The job's store, which torchrun serves, did not answer when it was asked for the run folder; "
            "see whether torchrun still runs on the host of MASTER_ADDR."
        ) from error


def _meet(rank: int, world_size: int, doing: str, deadline_s: float, groups: str) -> None:
    """Lets rank 0 wait for all ranks and compare the groups they make; the others wait for its answer."""
    refusal = ""
    if rank == 0:
        for other in range(1, world_size):
            theirs = _C.hear_job(f"pyruntime/here/{other}", other, doing, deadline_s)
            if theirs != groups:
                refusal = refusal or (
                    f"Rank 0 was started for {groups}, and {_C.name_of_rank(other)} for {theirs}; start all "
                    "ranks alike."
                )
        _C.tell_job("pyruntime/here/0", refusal, doing, deadline_s)
    else:
        _C.tell_job(f"pyruntime/here/{rank}", groups, doing, deadline_s)
        # Rank 0 knows which rank is missing, so its answer must come first.
        refusal = _C.hear_job("pyruntime/here/0", 0, doing, deadline_s + 1.0)
    if refusal:
        raise ValueError(refusal)


@functools.cache
def _generation(host: str, port: int, run: str, serves: bool) -> int:
    """Returns how many processes have been rank 0 of this run, this one included."""
    return _connect(host, port, serves)[0].add(f"{run}/generations", 1)


def _answer(store: dist.Store, key: str, seconds: float) -> int:
    end = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > end:
            raise dist.DistStoreError(f"no {key}")
        time.sleep(POLL_S)
    return int(store.get(key))


@contextlib.contextmanager
def _answers(store: dist.Store, run: str, generation: int, prefix: str, world_size: int) -> Iterator[None]:
    """While it is open, rank 0 tells the generation to each rank that asks and has not come to this start."""
    over = threading.Event()

    def work() -> None:
        answered = dict.fromkeys(range(1, world_size), 0)
        with contextlib.suppress(dist.DistError):  # the main thread reports the loss of the store
            while answered and not over.wait(POLL_S):
                for rank, before in list(answered.items()):
                    if store.check([f"{prefix}/pyruntime/here/{rank}"]):
                        del answered[rank]
                    elif (asked := store.add(f"{run}/asked/{rank}", 0)) > before:
                        store.set(f"{run}/answers/{rank}/{asked}", str(generation))
                        answered[rank] = asked

    thread = threading.Thread(target=work, daemon=True, name="pyr-answers")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1.0)


def _serves(rank: int) -> bool:
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


@functools.cache
def _connect(host: str, port: int, serves: bool) -> tuple[dist.Store, dist.Store, dist.Store]:
    """Returns connections for the threads that start a Runtime, that watch, and that answer."""
    # multi_tenant: other code that calls init_process_group finds the same store.
    store = dist.TCPStore(
        host, port, None, serves, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=120)
    )
    return store, store.clone(), store.clone()


def _within(seconds: float, work: Callable[[], Result], too_late: str) -> Result:
    """Returns the result of `work`. Neither Ctrl-C nor a deadline could end it by itself, so it runs in a
    thread, which is abandoned when the time is over."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="pyr-rendezvous").start()
    try:
        return outcome.result(seconds)
    except (dist.DistError, TimeoutError) as error:
        if outcome.done() and not isinstance(error, dist.DistError):
            raise
        raise CommTimeout(too_late) from error
