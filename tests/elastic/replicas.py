"""Replicas on quadratics whose coefficients are the data: what a round computes depends on its block alone.
They run in processes of their own, which may be killed, below a service in the test's process.
"""

from __future__ import annotations

import contextlib
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

from pyruntime.elastic import exchange, transfer
from pyruntime.elastic.coordinator import Coordinator
from pyruntime.elastic.member import Member
from pyruntime.elastic.service import Service
from pyruntime.elastic.state import OuterState
from pyruntime.outer import Method
from pyruntime.outer.optimizer import OuterOptimizer

LR, TAU, SIZE = 0.1, 3, 5000
STEP_S = 0.03
"""Of a step: moments of a round are apart."""


@contextlib.contextmanager
def service(
    folder: Path, replicas: int, quorum: int = 1, deadline_s: float = 3.0, ends: bool = True
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


def rounds(folder: Path) -> list[list[int]]:
    """The blocks of every round, of the record."""
    lines = [json.loads(line) for line in (folder / "record").read_text().splitlines()]
    return [sorted(line["blocks"].values()) for line in lines if line["event"] == "round"]


def data(step: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(step)
    return draw.uniform(0.2, 2.0, SIZE), draw.standard_normal(SIZE)


def start() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SIZE)


def expected(of_rounds: list[list[int]], method: Method) -> np.ndarray:
    """The outer iterate after these rounds, by its definition."""
    z, m = start(), np.zeros(SIZE)
    for blocks in of_rounds:
        moved = []
        for block in blocks:
            x = z.copy()
            for step in range(block * TAU + 1, block * TAU + TAU + 1):
                a, c = data(step)
                x -= LR * a * (x - c)
            moved.append(z - x)
        d = np.mean(moved, 0)
        m = method.momentum * m + d
        z = z - method.lr * (d + method.momentum * m if method.nesterov else m)
    return z


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
        move = exchange._Flow._move

        def moved(self, *arguments):
            move(self, *arguments)
            count()

        exchange._Flow._move = moved
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


def replica(_group, folder, address, method, of_rounds, deaths, late, how=signal.SIGKILL):
    """One replica of the run. deaths: {rank: (moment, number)}, by the signal `how`; late: ranks that come
    once the first has died. Returns the parameters in the end, and how many rounds it has taken part in; None
    where the run was over."""
    rank = int(os.environ["RANK"])
    if rank in late:
        end = time.monotonic() + 30
        while not list(folder.glob("died-*")):
            assert time.monotonic() < end
            time.sleep(0.005)

    def die() -> None:
        (folder / f"died-{rank}").write_text(str(os.getpid()))
        os.kill(os.getpid(), how)

    moment, number = deaths.get(rank, ("", 0))
    die_at(moment, number, die)
    torch.set_num_threads(1)
    module = nn.Module()
    module.x = nn.Parameter(torch.tensor(start()))
    inner = torch.optim.SGD([module.x], LR)
    joined = Member(
        address, f"replica-{rank}", {"tau": TAU, "rounds": of_rounds}, label=f"r{rank}", deadline_s=2.0
    )
    outer = OuterOptimizer(module, None, method, sums=joined)
    state = OuterState(outer)
    (sent,) = outer.travelling()
    if not joined.join(state, sent, 0, [0]):
        joined.close()
        return None
    outer.begin_anew()
    first = joined.round
    for step in range(joined.step + 1, of_rounds * TAU + 1):
        a, c = (torch.tensor(each) for each in data(joined.step_of_data(step)))
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
    return module.x.detach().numpy(), of_rounds - first
