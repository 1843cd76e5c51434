"""The first process of a host of bench/netlab: starts its ranks, reports how they end, passes signals on.

netlab starts it as process 1 of the host's pid namespace, with the number of an inherited connection. The
kernel ends every process of a pid namespace with its process 1. This process ends when the connection does,
so no rank stays behind even if netlab is killed with SIGKILL.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


def become(hostname: str, names: str) -> None:
    """Gives this host its own name, its own /dev/shm, and `names` as /etc/hosts.

    Otherwise ranks of different hosts could share memory, which no real network allows. NCCL tells hosts
    apart by their name, and gloo uses the address of the host's own name.
    """
    socket.sethostname(hostname)
    subprocess.run(["mount", "-t", "tmpfs", "netlab", "/dev/shm"], check=True)
    hosts = Path("/dev/shm/hosts")
    hosts.write_text(names, encoding="utf-8")
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    hosts.unlink()


class Ranks:
    def __init__(self, netlab: Connection) -> None:
        self._netlab = netlab
        self._running: dict[int, subprocess.Popen] = {}

    def start(self, rank: int, command: list[str], environment: dict[str, str], logs: str | None) -> None:
        out = err = None
        if logs is not None:
            out, err = (open(Path(logs, f"rank{rank}.{end}"), "wb") for end in ("out", "err"))  # noqa: SIM115
        # A session for each rank, so that a signal also reaches the children of a shell script. No input, as
        # typed text could be meant for any rank.
        self._running[rank] = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    def signal(self, number: int, rank: int) -> None:
        if rank in self._running:  # not reaped yet, so its pid is still its own
            os.killpg(self._running[rank].pid, number)

    def reap(self) -> None:
        """Waits for any child, not only for ranks: process 1 inherits every orphan of its namespace."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for rank, process in list(self._running.items()):
                if process.pid == pid:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    del self._running[rank]
                    self._netlab.send(("ended", rank, process.returncode, time.monotonic()))


def obey(ranks: Ranks, netlab: Connection, order: tuple[Any, ...]) -> None:
    match order:
        case ("start", rank, command, environment, logs):
            try:
                ranks.start(rank, command, environment, logs)
                netlab.send(("started", rank))
            except OSError as error:
                netlab.send(("not started", rank, error.errno, str(error)))
        case ("signal", number, rank):
            ranks.signal(number, rank)


def main() -> None:
    netlab = Connection(int(sys.argv[1]))
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    ranks = Ranks(netlab)
    try:
        try:
            become(*netlab.recv())
        except (OSError, subprocess.CalledProcessError) as error:
            netlab.send(("failed", str(error)))
            return
        netlab.send(("ready",))
        while True:
            for ready in wait([netlab, woken]):
                if ready is netlab:
                    obey(ranks, netlab, netlab.recv())
                else:
                    woken.recv(4096)
            ranks.reap()
    except (EOFError, ConnectionError):
        os._exit(0)  # netlab closed the connection or died


if __name__ == "__main__":
    main()
