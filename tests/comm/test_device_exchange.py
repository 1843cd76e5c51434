"""Chunks between devices of several hosts, here between CPU tensors: the same sends and receives, over gloo
in place of NCCL."""

import os
import signal
import time

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.comm import CommTimeout, PeerLost, group_rank, group_size
from pyruntime.comm.channel import Channels
from tests.cuda.test_chunked import many
from tests.ops.test_primitives import all_reduce_case, column_case, plain_case, row_case
from tests.transports import on_transport, take

BETWEEN = "device between hosts"


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "dim"), [(0, 0), (1, 0), (3, 1), (41, 0), (50, 1)])
@pytest.mark.second_tier("0-0-dtype0-2")
def test_primitives_equal_exact_products(ranks, world, dtype, rows, dim):
    seed = int(torch.randint(2**31, ()))

    def run(case, *arguments):
        ranks.run(on_transport, world, BETWEEN, case, seed, *arguments)

    run(column_case, rows, dim, 7, 9, dtype, "chunked", False, True, False)
    run(column_case, rows, dim, 7, 9, dtype, "chunked", True, False, True)
    run(row_case, rows, dim, 6, 11, dtype, "chunked", True)
    run(all_reduce_case, max(1, rows), 6, 5, dtype, "chunked")
    run(plain_case, rows, dim, dtype)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.second_tier("4")
def test_sums_are_bitwise_those_of_symmetric_memory_and_of_the_next_run(ranks, world):
    found, again = (ranks.run(many, world, BETWEEN) for _ in range(2))
    expected = ranks.run(many, world, "symmetric_memory")
    for mine, next_run, theirs in zip(found, again, expected, strict=True):
        for one, other in ((mine[0], next_run[0]), (mine[1], next_run[1]), (mine[1], theirs[1])):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def faulty(group, fault, deadline):
    take(group, BETWEEN)
    return with_fault(group, fault, deadline)


def with_fault(group, fault, deadline, believed=True):
    """Calls a gather again and again, to the third of which rank 1 comes late or never; returns the error of
    this rank. believed: results are right where no error was raised."""
    comm.set_deadline(group, deadline)
    x, weight = torch.ones(4, 3), torch.ones(5, 3)
    for call in range(4):
        if call == 2 and group_rank(group) == 1:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(float(fault))
        try:
            y = ops.all_gather_matmul(x, weight, group, rows=4 * group_size(group), tier="chunked")
        except (CommTimeout, PeerLost) as error:
            return type(error).__name__, str(error)
        assert not believed or (y == 3).all()
    return "", ""


def test_a_late_rank_does_no_harm(ranks):
    assert [outcome.value for outcome in ranks.launch(faulty, 2, "0.5", 30.0)] == [("", "")] * 2


def test_a_rank_that_stays_away_is_a_timeout_on_all(ranks):
    outcomes = ranks.launch(faulty, 2, "4", 1.0)
    for outcome in outcomes:
        kind, message = outcome.value
        assert kind == "CommTimeout", outcomes
        assert "all_gather_matmul waited 1." in message and "for rows of rank 1" in message, outcomes


def test_a_rank_that_is_gone_is_lost(ranks):
    outcomes = ranks.launch(faulty, 3, "killed", 20.0)
    for outcome in (outcomes[0], outcomes[2]):
        kind, message = outcome.value
        assert kind == "PeerLost" and "rank 1" in message, outcomes


def sends(group):
    take(group, BETWEEN)
    rank = group_rank(group)
    channels = Channels(group, "pp", [(0, 1), (1, 0)], 4, 3, torch.float32)
    for rows in (4, 0, 2, 1, 4, 3):
        channels.expect(1 - rank, [rows])
        channels.send(1 - rank, torch.full((rows, 3), float(10 * rank + rows)))
        assert torch.equal(channels.receive(1 - rank), torch.full((rows, 3), float(10 * (1 - rank) + rows)))
    ops.all_gather(torch.ones(2, 2), group)
    return comm.transport_of(group)


def test_messages_between_stages_arrive(ranks):
    assert ranks.run(sends, 2) == ["sends and receives of gloo, 2 ranks on 2 hosts"] * 2
