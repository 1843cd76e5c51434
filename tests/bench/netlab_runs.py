"""What the tests of netlab share: how it is run, and what the programs of its ranks begin with."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bench.netlab.network import missing

ROOT = Path(__file__).resolve().parents[2]
NETLAB = [sys.executable, "-m", "bench.netlab"]
"""Run in ROOT."""
NEEDED = missing()
on_a_network = pytest.mark.skipif(bool(NEEDED), reason=NEEDED or "nothing is missing")

# What the ranks' programs begin with. A connection fails until the other side listens.
PRELUDE = r"""
import json, os, signal, socket, sys, threading, time
rank, host = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
def tell(*what):
    os.write(1, f"{json.dumps(what)}\n".encode())  # at once, so that lines of several ranks do not mix
def listen(port):
    return socket.create_server(("0.0.0.0", port))
def connect(host, port):
    while True:
        try:
            return socket.create_connection((f"host{host}", port))
        except OSError:
            time.sleep(0.01)
def receive_exactly(connection, size):
    while size:
        size -= len(connection.recv(min(size, 1 << 18))) or sys.exit("the sender closed early")
"""


def command(program: str, *arguments: str) -> list[str]:
    return ["--", sys.executable, "-c", PRELUDE + textwrap.dedent(program), *arguments]


def netlab(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*NETLAB, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def hosts(count: int, ranks: int = 1, rate: str = "1gbit") -> list[str]:
    return ["--hosts", str(count), "--ranks-per-host", str(ranks), "--rate", rate]


def largest_gap(stamps: list[float]) -> float:
    """Between moments that follow each other, in seconds."""
    return max(b - a for a, b in itertools.pairwise(stamps))
