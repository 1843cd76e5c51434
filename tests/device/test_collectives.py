"""Collectives of the simulated devices are ordered by streams; ranks that NCCL would let hang are named."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")


def begin(delays: int = 0, seconds: float = 60.0) -> tuple[int, int]:
    """(rank, ranks) of a job on devices, whose operations may take so long."""
    local, ranks = sim.begin_rank(delays=delays)
    dist.init_process_group("cpu:gloo,sim:sim", timeout=timedelta(seconds=seconds))
    return local, ranks


def exchange(group):
    rank, ranks = begin(delays=2)
    x = torch.arange(6.0, device="sim") + rank
    total = sum(torch.arange(6.0) + each for each in range(ranks))
    summed, mean = x.clone(), x.clone()
    dist.all_reduce(summed)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.equal(summed.cpu(), total) and torch.equal(mean.cpu(), total / ranks)
    whole = torch.empty(6 * ranks, device="sim")
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    work.wait()
    assert torch.equal(whole.cpu(), torch.cat([torch.arange(6.0) + each for each in range(ranks)]))
    part = torch.empty(6, device="sim")
    dist.reduce_scatter_tensor(part, whole)
    assert torch.equal(part.cpu(), (torch.arange(6.0) + rank) * ranks)
    parts = torch.empty(ranks, device="sim")
    dist.all_to_all_single(parts, torch.arange(float(ranks), device="sim") + 10 * rank)
    assert parts.tolist() == [rank + 10.0 * each for each in range(ranks)]
    dist.broadcast(x, 1)
    assert torch.equal(x.cpu(), torch.arange(6.0) + 1)
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    got = torch.empty(1, device="sim")
    own = torch.tensor([float(rank)], device="sim")
    both = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert got.item() == before
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_give_what_gloo_gives(ranks, size):
    for rank in ranks.launch(exchange, size, init=False):
        assert rank.error is None, rank.error


def differ(group, how):
    rank, _ = begin(seconds=2.0 if how == "groups of sends" else 60.0)
    x, y = torch.ones(4, device="sim"), torch.ones(5, device="sim")
    with pytest.raises(RuntimeError) as caught:
        if how == "shapes":
            dist.all_reduce(y if rank else x)
        elif how == "operations":
            dist.broadcast(x, 0) if rank else dist.all_reduce(x)
        elif how == "groups of sends":  # both send first, each in a group of one message
            dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank)])
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1 - rank)])
        else:  # both send first
            dist.isend(x, 1 - rank)
            dist.irecv(y[:4], 1 - rank)
        torch.accelerator.synchronize()
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "shapes",
            "rank 0 came to 'all-reduce of 4 float, op 0' and rank 1 to 'all-reduce of 5 float, op 0'",
        ),
        (
            "operations",
            "rank 0 came to 'all-reduce of 4 float, op 0' and rank 1 to 'broadcast of 4 float, root 0'",
        ),
        ("sends", "rank 0 came to a send of 16 bytes with rank 1, which came to a send of 16 bytes"),
        (
            "groups of sends",
            "rank 0 waited for rank 1 to receive message 0 of their group, of 16 bytes, where",
        ),
    ],
)
def test_ranks_that_nccl_would_let_hang_are_named(ranks, how, words):
    outcomes = ranks.launch(differ, 2, how, init=False)
    assert words in outcomes[0].value and "NCCL would hang" in outcomes[1].value
