"""Replicas on quadratics whose coefficients are the data: what a round computes depends on its block alone.
They run in processes of their own, which may be killed, below a service in the test's process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pyruntime.replicas import Method, member_sums, transfer
from pyruntime.replicas.coordinator import Coordinator
from pyruntime.replicas.donated import OuterState
from pyruntime.replicas.member import Member
from pyruntime.replicas.outer_optimizer import OuterOptimizer
from pyruntime.replicas.service import Service
from tests.device import sim

LR, TAU, SIZE = 0.1, 3, 5000
STEP_S = 0.03
"""Of a step: moments of a round are apart."""
LAST = 4
"""Rounds in the end that wait for those that come."""
LONG_S = 30.0
"""Where a test is not about a deadline."""


@contextlib.contextmanager
def service(
    folder: Path, replicas: int, quorum: int = 1, deadline_s: float = LONG_S, ends: bool = True
) -> Iterator[str]:
    """Its address; its record is folder/record. ends: it is to end with the run by itself."""
    made = Service(Coordinator(replicas, quorum, deadline_s), "127.0.0.1", 0, folder / "record")
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        yield f"127.0.0.1:{made.port}"
        thread.join(20 if ends else 0)
        assert not (ends and thread.is_alive()), "the service ends with the run"
    finally:
        made.stop()
        thread.join(5)
        made.close()


def shares(folder: Path) -> list[dict[str, int]]:
    """Of every round on record, the block of each replica that counted."""
    lines = [json.loads(line) for line in (folder / "record").read_text().splitlines()]
    return [line["blocks"] for line in lines if line["event"] == "round"]


def data(step: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(step)
    return draw.uniform(0.2, 2.0, SIZE), draw.standard_normal(SIZE)


def start() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SIZE)


@dataclasses.dataclass
class Moved:
    """What replicas moved in a round."""

    base: np.ndarray
    """The outer iterate that it is measured from."""
    moved: list[np.ndarray]
    first: list[float]
    """Length of each one's first step."""


def train(x: np.ndarray, block: int) -> tuple[np.ndarray, float]:
    """Where a round's steps lead, and how far the first one."""
    first = 0.0
    for step in range(block * TAU + 1, block * TAU + TAU + 1):
        a, c = data(step)
        moved = LR * a * (x - c)
        first = first or float(np.linalg.norm(moved))
        x = x - moved
    return x, first


def outer_step(z: np.ndarray, m: np.ndarray, of: Moved, method: Method) -> tuple[np.ndarray, np.ndarray]:
    if not of.moved:
        return z, m
    d = np.mean(of.moved, 0)
    if method.penalty is not None:
        reach = TAU * np.sqrt(np.mean(np.square(of.first)))
        d = d / method.penalty(float(np.linalg.norm(z - (of.base - d))), float(reach))
    m = method.momentum * m + d
    return z - method.lr * (d + method.momentum * m if method.nesterov else m), m


def expected(of_rounds: list[dict[str, int]], method: Method) -> np.ndarray:
    """The outer iterate after these rounds, by its definition."""
    z, m = start(), np.zeros(SIZE)
    at: dict[str, np.ndarray] = {}
    coming: Moved | None = None
    for blocks in of_rounds:
        begins = z
        ends = {name: train(at.get(name, z), block) for name, block in blocks.items()}
        first = [length for _, length in ends.values()]
        if method.delay == 0:
            z, m = outer_step(z, m, Moved(z, [z - x for x, _ in ends.values()], first), method)
            continue
        if coming is not None:
            z, m = outer_step(z, m, coming, method)
        if method.pull < 1:
            begins = z
            at = {name: x + method.pull * (z - x) for name, (x, _) in ends.items()}
        there = at or {name: x for name, (x, _) in ends.items()}
        coming = Moved(begins, [begins - x for x in there.values()], first)
    if coming is None:
        return z
    return outer_step(z, m, coming, method)[0] if method.pull == 1 else z - np.mean(coming.moved, 0)


