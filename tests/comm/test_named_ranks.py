"""Messages name a rank by its number in the job, its place on the mesh, its process and its host, though ops
know it by its number in their group."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from functools import partial

import pytest

import pyruntime
from pyruntime.comm import Runtime
from pyruntime.comm.exchange import raise_for_ended
from pyruntime.comm.groups import job_rank_name
from tests.comm.test_failures import OPS, call
from tests.comm.test_faults import stop

DEADLINE_S = 2.0
MESHES = {
    "tp x dp": ({"tp": 2, "dp": 2}, ("tp", "dp")),
    "tp x pp": ({"tp": 2, "pp": 2}, ("tp", "pp")),
    "cp x dp": ({"tp": 1, "cp": 2, "dp": 2}, ("cp", "dp")),
}


def fault_on_mesh(_, sizes, culprit, axis, transport, fault):
    """Ops of every line of the mesh; the process of `culprit` ends or stops amid those of `axis`. Returns the
    type and the message of the error of each other rank."""
    whole = transport == "collectives"  # which moves rows whole
    do = partial(call, tier="unfused") if whole else call
    with Runtime.start(**sizes, deadline_s=DEADLINE_S) as runtime:
        lines = [
            getattr(runtime, name) for name in ("tp", "cp", "dp", "pp") if getattr(runtime, name).size > 1
        ]
        for line in lines:
            if transport != "auto":
                pyruntime.comm.configure(line, transport=transport)
            for op in OPS:
                do(op, line)
        line = getattr(runtime, axis)
        try:
            for number in range(400):
                if runtime.rank == culprit and number == 3:
                    if fault == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    stop(DEADLINE_S + 3.0)
                for each in (line, *lines):
                    do(OPS[number % 3], each)
                    time.sleep(0.002)
        except pyruntime.CommError as error:
            return type(error).__name__, str(error)
    return None


def name_on_mesh(sizes: dict[str, int], rank: int) -> str:
    """As messages write it: the last axis is the fastest."""
    axes, rest = [], rank
    for name in ("tp", "cp", "dp", "pp"):
        size = sizes.get(name, 1)
        if size > 1:
            axes.append(f"{name} {rest % size}")
        rest //= size
    return f"rank {rank} ({', '.join(axes)}"


@pytest.mark.parametrize(
    "transport",
    ["auto", *(pytest.param(name, marks=pytest.mark.kill) for name in ("process_group", "collectives"))],
)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("fault", "kind"), [("killed", "PeerLost"), ("stopped", "CommTimeout")])
@pytest.mark.second_tier(but=["killed-PeerLost-tp x pp-auto"])
def test_every_survivor_names_the_rank_of_the_job(ranks, mesh, transport, fault, kind):
    sizes, axes = MESHES[mesh]
    for culprit, axis in ((2, axes[0]), (3, axes[1])):
        outcomes = ranks.launch(
            fault_on_mesh, 4, sizes, culprit, axis, transport, fault, init=False, timeout=60
        )
        for rank, outcome in enumerate(outcomes):
            if rank == culprit:
                continue
            assert outcome.value is not None, outcome
            error, message = outcome.value
            assert error == kind, message
            assert name_on_mesh(sizes, culprit) in message, message
            assert f" on {socket.gethostname()}" in message, message
            # Every rank that is named, is named by its number in the job and at its place.
            for named, place in re.findall(r"rank (\d+) \(([a-z0-9, ]+)[;)]", message):
                assert name_on_mesh(sizes, int(named)) == f"rank {named} ({place}", message
            assert not re.search(r"rank \d+(?! \()", message), message
            # Who is waited for, or has ended, is the culprit alone.
            blamed = re.findall(r"waiting for rank (\d+)|: rank (\d+) \([^)]*\) has ended", message)
            assert {int(first or second) for first, second in blamed} <= {culprit}, message


def ended_on_mesh(_, sizes, culprit):
    """What a rank that is asked to stop is told when another has been killed."""
    with Runtime.start(**sizes, deadline_s=DEADLINE_S) as runtime:
        if runtime.rank == culprit:
            time.sleep(0.5)  # for a sign of life
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)
        try:
            raise_for_ended(f"{job_rank_name(runtime.rank)} was asked to stop")
        except pyruntime.PeerLost as error:
            return str(error)
    return None


def test_who_has_ended_is_named_to_a_rank_that_is_asked_to_stop(ranks):
    sizes, _ = MESHES["tp x dp"]
    outcomes = ranks.launch(ended_on_mesh, 4, sizes, 3, init=False, timeout=60)
    for outcome in outcomes[:3]:
        message, host = outcome.value, re.escape(socket.gethostname())
        assert re.search(
            rf": {re.escape(name_on_mesh(sizes, 3))}; process \d+ on {host}\) has ended", message
        )
        assert re.match(
            rf"(rank \d [^:]* reports: )?Rank \d [^:]*; process \d+ on {host}\) was asked", message
        )
