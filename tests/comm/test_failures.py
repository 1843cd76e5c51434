"""What happens when ranks are late, killed, interrupted or out of step: a named error within the deadline,
and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import pyruntime
from pyruntime import ops
from pyruntime.comm import group_rank, group_size
from tests.transports import take

OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]


def call(op: str, group, rows: int = 12, tier: str = "chunked"):
    weight = torch.ones(5, 3)
    if op == "all_gather_matmul":
        share = torch.ones(rows, 3).tensor_split(group_size(group))[group_rank(group)]
        return ops.all_gather_matmul(share, weight, group, rows=rows, tier=tier)
    return getattr(ops, op)(torch.ones(rows, 3), weight, group, tier=tier)


def killed_case(group, op):
    """Rank 1 dies inside an op: it is killed by a timer while it waits for rank 2, which comes late."""
    call(op, group)
    rank = group_rank(group)
    if rank == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    elif rank == 2:
        time.sleep(1.0)
    start = time.monotonic()
    try:
        call(op, group)
        call(op, group)
    except pyruntime.PeerLost as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def open_memory() -> list[str]:
    """Symmetric memory that this process, or any that it has started, still has open; orphans too. Other
    sessions on this machine have their own."""
    found = []
    mine = f"XDG_CACHE_HOME={os.environ['XDG_CACHE_HOME']}".encode()  # no other session has this folder
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.name != str(os.getpid()) and mine not in (process / "environ").read_bytes().split(
                b"\0"
            ):
                continue
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if "pyruntime-symmetric-memory" in os.readlink(descriptor):
                        found.append(str(descriptor))
    return found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.second_tier(but=["matmul_all_reduce"])
def test_a_rank_killed_in_the_middle_of_an_op(ranks, op):
    before = set(open_memory())  # what the pool of other tests holds
    outcomes = ranks.launch(killed_case, 3, op)
    assert outcomes[1].exit_code == -signal.SIGKILL
    told = [outcomes[rank].value for rank in (0, 2)]
    for message, seconds in told:
        assert op in message and "waiting for rank" in message and "has ended" in message, message
        assert seconds < 5
    # The same cause on both: the one that met it second says whose word it passes on.
    assert len({message.split(" reports: ")[-1] for message, _ in told}) == 1, told
    assert set(open_memory()) <= before


def silent_case(group, op):
    call(op, group)
    pyruntime.comm.set_deadline(group, 0.3)
    if group_rank(group) == 1:
        time.sleep(2.0)
        return None
    messages = []
    for _ in range(2):
        try:
            call(op, group)
        except pyruntime.CommError as error:
            messages.append((type(error), str(error)))
    return messages


@pytest.mark.parametrize("op", OPS)
@pytest.mark.second_tier(but=["matmul_all_reduce"])
def test_a_silent_rank_ends_in_a_timeout_and_closes_the_group(ranks, op):
    first, second = ranks.launch(silent_case, 2, op)[0].value
    assert first[0] is pyruntime.CommTimeout
    for part in (op, "rank 0 waiting for rank 1", "deadline of 0.3 s", "expected", "seen"):
        assert part in first[1], first[1]
    assert second[0] is pyruntime.CommError and "out of step since an earlier error" in second[1]


def backward_case(group):
    """The error keeps its type on its way through the autograd engine."""
    x = torch.ones(4, 3, requires_grad=True)
    weight = torch.ones(5, 3, requires_grad=True)
    y = ops.matmul_reduce_scatter(x, weight, group, tier="chunked")
    pyruntime.comm.set_deadline(group, 0.3)
    if group_rank(group) == 1:
        time.sleep(2.0)
        return None
    try:
        y.sum().backward()
    except pyruntime.CommTimeout as error:
        return str(error)
    return "no error"


def test_a_timeout_in_backward_keeps_its_type(ranks):
    assert "rank 0 waiting for rank 1" in ranks.launch(backward_case, 2)[0].value


def interrupt_case(group):
    call("matmul_all_reduce", group)
    if group_rank(group) == 1:
        time.sleep(2.0)
        return None
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        call("matmul_all_reduce", group)
    except KeyboardInterrupt:
        return time.monotonic() - start
    return -1.0


def test_ctrl_c_ends_a_wait(ranks):
    assert 0.1 < ranks.launch(interrupt_case, 2)[0].value < 1.5


def straggler_case(group, seed, rounds):
    """Random ops of random shapes, one rank late at random before each; every result equals the one
    computed without peers."""
    rank, size = group_rank(group), group_size(group)
    shared = random.Random(seed)  # the same draws on all ranks
    for number in range(rounds):
        rows, n, k = shared.randrange(0, 40), shared.randrange(1, 20), shared.randrange(1, 20)
        op, dtype = shared.choice(OPS), shared.choice([torch.float32, torch.bfloat16])
        late, seconds = shared.randrange(size), shared.choice([0, 0, 1e-4, 2e-3])
        generator = torch.Generator().manual_seed(shared.randrange(2**31))
        # Small integers: every product and sum is exact in either dtype, so right means bitwise right.
        x = torch.randint(-2, 3, (size, rows, k), generator=generator).to(dtype)
        weight = torch.randint(-1, 2, (size, n, k), generator=generator).to(dtype)
        if rank == late:
            time.sleep(seconds)
        if op == "all_gather_matmul":
            found = ops.all_gather_matmul(
                x[0].tensor_split(size)[rank], weight[rank], group, rows=rows, tier="chunked"
            )
            exact = x[0] @ weight[rank].T
        else:
            found = getattr(ops, op)(x[rank], weight[rank], group, tier="chunked")
            exact = sum(x[r] @ weight[r].T for r in range(size))
            if op == "matmul_reduce_scatter":
                exact = exact.tensor_split(size)[rank]
        assert torch.equal(found, exact), (number, op, rows, n, k, dtype)
    return rounds


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_500_rounds_of_random_shapes_with_stragglers(ranks, world_size):
    rounds = {2: 200, 3: 200, 4: 100}[world_size]
    seed = random.randrange(2**31)
    assert ranks.run(straggler_case, world_size, seed, rounds, timeout=120) == [rounds] * world_size, seed


def in_flight_case(group):
    """The backward of a column linear has a gather and a scatter in flight at once; their workspaces are
    separate."""
    take(group, "symmetric_memory")  # between hosts the gathered rows would be kept
    rank, size = group_rank(group), group_size(group)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (9, 4), generator=generator).double()
    weight = torch.randint(-2, 3, (size, 6, 4), generator=generator).double()
    shard = x.tensor_split(size)[rank].clone().requires_grad_()
    own = weight[rank].clone().requires_grad_()
    before = pyruntime.comm.stats(group).ops
    y = ops.all_gather_matmul(shard, own, group, rows=9, tier="chunked")
    y.backward(torch.ones_like(y))
    assert pyruntime.comm.stats(group).ops - before == 3  # gather; gather again and scatter
    assert torch.equal(own.grad, torch.ones(9, 6).double().T @ x)
    assert torch.equal(shard.grad, weight.sum((0, 1)).expand(9, 4).tensor_split(size)[rank])


def test_two_flights_of_one_backward_do_not_mix(ranks):
    ranks.run(in_flight_case, 3)


def close_case(group):
    call("matmul_all_reduce", group, rows=4096)
    held = pyruntime.comm.workspace_bytes(group)
    pyruntime.comm.close(group)
    freed = pyruntime.comm.workspace_bytes(group)
    call("matmul_all_reduce", group)
    return held, freed


def test_a_closed_group_frees_its_workspace_and_can_be_used_again(ranks):
    for held, freed in ranks.run(close_case, 2):
        assert held >= 4096 * 5 * 4 and freed == 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_deadlines_are_bounded(seconds):
    with pytest.raises(ValueError, match="is no deadline"):
        pyruntime.comm.set_deadline("any", seconds)


def close_keeps_case(group):
    pyruntime.comm.set_deadline(group, 7.0)
    call("matmul_all_reduce", group)
    pyruntime.comm.close(group)
    call("matmul_all_reduce", group)
    return pyruntime.comm.deadline(group)


def test_closing_keeps_the_deadline(ranks):
    assert [rank.value for rank in ranks.launch(close_keeps_case, 2)] == [7.0, 7.0]


def interrupted_begin_case(group):
    """Ctrl-C while a slot is awaited loses a flight: the group must say so, and not go on out of step."""
    for _ in range(2):
        call("matmul_all_reduce", group)
    pyruntime.comm.set_deadline(group, 5.0)
    if group_rank(group) == 1:
        time.sleep(2.0)
        return None
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        for _ in range(6):
            ops.all_gather_matmul(torch.ones(1, 3), torch.ones(5, 3), group, rows=1, tier="chunked")
    except KeyboardInterrupt:
        pass
    try:
        call("matmul_all_reduce", group)
    except pyruntime.CommError as error:
        return str(error)
    return "no error"


def test_an_interrupted_op_closes_the_group(ranks):
    assert "out of step since an earlier error" in ranks.launch(interrupted_begin_case, 2)[0].value
