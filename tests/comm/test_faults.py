"""One rank fails in the middle of a job: every rank ends with the same named cause, soon after the deadline
at the latest, however the chunks travel."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import random
import signal
import subprocess
import time

import pytest
import torch

import pyruntime
from pyruntime import ops
from pyruntime.comm import group_rank, group_size
from tests.comm.test_failures import OPS, call, straggler_case
from tests.transports import TRANSPORTS, on_transport, take

DEADLINE_S = 1.5
CULPRIT = 1


def size_for(transport: str) -> int:
    return 4 if transport == "hierarchical" else 3


def stop(seconds: float) -> None:
    """Stops this process, which another one wakes again. It is stopped before this returns, and not before
    the other one runs, however busy the machine is."""
    script = f"echo; sleep {seconds}; kill -CONT {os.getpid()}"
    waker = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    waker.stdout.readline()
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.stdout.close()


def fault_case(group, transport, fault):
    """(type, message, seconds from the fault to the error, those of the slowest op before) of this rank, or
    None where it has no error."""
    take(group, transport)
    pyruntime.comm.set_deadline(group, DEADLINE_S)
    for op in OPS:
        call(op, group)
    is_culprit = group_rank(group) == CULPRIT
    start, slowest = time.monotonic(), 0.0
    try:
        for round_number in range(4):
            for op in OPS:
                op_start = time.monotonic()
                if is_culprit and round_number == 1 and op == OPS[1]:
                    if fault == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    elif fault == "stopped":
                        stop(DEADLINE_S + 2.0)
                    elif fault == "never comes":
                        time.sleep(DEADLINE_S + 2.0)
                        return None
                    elif fault == "other order":
                        call(OPS[2], group)
                    elif fault == "other shape":
                        call(op, group, rows=13)
                call(op, group)
                slowest = max(slowest, time.monotonic() - op_start)
    except (pyruntime.CommError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - start, slowest
    return None


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("fault", "errors"),
    [
        ("killed", {"PeerLost"}),
        ("stopped", {"CommTimeout"}),
        ("never comes", {"CommTimeout"}),
        ("other order", {"ValueError"}),
        ("other shape", {"ValueError"}),
    ],
)
@pytest.mark.second_tier(but=["killed-errors0-process_group"])
def test_all_ranks_end_with_the_same_named_cause(ranks, transport, fault, errors):
    outcomes = ranks.launch(fault_case, size_for(transport), transport, fault)
    told = [outcome.value for rank, outcome in enumerate(outcomes) if rank != CULPRIT]
    assert None not in told, outcomes
    causes = {message.split(" reports: ")[-1] for _, message, *_ in told}
    assert len(causes) == 1, causes
    (cause,) = causes
    assert {error for error, *_ in told} == errors, told
    assert f"rank {CULPRIT}" in cause, cause
    assert "group" in cause and any(op in cause for op in OPS), cause
    # What a rank may take beyond that is what its ops take: milliseconds, where nothing else runs.
    for _, _, seconds, slowest in told:
        assert seconds < DEADLINE_S + 1.0 + 10 * slowest, (seconds, slowest, cause)
    if fault == "killed":
        assert outcomes[CULPRIT].exit_code == -signal.SIGKILL
        for _, _, seconds, slowest in told:  # noticed at once, and passed on within a second
            assert seconds < 1.0 + 10 * slowest, (seconds, slowest)


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def late_case(group, transport):
    """A rank that is late for less than the deadline: what the others are told, and that all goes on."""
    take(group, transport)
    pyruntime.comm.set_deadline(group, 4.0)
    call(OPS[0], group)
    kept = Kept()
    logging.getLogger("pyruntime").addHandler(kept)
    if group_rank(group) == CULPRIT:
        stop(1.6)
    for op in OPS:
        call(op, group)
    return kept.lines


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(but=["process_group"])
def test_a_rank_that_is_late_is_reported_and_waited_for(ranks, transport):
    outcomes = ranks.launch(late_case, size_for(transport), transport)
    lines = [line for rank, outcome in enumerate(outcomes) if rank != CULPRIT for line in outcome.value]
    assert any(f"waiting for rank {CULPRIT}" in line and "late by 1" in line for line in lines), lines
    assert any(f"waiting for rank {CULPRIT}" in line and "it came" in line for line in lines), lines


def reopened_case(group, transport):
    """A group that failed is closed on all ranks and used again."""
    take(group, transport)
    call(OPS[0], group)
    torch.distributed.barrier(group=group)  # a rank still in its first op would be told of the others' second
    with pytest.raises(ValueError, match="Ranks disagree"):
        for _ in range(4):
            call(OPS[0], group, rows=12 + group_rank(group))
    torch.distributed.barrier(group=group)
    pyruntime.comm.close(group)
    torch.distributed.barrier(group=group)
    for op in OPS:
        call(op, group)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(but=["symmetric_memory"])
def test_a_group_is_used_again_after_an_error(ranks, transport):
    for outcome in ranks.launch(reopened_case, size_for(transport), transport):
        assert outcome.error is None, outcome.error


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_shapes_with_stragglers(ranks, transport):
    size, seed = size_for(transport), random.randrange(2**31)
    try:
        assert (
            ranks.run(on_transport, size, transport, straggler_case, seed, 100, timeout=120) == [100] * size
        )
    finally:
        ranks.run(take, size, "symmetric_memory")


def axis_rounds(group, seed, rounds):
    """Random ops on one axis, forward and backward, each compared with what this rank computes alone."""
    here, count = group_rank(group), group_size(group)
    shared = random.Random(seed)
    for number in range(rounds):
        op = shared.choice(OPS)
        rows, n, k = shared.randrange(0, 40), shared.randrange(1, 20), shared.randrange(1, 20)
        late, seconds = shared.randrange(count), shared.choice([0, 0, 0, 1e-4, 2e-3])
        generator = torch.Generator().manual_seed(shared.randrange(2**31))
        x = torch.randint(-2, 3, (count, rows, k), generator=generator).float()
        weight = torch.randint(-1, 2, (count, n, k), generator=generator).float()
        if here == late:
            time.sleep(seconds)
        own = weight[here].clone().requires_grad_()
        if op == "all_gather_matmul":
            shard = x[0].tensor_split(count)[here].clone()
            y = ops.all_gather_matmul(shard, own, group, rows=rows, tier="chunked")
            exact, whole = x[0] @ weight[here].T, x[0]
        else:
            y = getattr(ops, op)(x[here], own, group, tier="chunked")
            exact, whole = sum(x[r] @ weight[r].T for r in range(count)), x[here]
            if op == "matmul_reduce_scatter":
                exact = exact.tensor_split(count)[here]
        assert torch.equal(y.detach(), exact), (number, op, rows, n, k)
        y.backward(torch.ones_like(y))
        assert torch.equal(own.grad, torch.ones(rows, n).T @ whole), (number, op, rows, n, k)


def axes_case(group, seed, rounds):
    """Three axes at once, each driven by a thread of its own, with its own transport and class of traffic:
    which of them is ahead of which differs from rank to rank."""
    rank = group_rank(group)
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    columns = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    axes = {"tp": pairs[rank // 2], "dp": columns[rank % 2], "cp": group}
    pyruntime.comm.configure(axes["dp"], transport="process_group", chunk_bytes=128, traffic_class="dp")
    pyruntime.comm.configure(axes["cp"], hosts=["a", "a", "b", "b"], chunk_bytes=64, traffic_class="cp")
    with concurrent.futures.ThreadPoolExecutor(len(axes)) as threads:
        running = [
            threads.submit(axis_rounds, axis, seed + number, rounds)
            for number, axis in enumerate(axes.values())
        ]
    for one in running:
        one.result()
    return {name: figures.ops for name, figures in pyruntime.comm.traffic().items()}


@pytest.mark.second_tier
def test_1000_random_ops_on_all_axes_at_once(ranks):
    seed = random.randrange(2**31)
    for outcome in ranks.launch(axes_case, 4, seed, 334, timeout=240):
        assert outcome.error is None, (seed, outcome.error)
        assert all(outcome.value[axis] >= 334 for axis in ("tp", "dp", "cp")), outcome.value