def die_at(moment: str, number: int, die: Callable[[], None]) -> None:
    """This process calls `die` when it comes to that moment for the `number`-th time."""
    left = [number]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            die()

    if moment.startswith("tells "):
        tell = Member._tell

        def told(self, message):
            tell(self, message)
            if message["type"] == moment.removeprefix("tells "):
                count()

        Member._tell = told
    elif moment == "sums":
        move = member_sums._Flow._move

        def moved(self, *arguments):
            move(self, *arguments)
            count()

        member_sums._Flow._move = moved
    elif moment == "gives":
        whole = transfer.bytes_of

        def half(tensor):  # in the thread that sends
            count()
            return whole(tensor)

        transfer.bytes_of = half
    elif moment == "takes":
        read = transfer.read_into

        def taken(*arguments):
            read(*arguments)
            count()

        transfer.read_into = taken
    else:
        assert moment in ("", "steps")


def wait_until(there: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    end = time.monotonic() + LONG_S
    while not there():
        assert time.monotonic() < end
        meanwhile()
        time.sleep(0.005)


def has_gone_on(folder: Path, replicas: int) -> bool:
    """Whether a round has counted since one of so many was lost, or all were, or are stopped."""
    record = folder / "record"
    lines = record.read_text().splitlines(keepends=True) if record.exists() else []
    kinds = [json.loads(line)["event"] for line in lines if line.endswith("\n")]
    is_all = replicas in (kinds.count("lost"), len(list(folder.glob("died-*"))))
    return is_all or ("lost" in kinds and "round" in kinds[kinds.index("lost") :])


def mark_progress(path: Path) -> None:
    """Into `path`, the round whose beginning this process has the state of; once it is a member, the end."""
    tell = Member._tell

    def told(self, message):
        tell(self, message)
        if message["type"] in ("ready", "begun"):
            left = path.with_suffix(".new")
            left.write_text(str(self.round if message["type"] == "ready" else 1 << 30))
            left.replace(path)

    Member._tell = told


def replica(_group, folder, address, method, of_rounds, deaths, late, how=signal.SIGKILL, device="cpu"):
    """One replica of the run, on that device. deaths: {rank: (moment, number)}, by the signal `how`; of those
    that die while they give a state, the first one alone. late: ranks that come once a round has counted
    without one that died, or all have. None takes the last rounds before these are there, or have died.
    Returns the parameters in the end, and how many rounds it has taken part in; None where the run was
    over."""
    rank = int(os.environ["RANK"])
    if rank in late:
        wait_until(lambda: has_gone_on(folder, int(os.environ["WORLD_SIZE"]) - len(late)))

    def die() -> None:
        with contextlib.suppress(FileExistsError):
            victim = "died-gives" if moment == "gives" else f"died-{rank}"
            with open(folder / victim, "x", encoding="utf-8") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), how)

    moment, number = deaths.get(rank, ("", 0))
    die_at(moment, number, die)
    if rank in late:
        mark_progress(folder / f"come-{rank}")

    def is_there(other: int) -> bool:
        """That one takes part in the round, or will in the next; or it has died."""
        come = folder / f"come-{other}"
        return (folder / f"died-{other}").exists() if other in deaths else (
            come.exists() and int(come.read_text() or -1) >= joined.round
        )  # fmt: skip

    torch.set_num_threads(1)
    if device == "sim":
        sim.begin(delays=rank + 1)
    module = nn.Module()
    module.x = nn.Parameter(torch.tensor(start(), device=device))
    inner = torch.optim.SGD([module.x], LR)
    deadline_s = 2.0 if how == signal.SIGSTOP else LONG_S
    job = {"tau": TAU, "rounds": of_rounds, "late": method.rounds_late}
    joined = Member(address, f"replica-{rank}", job, label=f"r{rank}", deadline_s=deadline_s)
    outer = OuterOptimizer(module, None, method, sums=joined)
    state = OuterState(outer)
    (sent,) = outer.travelling()
    if not joined.join(state, sent, 0, [0]):
        joined.close()
        return None
    outer.begin_anew(joined.is_behind)
    first = joined.round
    for step in range(joined.step + 1, of_rounds * TAU + 1):
        if step > (of_rounds - LAST) * TAU:
            wait_until(lambda: all(map(is_there, late)), joined.pump)
        a, c = (torch.tensor(each, device=device) for each in data(joined.step_of_data(step)))
        module.x.grad = a * (module.x.detach() - c)
        inner.step()
        time.sleep(STEP_S)
        if moment == "steps" and step == number:
            die()
        outer.step()
    outer.finish()
    outer.close()
    if how == signal.SIGSTOP:
        for path in folder.glob("died-*"):
            os.kill(int(path.read_text()), signal.SIGCONT)
    return module.x.detach().cpu().numpy(), of_rounds - first
