"""Deals: rows that each rank sends to each, here of CPU tensors by the transports of devices."""

import os
import signal
import time

import pytest
import torch

from pyruntime import comm
from pyruntime.comm import CommTimeout, PeerLost, group_name, group_rank, group_size
from pyruntime.comm.core import _C
from tests.cuda import build
from tests.transports import take

pytestmark = pytest.mark.usefixtures("host_kernels")
TRANSPORTS = ["device", "device between hosts", "device on rails"]
WIDTH = 5


def counts_of(ranks: int, kind: str, call: int) -> torch.Tensor:
    """The rows [from, to] of a deal."""
    generator = torch.Generator().manual_seed(call)
    counts = torch.randint(0, 9, (ranks, ranks), generator=generator)
    if kind == "none":
        counts.zero_()
    if kind == "to one rank":
        counts[:, : ranks - 1] = 0
    if kind == "some ranks send nothing":
        counts[::2] = 0
    return counts


def rows_between(source: int, target: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(rows * WIDTH) % 17 + 1
    return (values + 31 * source + 61 * target).view(rows, WIDTH).to(dtype)


def begun(group, counts: torch.Tensor, dtype: torch.dtype):
    return _C.LineDeal(group_name(group), counts.flatten().tolist(), WIDTH, dtype, "cpu")


def sent(group, counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rank, ranks = group_rank(group), range(group_size(group))
    return torch.cat([rows_between(rank, to, int(counts[rank, to]), dtype) for to in ranks])


def due(group, counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rank, ranks = group_rank(group), range(group_size(group))
    return torch.cat([rows_between(source, rank, int(counts[source, rank]), dtype) for source in ranks])


def dealt(group, transport: str, dtype: torch.dtype) -> None:
    """Deals and the ways back, whose sizes change from call to call, two at a time under way."""
    _C.use_device_library("cpu", str(build.LIBRARY))
    take(group, transport)
    kinds = ["random", "none", "to one rank", "some ranks send nothing", "random", "random"]
    for call, kind in enumerate(kinds):
        counts = counts_of(group_size(group), kind, call)
        there, back = begun(group, counts, dtype), begun(group, counts.T, dtype)
        for deal, table in ((there, counts), (back, counts.T)):
            deal.leaving().copy_(sent(group, table, dtype))
            deal.publish()
        for deal, table in ((there, counts), (back, counts.T)):
            assert torch.equal(deal.arrived(), due(group, table, dtype)), (call, kind)
            deal.finish()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 4, 7])
@pytest.mark.second_tier("7-device", "7-device between hosts", "7-device on rails")
def test_every_rank_gets_its_rows_by_source(ranks, transport, world):
    if transport == "device on rails" and world != 4:
        world = 2 * world  # two ranks on each host
    for dtype in (torch.bfloat16, torch.float64):
        ranks.run(dealt, min(world, 8), transport, dtype)


def counted(group, transport: str) -> int:
    """The bytes of others that the figures of the group count for one deal."""
    _C.use_device_library("cpu", str(build.LIBRARY))
    take(group, transport)
    before = comm.stats(group).bytes
    deal = begun(group, counts_of(group_size(group), "random", 1), torch.float32)
    deal.leaving().zero_()
    deal.publish()
    deal.arrived()
    deal.finish()
    return comm.stats(group).bytes - before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_figures_count_the_rows_of_others(ranks, transport):
    counts = counts_of(4, "random", 1)
    others = counts.sum(0) - counts.diagonal()
    assert ranks.run(counted, 4, transport) == (others * WIDTH * 4).tolist()


def refused(group) -> tuple[str, str]:
    errors = []
    take(group, "symmetric_memory")
    with pytest.raises(RuntimeError) as error:
        begun(group, torch.zeros(2, 2, dtype=torch.long), torch.float32)
    errors.append(str(error.value))
    with pytest.raises(ValueError) as error:
        _C.LineDeal(group_name(group), [1, 2, -3, 4], WIDTH, torch.float32, "cpu")
    errors.append(str(error.value))
    return tuple(errors)


def test_host_transports_say_why_they_do_not_deal(ranks):
    for on_hosts, wrong in ranks.run(refused, 2):
        assert "rows are dealt between devices only, not by symmetric memory" in on_hosts
        assert "a group of 2 ranks needs 4 that are at least 0" in wrong


def with_fault(group, transport: str, fault: str, deadline: float) -> tuple[str, str]:
    """Deals again and again, to the third of which rank 1 comes late or never; the error of this rank."""
    _C.use_device_library("cpu", str(build.LIBRARY))
    take(group, transport)
    comm.set_deadline(group, deadline)
    counts = torch.ones(group_size(group), group_size(group), dtype=torch.long)
    for call in range(5):
        if call == 2 and group_rank(group) == 1:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(float(fault))
        try:
            deal = begun(group, counts, torch.float32)
            deal.leaving().copy_(sent(group, counts, torch.float32))
            deal.publish()
            right = torch.equal(deal.arrived(), due(group, counts, torch.float32))
            deal.finish()
        except (CommTimeout, PeerLost) as error:
            return type(error).__name__, str(error)
        assert right or fault != "0.5"
    return "", ""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(but=["device"])
def test_a_late_rank_does_no_harm(ranks, transport):
    outcomes = ranks.launch(with_fault, 4, transport, "0.5", 30.0)
    assert [outcome.value for outcome in outcomes] == [("", "")] * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(but=["device between hosts"])
def test_a_rank_that_stays_away_is_a_timeout(ranks, transport):
    for outcome in ranks.launch(with_fault, 4, transport, "6", 1.5):
        kind, message = outcome.value
        assert kind == "CommTimeout" and "rank 1" in message, outcome


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(but=["device"])
def test_a_rank_that_is_gone_is_lost(ranks, transport):
    outcomes = ranks.launch(with_fault, 4, transport, "killed", 20.0)
    for rank in (0, 2, 3):
        kind, message = outcomes[rank].value
        assert kind == "PeerLost" and "rank 1" in message, outcomes
