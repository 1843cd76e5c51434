"""bench/netlab is interrupted or killed, or a host of it: no process and no network stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bench.netlab_runs import NETLAB, ROOT, command, hosts, on_a_network


def processes(marker: str) -> list[int]:
    """Those with `marker` among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and marker in (entry / "cmdline").read_text(errors="replace"):
                found.append(int(entry.name))
    return found


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def networks() -> set[str]:
    """The network namespaces that processes of this machine are in."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(link))
    return found


def soon(what: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Running:
    """A netlab with two hosts of two ranks that goes on until a signal ends it."""

    PROGRAM = """
        signal.signal(signal.SIGINT, signal.SIG_IGN if rank == 3 else lambda *_: sys.exit(0))
        tell("up")
        time.sleep(60)
    """

    def __init__(self) -> None:
        self.marker = f"netlab-test-{uuid.uuid4().hex}"
        arguments = [*hosts(2, 2), "--grace", "0.3s", *command(self.PROGRAM, self.marker)]
        self.process = subprocess.Popen(
            [*NETLAB, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert [self.process.stdout.readline() for _ in range(4)] == ['["up"]\n'] * 4
        inside = [pid for host in children(self.process.pid) for pid in (host, *children(host))]
        self.networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in inside}
        assert len(self.networks) == 3  # two hosts and the switch

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.close()


@on_a_network
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_is_passed_on_and_leaves_nothing_behind(running, number, code):
    before = os.listdir("/sys/class/net")
    assert len(processes(running.marker)) == 5  # four ranks and netlab itself
    returned, errors = running.end(number)
    assert returned == code
    assert f"{signal.Signals(number).name}: passed to all ranks, which have 0.3 s (--grace) to end" in errors
    if number == signal.SIGINT:  # ranks 0 to 2 end by themselves, rank 3 ignores it
        assert errors.endswith(
            "netlab: rank 3 on host 1 was killed by SIGTERM (sent by netlab after --grace).\n"
        )
    else:
        assert errors.count("was killed by SIGTERM (passed on by netlab)") == 4
    assert processes(running.marker) == []
    assert not running.networks & networks()
    assert os.listdir("/sys/class/net") == before


@on_a_network
def test_killing_netlab_itself_leaves_nothing_behind(running):
    assert running.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert soon(lambda: processes(running.marker) == [])
    assert soon(lambda: not running.networks & networks())


@on_a_network
def test_a_killed_host_ends_the_run_like_killed_ranks(running):
    unshared = [pid for pid in children(running.process.pid) if children(pid)]
    (first_process,) = children(unshared[1])
    os.kill(first_process, signal.SIGKILL)
    _, errors = running.process.communicate(timeout=30)
    assert running.process.returncode == 137
    assert "host 1 is gone: its first process was killed, and with it ranks 2, 3." in errors
    assert "ranks 0, 1 did not end within 0.3 s (--grace): sent SIGTERM" in errors
    assert processes(running.marker) == []
    assert not running.networks & networks()
