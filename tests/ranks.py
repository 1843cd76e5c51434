"""Ranks for tests: real processes with gloo process groups, started once for each file of tests.

    def sums(group, x):                         # a function of the test module, run on every rank
        dist.all_reduce(x, group=group)
        return x

    def test_sum(ranks):
        first, second = ranks.run(sums, 2, torch.ones(3))

`run` uses a pool of ranks that lives until the end of the file. `launch` starts fresh processes, for tests
that kill them or that set up torch.distributed themselves. Functions travel by name, so they must be at the
top level of a module; arguments and results travel by pickle. tests/rank_worker.py starts the processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.rank_worker import LARGEST_REQUEST, STACKS_SIGNAL, Call, Outcome, ReapRequest, SpawnRequest

ROOT = Path(__file__).resolve().parent.parent
POOL_SIZE = 4
LARGE_POOL_SIZE = 8  # for the few tests that need more ranks; this pool is ended soon
GRACE_S = 3.0  # the time that the other ranks have after one has failed
EXIT_S = 20.0  # the time that a launched rank has to exit after its function has returned
LONGEST_OUTPUT = 8000  # characters of a rank's output that an error shows


class RankError(AssertionError):
    """A rank raised, died or hung. `rank` is the one to blame: the first that failed."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Launched:
    """The end of a fresh process: its exit code (-9 after SIGKILL), and its result or exception if any."""

    exit_code: int
    value: Any
    error: BaseException | None
    output: str  # stdout and stderr


