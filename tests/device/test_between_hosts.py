"""Ranks that are told to be on two hosts train on simulated devices as one CPU rank does: pipelines and
context parallelism send their messages by the devices' process groups."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from pyruntime import comm
from pyruntime.comm import CommError, Runtime, companions
from pyruntime.comm.channel import Channels
from pyruntime.comm.groups import crosses_hosts
from pyruntime.train.device import Device, check_device
from pyruntime.train.metrics import read
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from pyruntime.train.validate import check
from tests.cuda import build as kernels
from tests.device import sim
from tests.device.test_training import config_ranks, job, learned
from tests.train import jobs

pytestmark = pytest.mark.usefixtures("simulated")

HOSTS = 2
MESHES = {
    "zb-v": {
        "model": {"num_hidden_layers": 4},
        "parallel": {"tp": 1, "pp": 2},
        "pipeline": {"kind": "zb-v"},
    },
    "cp": {"parallel": {"tp": 1, "cp": 2}},
    "1f1b": {"parallel": {"tp": 1, "pp": 2}},
    "cp x pp": {"parallel": {"tp": 1, "cp": 2, "pp": 2}},
    "tp x pp": {"parallel": {"tp": 2, "pp": 2}},
    "interleaved": {
        "model": {"num_hidden_layers": 8},
        "parallel": {"tp": 1, "pp": 4},
        "pipeline": {"kind": "interleaved", "virtual": 2},
    },
    "ring of four": {"parallel": {"tp": 1, "cp": 4}},
    "tp": {"parallel": {"tp": 4}},
    "zero 1": {"parallel": {"tp": 1, "dp": 4, "zero": 1}},
    "zero 3": {"parallel": {"tp": 1, "dp": 4, "zero": 3}},
    "experts": {
        "model": {"experts": 8},
        "train": {"balance_loss": 0.0},  # of one rank's micro-batches
        "parallel": {"tp": 2, "dp": 2, "ep": 4, "zero": 2},
    },
}
FIRST = ["cp", "zero 3"]
ON_RAILS = {"tp": "tp", "zero 1": "dp", "zero 3": "dp", "experts": "ep"}
"""Meshes with an axis over two hosts with several ranks each, and that axis."""


def begin(delays: int) -> None:
    """Makes this rank one of a host with its share of the ranks."""
    rank, here = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // HOSTS
    os.environ |= {"LOCAL_RANK": str(rank % here), "LOCAL_WORLD_SIZE": str(here)}
    sim.begin_rank(delays=delays)
    sim.use_kernels(kernels.LIBRARY)


def tell_hosts() -> None:
    """Says of all groups where their ranks are: the ranks share this machine."""
    here = dist.get_world_size() // HOSTS
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        hosts = [f"host {rank // here}" for rank in sorted(ranks, key=ranks.__getitem__)]
        if len(hosts) > 1 and isinstance(group, dist.ProcessGroup):  # else this rank is not in it
            comm.configure(group, hosts=hosts, chunk_bytes=64)  # few, so that they go by rails


def ways_of_messages(name: str) -> set[str]:
    """How the messages of a group's edges travel, by the first word."""
    edges = [each.name for each in companions._of_group(name) if " to " in each.name]
    return {comm.transport_of(edge).split()[0] for edge in edges}


