"""The processes that tests/ranks.py starts: a template and the ranks that it forks.

The template imports torch and pyruntime once and forks every rank, so a rank starts in milliseconds and
always from the same clean state. The template has only one thread; with more it could not fork safely.

    pytest process  --socket-->  template  --fork-->  rank 0, rank 1, ...
          ^------------------ one pipe for each rank ------------^

A rank dies with its template, and the template with pytest, even if that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
STACKS_SIGNAL = signal.SIGUSR1
LARGEST_REQUEST = 1 << 16  # bytes; a request to the template is a few hundred


@dataclass(frozen=True)
class SpawnRequest:
    """A request to fork one rank; the rank's end of its pipe travels with it."""

    environment: dict[str, str]
    log: str
    """Path of the file for stdout and stderr."""
    group_sizes: tuple[int, ...]
    """Sizes of the gloo groups, each of the first ranks; empty: torch.distributed is not initialised."""
    module: str
    """Imported before the fork, once for all ranks of a session."""


@dataclass(frozen=True)
class ReapRequest:
    """A request for a rank's exit code: an int as in subprocess, or None while the rank runs."""

    pid: int


@dataclass(frozen=True)
class Call:
    """A function to run with the group of the first `group_size` ranks (0: None) and args. The random numbers
    of every rank begin at `seed`."""

    module: str
    qualname: str
    group_size: int
    args: tuple[Any, ...]
    seed: int


@dataclass(frozen=True)
class Outcome:
    """The result of a Call on one rank; `error` is also None if the exception cannot be pickled."""

    failed: bool
    value: Any = None
    error: BaseException | None = None
    summary: str = ""  # "ValueError: tp=3 does not divide ..."
    trace: str = ""
    at: float = 0.0  # seconds on the host's monotonic clock, the same for all ranks


def die_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Has the kernel signal this process when its parent ends. parent: the parent's pid at the fork."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)


def serve_requests(channel: socket.socket) -> tuple[SpawnRequest, int] | None:
    """The template's loop. Returns (request, pipe) in a forked rank, None in the template at the end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, LARGEST_REQUEST, 1)
        if not message:
            return None
        request = pickle.loads(message)
        if isinstance(request, ReapRequest):
            pid, status = os.waitpid(request.pid, os.WNOHANG)
            channel.send(pickle.dumps(os.waitstatus_to_exitcode(status) if pid else None))
            continue
        template = os.getpid()
        with contextlib.suppress(Exception):  # the ranks import it again and report the error
            importlib.import_module(request.module)
        pid = os.fork()
        if pid == 0:
            die_with_parent(template)
            channel.close()
            return request, descriptors[0]
        os.close(descriptors[0])
        channel.send(pickle.dumps(pid))


def become_rank(request: SpawnRequest) -> dict[int, Any]:
    """Sets up this forked process and returns its process groups by their size, and None for size 0."""
    os.setsid()  # Ctrl-C goes to pytest, which ends its ranks itself
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    os.environ.update(request.environment)
    import torch

    # Alone: this fork's first call replaces torch's pool of threads, and a second thread's beside it would
    # find none ("Invalid thread pool!"); a new thread's first operator is such a call.
    torch.set_num_threads(1)
    if not request.group_sizes:
        return {0: None}

    import torch.distributed as dist

    dist.init_process_group("gloo")
    return {0: None} | {size: dist.new_group(list(range(size))) for size in request.group_sizes}


def seed_all(seed: int) -> None:
    """Seeds Python's random numbers, and torch's if it has been imported."""
    random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def run_call(call: Call, groups: dict[int, Any]) -> Outcome:
    seed_all(call.seed)
    try:
        function: Any = importlib.import_module(call.module)
        for name in call.qualname.split("."):
            function = getattr(function, name)
        return Outcome(failed=False, value=function(groups[call.group_size], *call.args))
    except Exception as error:
        return failure(error)


def failure(error: BaseException) -> Outcome:
    summary, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
    carried: BaseException | None = error.with_traceback(None)
    try:
        pickle.loads(pickle.dumps(carried))
    except Exception:  # of any kind, from its class: its text and trace travel instead
        carried = None
    return Outcome(failed=True, error=carried, summary=summary, trace=trace, at=time.monotonic())


def packed(outcome: Outcome) -> bytes:
    """Pickles plainly: tensors travel as bytes, not as shared memory that outlives a killed rank."""
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        return pickle.dumps(failure(error))


def serve_calls(pipe: Connection, groups: dict[int, Any]) -> int:
    """The rank's loop: answers each Call with an Outcome until pytest hangs up. Returns the exit code."""
    exit_code = 0
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return exit_code
        outcome = run_call(call, groups)
        if outcome.failed:
            exit_code = 1
            print(outcome.trace, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(packed(outcome))


def main() -> int:
    """The template process; its arguments are the descriptor of its socket and the pid of pytest."""
    die_with_parent(int(sys.argv[2]))
    # Background jobs of a shell ignore Ctrl-C, and pytest's ranks would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Imports most modules that tests need on their ranks once, instead of on every rank of every launch. Not
    # torch's compiler: it may look for GPUs, and then no fork could use them.
    import torch
    import torch.distributed

    import pyruntime.train.run  # noqa: F401

    # No rank need search these objects for garbage; at its end that would take most of a second.
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(
            f"importing torch and pyruntime started {len(threads) - 1} threads, which a forked rank would "
            "lack; start threads at their first use."
        )
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        channel.send(b"ready")
        task = serve_requests(channel)
    if task is None:
        return 0
    request, descriptor = task
    with Connection(descriptor) as pipe:
        return serve_calls(pipe, become_rank(request))