class Template:
    """The process that ranks are forked from; it starts with the first rank."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def request(self, message: SpawnRequest | ReapRequest, *descriptors: int) -> Any:
        channel = self._channel or self._start()
        socket.send_fds(channel, [pickle.dumps(message)], descriptors)
        answer = channel.recv(LARGEST_REQUEST)
        if not answer:
            raise RuntimeError("the template process of the ranks ended; see its message above.")
        return pickle.loads(answer)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = "import sys; from tests.rank_worker import main; sys.exit(main())"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), str(os.getpid())],
                cwd=ROOT,
                env=os.environ
                | {
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                },
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        if not ours.recv(LARGEST_REQUEST):
            ours.close()
            raise RuntimeError(
                "the template process of the ranks could not import torch or pyruntime; see above."
            )
        self._channel = ours
        return ours

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.wait(timeout=10)
        self._channel = self._process = None


class Rank:
    """One rank's process, its pipe and the file with its output."""

    def __init__(self, template: Template, number: int, log: Path, request: SpawnRequest) -> None:
        self.number = number
        self._template = template
        self._log = log
        self._log_start = 0
        ours, theirs = socket.socketpair()
        with theirs:
            self.pid: int = template.request(request, theirs.fileno())
        self.pipe = Connection(ours.detach())
        self.exit_code: int | None = None

    def call(self, packed: bytes) -> None:
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        with contextlib.suppress(
            BrokenPipeError
        ):  # it died; reading the answer from its closed pipe will show that
            self.pipe.send_bytes(packed)

    def answer(self) -> Outcome | None:
        """Returns its Outcome, or None if it died before it sent one."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None

    def output(self) -> str:
        """Returns what it printed since its last call began."""
        if not self._log.exists():
            return ""
        return self._log.read_bytes()[self._log_start :].decode(errors="replace").strip()

    def stacks(self) -> str:
        """Returns the stacks of all its threads, by faulthandler."""
        size = len(self.output())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS_SIGNAL)
        end = time.monotonic() + 1.0
        while "most recent call first" not in self.output()[size:] and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.05)
        return self.output()[size:]

    def end(self, deadline: float) -> int:
        """Hangs up and returns its exit code; kills it if it has not ended by `deadline` (monotonic)."""
        self.pipe.close()
        while self.exit_code is None:
            self.exit_code = self._template.request(ReapRequest(self.pid))
            if self.exit_code is None:
                if time.monotonic() >= deadline:
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.002)
        return self.exit_code


class World:
    """A set of ranks that can exchange data and run one call at a time."""

    def __init__(self, template: Template, size: int, group_sizes: tuple[int, ...], module: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        # The store is in the pytest process, as with torchrun it is in the agent: it outlives every rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[Rank] = []
        for number in range(size):
            log = self._folder / f"rank{number}.log"
            request = SpawnRequest(
                torchrun_environment(number, size, self._store.port), str(log), group_sizes, module
            )
            self.ranks.append(Rank(template, number, log, request))

    def call(self, call: Call, ranks: int, timeout: float, grace: float) -> dict[int, Outcome | None]:
        """Runs `call` on the first `ranks` ranks and returns their outcomes; None for a rank that died.

        A rank that still runs after `timeout` seconds, or `grace` seconds after another failed, is left out.
        """
        packed = pickle.dumps(call)
        running = {rank.pipe: rank for rank in self.ranks[:ranks]}
        for rank in running.values():
            rank.call(packed)
        outcomes: dict[int, Outcome | None] = {}
        deadline = time.monotonic() + timeout
        while running and (ready := wait(list(running), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = running.pop(pipe)  # type: ignore[call-overload]
                outcome = outcomes[rank.number] = rank.answer()
                if outcome is None or outcome.failed:
                    deadline = min(deadline, time.monotonic() + grace)
        return outcomes

    def end(self, within_s: float) -> list[int]:
        """Hangs up on every rank, kills those that outlast `within_s`, and returns the exit codes."""
        for rank in self.ranks:
            rank.pipe.close()
        deadline = time.monotonic() + within_s
        return [rank.end(deadline) for rank in self.ranks]

    def close(self) -> None:
        """Kills ranks that still run and removes the files."""
        self.end(within_s=0.0)
        shutil.rmtree(self._folder)


class Ranks:
    """The `ranks` fixture. seed: of the random numbers on every rank, set again in every call."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._template = Template()
        self._pools: dict[int, World] = {}
        self._large_pool_used = False

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        expect_errors: bool = False,
    ) -> list[Any]:
        """Returns the results of function(group, *args) on `world_size` ranks, in rank order.

        group is a gloo process group of exactly these ranks. Raises RankError if a rank raises (from its
        exception), dies, or takes more than `timeout` seconds (with the stacks of all that still ran).
        With expect_errors an exception is returned in place of the result.
        """
        if not 1 <= world_size <= LARGE_POOL_SIZE:
            raise ValueError(f"world_size={world_size} is not in 1 to {LARGE_POOL_SIZE}; use ranks.launch.")
        call = Call(*name_of(function), world_size, args, self._seed)
        size = POOL_SIZE if world_size <= POOL_SIZE else LARGE_POOL_SIZE
        self._large_pool_used |= size == LARGE_POOL_SIZE
        if size not in self._pools:
            group_sizes = range(1 if size == POOL_SIZE else POOL_SIZE + 1, size + 1)
            self._pools[size] = World(self._template, size, tuple(group_sizes), call.module)
        world = self._pools[size]

        clean = False
        try:
            outcomes = world.call(call, world_size, timeout, timeout if expect_errors else GRACE_S)
            clean = len(outcomes) == world_size and all(
                o is not None and not o.failed for o in outcomes.values()
            )
            complete = [o for _, o in sorted(outcomes.items()) if o is not None]
            if clean:
                return [outcome.value for outcome in complete]
            if expect_errors and len(complete) == world_size:
                return [exception_of(r, o) if o.failed else o.value for r, o in enumerate(complete)]
            raise blame(call, world.ranks[:world_size], outcomes, timeout)
        finally:
            # After a failure the groups may be out of step and ranks in any state; new ranks cost little.
            if not clean:
                del self._pools[size]
                world.close()

    def launch(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        init: bool = True,
    ) -> list[Launched]:
        """Runs function(group, *args) on fresh processes that then exit, and returns how each of them ended.

        With init=False torch.distributed is not initialised and group is None. The environment is torchrun's
        in both cases. Raises RankError only for a rank that still runs after `timeout` seconds.
        """
        call = Call(*name_of(function), world_size if init else 0, args, self._seed)
        world = World(self._template, world_size, (world_size,) if init else (), call.module)
        try:
            outcomes = world.call(call, world_size, timeout, grace=timeout)
            if len(outcomes) < world_size:
                raise blame(call, world.ranks, outcomes, timeout)
            codes = world.end(within_s=EXIT_S)
            return [
                launched(rank, code, outcomes[rank.number])
                for rank, code in zip(world.ranks, codes, strict=True)
            ]
        finally:
            world.close()

    def end_test(self) -> None:
        """Called after every test: ends the large pool unless this test used it."""
        if not self._large_pool_used and LARGE_POOL_SIZE in self._pools:
            self._pools.pop(LARGE_POOL_SIZE).close()
        self._large_pool_used = False

    def end_file(self) -> None:
        """Called after the last test of a file: ends all pools, so that the next file has new ranks."""
        for world in self._pools.values():
            world.close()
        self._pools.clear()

    def close(self) -> None:
        self.end_file()
        self._template.close()