def train(group, config, delays, on_rails):
    """Returns the loss and the gradient norm of each step."""
    begin(delays)
    check(config, config_ranks(config))
    axes = {name: getattr(config.parallel, name) for name in ("tp", "cp", "pp", "dp")}
    with Runtime.start(**axes, ep=config.parallel.ep, device="sim") as runtime:
        check_device(config, Device(runtime.device))
        tell_hosts()
        folder = run(config, "job", runtime, StopRequest())
        if on_rails:
            axis = comm.group_name(getattr(runtime, on_rails))
            served = axis, *(each.name for each in companions._of_group(axis))
            found = " ".join(map(comm.transport_of, served))
            assert "rails of sim between hosts, copy engines inside" in found, found
            return [(step["loss"], step["grad_norm"]) for step in read(folder / "metrics.jsonl")]
        outermost = runtime.pp if axes["pp"] > 1 else runtime.cp
        assert "sends" in ways_of_messages(comm.group_name(outermost)), "its messages stayed on one host"
    return [(step["loss"], step["grad_norm"]) for step in read(folder / "metrics.jsonl")]


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.second_tier(but=FIRST)
def test_a_mesh_of_two_hosts_learns_what_one_cpu_rank_learns(ranks, tmp_path, name):
    config = job(tmp_path, **MESHES[name])
    alone = jobs.changed(config, "parallel", tp=1, dp=1, cp=1, pp=1, ep=None, dp_replicate=1)
    alone = jobs.changed(alone, "pipeline", kind="1f1b", virtual=1)
    expected = learned(ranks, alone, "cpu", str(tmp_path / "cpu"))
    config = jobs.changed(config, "output", run_dir=str(tmp_path / "sim"))
    arguments = config, len(name), ON_RAILS.get(name, "")
    outcomes = ranks.launch(train, config_ranks(config), *arguments, init=False, timeout=240.0)
    for rank in outcomes:
        assert rank.error is None, rank.error
    found = torch.tensor(outcomes[0].value, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)


def ping_pong(group, fault, deadline):
    """Two ranks send each other tensors, rank 1 with a fault; returns the error of a rank and its message."""
    begin(0)
    try:
        with Runtime.start(tp=1, pp=2, device="sim", deadline_s=deadline) as runtime:
            tell_hosts()
            return "", exchanged(runtime, fault)
    except CommError as error:
        return type(error).__name__, str(error)


def exchanged(runtime, fault) -> int:
    """How many elements were not what the other rank had sent."""
    other = 1 - runtime.rank
    channels = Channels(runtime.pp, "pp", [(0, 1), (1, 0)], 3, 5, torch.float32, runtime.device)
    wrong = torch.zeros((), device=runtime.device)
    for number in range(60):
        if number == 6 and runtime.rank == 1:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(fault)
        channels.expect(other, [3])
        channels.send(other, torch.full((3, 5), float(number), device=runtime.device))
        wrong += (channels.receive(other) != number).sum()  # the host does not wait
        time.sleep(0.0 if fault == 1.0 else 0.1)
    return int(wrong.item())


def test_a_late_rank_does_no_harm(ranks):
    outcomes = ranks.launch(ping_pong, 2, 1.0, 60.0, init=False)
    assert [(rank.error, rank.value) for rank in outcomes] == [(None, ("", 0))] * 2


def meet_twice(group):
    """What the devices have done once two ranks have met for an edge, and the groups that torch then has."""
    begin(0)
    with Runtime.start(tp=1, pp=2, device="sim") as runtime:
        tell_hosts()
        found, known = [], len(dist.distributed_c10d._world.pg_map)
        for _ in range(2):
            sim.reset_counts()
            assert crosses_hosts(comm.companion(runtime.pp, "pp", (0, 1)).name, runtime.device)
            messages = sim.launches().get("collective messages", 0)
            found.append((messages, len(dist.distributed_c10d._world.pg_map) - known))
            comm.close(runtime.pp)
        return found, len(dist.distributed_c10d._world.pg_map) - known


def test_the_ranks_of_an_edge_connect_before_their_first_message_and_close_the_connection(ranks):
    """With NCCL the host waits where ranks connect, and each would first wait for what it is to receive."""
    outcomes = ranks.launch(meet_twice, 2, init=False)
    assert [rank.error for rank in outcomes] == [None, None]
    assert [rank.value for rank in outcomes] == [([(1, 1), (1, 1)], 0)] * 2


@pytest.mark.parametrize(("fault", "deadline"), [("killed", 60.0), (12.0, 2.0)])
@pytest.mark.second_tier("12.0-2.0")
def test_a_rank_that_does_not_come_is_named(ranks, fault, deadline):
    outcomes = ranks.launch(ping_pong, 2, fault, deadline, init=False)
    assert outcomes[0].error is None, outcomes[0]
    kind, message = outcomes[0].value
    assert kind in ("PeerLost", "CommTimeout"), outcomes
    assert "send waited" in message and "rank 1" in message, outcomes