def without_processes(message: str) -> str:
    """Returns a message without its ranks' places: "rank 1" for "rank 1 (tp 0; process 4711 on node3)"."""
    return re.sub(r" \((?:[^()]*; )?process \d+ on [^()]+\)", "", message)


def check_others_lost_rank_1(outcomes: Sequence[Launched]) -> None:
    """Checks that the others raised PeerLost after rank 1 was killed. They returned their error's name and
    message and the seconds until it, with a deadline of 4 s."""
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (outcomes[0], *outcomes[2:]):
        kind, message, seconds = rank.value
        assert kind == "PeerLost" and "rank 1" in message, rank
        assert seconds < 5.0


def launched(rank: Rank, exit_code: int, outcome: Outcome | None) -> Launched:
    error = exception_of(rank.number, outcome) if outcome and outcome.failed else None
    return Launched(exit_code, outcome.value if outcome else None, error, rank.output())


def name_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Returns (module, qualified name), by which a rank finds the function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<unnamed>")
    if module is None or "<" in name:
        raise ValueError(
            f"{name} cannot run on ranks, which find a function by its name: define it with `def` at the top "
            "level of a module."
        )
    return module, name


def exception_of(rank: int, outcome: Outcome) -> BaseException:
    """Returns the rank's exception, its traceback as a note; a RankError if it could not be pickled."""
    error = outcome.error or RankError(rank, outcome.summary)
    error.add_note(f"on rank {rank}:\n{outcome.trace}")
    return error


def blame(call: Call, ranks: list[Rank], outcomes: dict[int, Outcome | None], timeout: float) -> RankError:
    """Returns the error for a call that failed on some rank; it names the rank that failed first."""
    died = [rank for rank in ranks if rank.number in outcomes and outcomes[rank.number] is None]
    raised = [(o.at, rank) for rank, o in outcomes.items() if o is not None and o.failed]
    reports = {rank.number: report(rank, outcomes) for rank in ranks}
    cause: BaseException | None = None
    if died:
        guilty, what = died[0].number, "died in"
    elif raised:
        guilty, what = min(raised)[1], "raised in"
        cause = outcomes[guilty].error  # type: ignore[union-attr]
    else:
        guilty = next(rank.number for rank in ranks if rank.number not in outcomes)
        what = f"was still running after {timeout:g} s in"
    others = [text for number, text in reports.items() if number != guilty]
    headline = f"rank {guilty} of {len(ranks)} {what} {call.module}.{call.qualname}"
    error = RankError(guilty, "\n\n".join([headline, reports[guilty], *others]))
    error.__cause__ = cause
    return error


def report(rank: Rank, outcomes: dict[int, Outcome | None]) -> str:
    """Describes a rank in an error's message: its exception, its exit, or the stacks in which it hangs."""
    if rank.number not in outcomes:
        printed = rank.output()
        return section(rank, "still running", rank.stacks(), printed)
    outcome = outcomes[rank.number]
    if outcome is None:
        code = rank.end(deadline=math.inf)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return section(rank, how, "", rank.output())
    if outcome.failed:
        return section(
            rank, outcome.summary, outcome.trace, rank.output().removesuffix(outcome.trace.strip())
        )
    return section(rank, "finished", "", rank.output())


def section(rank: Rank, title: str, body: str, printed: str) -> str:
    lines = [f"--- rank {rank.number}: {title}", body.strip()]
    if printed.strip():
        lines += ["printed:", printed.strip()[-LONGEST_OUTPUT:]]
    return "\n".join(line for line in lines if line)


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the variables that torchrun sets on one host, for a store on `port` of this process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
