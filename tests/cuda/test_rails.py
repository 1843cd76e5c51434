"""Chunks between hosts with several devices each, here of CPU tensors: rows go between hosts on rails, over
gloo, and inside a host by the host dialect of the kernels."""

import time

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.comm import CommTimeout, group_rank, group_size
from pyruntime.comm.core import _C
from tests.comm.test_device_exchange import with_fault
from tests.cuda import build
from tests.cuda.test_chunked import many
from tests.data_parallel.test_shard import check, expected, trained
from tests.ops.test_primitives import all_reduce_case, column_case, plain_case, row_case
from tests.transports import CHUNK_BYTES, take

pytestmark = pytest.mark.usefixtures("host_kernels")
SCATTERED = ["a", "b", "b", "a", "c", "a", "c", "c", "b"]
"""Hosts of three ranks each whose ranks do not follow each other."""


def on_rails(group, case, *arguments):
    """`case(group, *arguments)` while the group's chunks travel as between hosts of two devices."""
    _C.use_device_library("cpu", str(build.LIBRARY))
    take(group, "device on rails")
    return case(group, *arguments)


@pytest.mark.parametrize("world", [4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "dim"), [(0, 0), (1, 0), (3, 1), (41, 0), (50, 1)])
@pytest.mark.second_tier(but=["41-0-dtype0-4", "3-1-dtype1-6", "50-1-dtype2-8"])
def test_primitives_equal_exact_products(ranks, world, dtype, rows, dim):
    seed = int(torch.randint(2**31, ()))
    ranks.run(on_rails, world, column_case, seed, rows, dim, 7, 9, dtype, "chunked", False, True, False)
    ranks.run(on_rails, world, column_case, seed, rows, dim, 7, 9, dtype, "chunked", True, False, True)
    ranks.run(on_rails, world, row_case, seed, rows, dim, 6, 11, dtype, "chunked", True)
    ranks.run(on_rails, world, all_reduce_case, seed, max(1, rows), 6, 5, dtype, "chunked")
    ranks.run(on_rails, world, plain_case, seed, rows, dim, dtype)


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.second_tier("8")
def test_calls_repeat_their_bits_and_gather_those_of_symmetric_memory(ranks, world):
    found, again = (ranks.run(on_rails, world, many, "device on rails") for _ in range(2))
    exact = ranks.run(many, world, "symmetric_memory")
    for mine, next_run, theirs in zip(found, again, exact, strict=True):
        for one, other in zip(mine, next_run, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(mine[1][2::3], theirs[1][2::3], strict=True))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.second_tier("0", "3")
def test_sharded_training_equals_one_process(ranks, stage):
    results = ranks.run(on_rails, 4, trained, "device on rails", "dp", stage, True, torch.float64, 4, 0.0)
    check(results, expected(stage, True, torch.float64, 4, 0.0), 1e-9)


def scattered(group):
    """Sums and rows of all ranks, on hosts whose ranks do not follow each other."""
    _C.use_device_library("cpu", str(build.LIBRARY))
    hosts = SCATTERED[: group_size(group)]
    comm.close(group)
    comm.configure(group, transport="device", hosts=hosts, chunk_bytes=CHUNK_BYTES)
    rank, size = group_rank(group), group_size(group)
    part = torch.arange(size * 2.0)[:, None] + rank
    found = ops.reduce_scatter(part, group), ops.all_gather(torch.full((2, 1), float(rank)), group)
    return comm.transport_of(group), *found


def test_ranks_of_a_host_need_not_follow_each_other(ranks):
    outcomes = ranks.launch(scattered, 9)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.error
        text, summed, gathered = outcome.value
        assert text == "rails of gloo between hosts, copy engines inside, 9 ranks on 3 hosts"
        assert summed.flatten().tolist() == [9 * (2 * rank + row) + 36 for row in range(2)]
        assert gathered.flatten().tolist() == [float(each // 2) for each in range(18)]


def of_ten_hosts(group):
    """Sums and rows of ranks on so many hosts that an exchange has several."""
    rank, size = group_rank(group), group_size(group)
    sums = []
    for rows in (3 * size, 3 * size + 7):  # of one size, and ragged
        part = torch.arange(rows * 2.0).view(rows, 2) + rank
        sums += [ops.reduce_scatter(part, group), ops.all_reduce(part, group)]
    return comm.transport_of(group), sums, ops.all_gather(torch.full((2, 1), float(rank)), group)


@pytest.mark.second_tier
def test_an_exchange_may_have_several_hosts(ranks):
    outcomes = ranks.launch(on_rails, 20, of_ten_hosts, timeout=240.0)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.error
        text, sums, gathered = outcome.value
        assert text == "rails of gloo between hosts, copy engines inside, 20 ranks on 10 hosts"
        assert gathered.flatten().tolist() == [float(each // 2) for each in range(40)]
        for (own, every), rows in zip((sums[:2], sums[2:]), (60, 67), strict=True):
            whole = 20 * torch.arange(rows * 2.0).view(rows, 2) + 190
            assert torch.equal(every, whole)
            assert torch.equal(own, whole.tensor_split(20)[rank])


def crowded(group):
    """The rows that come by four gathers under way at once, after a fifth was refused."""
    take(group, "device on rails")
    name, size, rank = comm.group_name(group), group_size(group), group_rank(group)
    arguments = name, size, 1, torch.float32, "cpu"
    gathers = [_C.LineGather(*arguments) for _ in range(4)]
    for number, gather in enumerate(gathers):
        for index in range(len(gather.own_chunks())):
            gather.own(index).fill_(10.0 * number + rank)
            gather.publish(index)
    with pytest.raises(RuntimeError, match="already has 4 ops in flight"):
        _C.LineGather(*arguments)
    found = []
    for gather in gathers:
        found.append(sorted(gather.chunk(index).item() for index in range(len(gather.chunks()))))
        gather.finish()
    return found


def test_a_flight_too_many_leaves_the_others_alone(ranks):
    for rank, found in enumerate(ranks.run(on_rails, 4, crowded)):
        others = [each for each in range(4) if each != rank]
        assert found == [[10.0 * number + other for other in others] for number in range(4)]


def left_alone(group):
    """The error of a call that half of each host's ranks stay away from, with a deadline set after a call."""
    _C.use_device_library("cpu", str(build.LIBRARY))
    take(group, "device on rails")
    x, weight = torch.ones(4, 3), torch.ones(5, 3)
    try:
        for call in range(3):
            if call == 1:
                comm.set_deadline(group, 2.0)
                time.sleep(8.0 * (group_rank(group) % 2))
            ops.all_gather_matmul(x, weight, group, rows=4 * group_size(group), tier="chunked")
    except CommTimeout as error:
        return str(error)
    return ""


def test_a_deadline_set_between_calls_is_one_inside_hosts_too(ranks):
    for outcome in ranks.launch(left_alone, 4):
        assert "waiting for rank" in (outcome.value or ""), outcome


def test_a_late_rank_does_no_harm(ranks):
    assert [outcome.value for outcome in ranks.launch(on_rails, 4, with_fault, "0.5", 30.0)] == [("", "")] * 4


def test_a_rank_that_stays_away_is_a_timeout_on_all(ranks):
    # A wait on a device that fails is an error of the next call.
    outcomes = ranks.launch(on_rails, 4, with_fault, "6", 2.0, False)
    for outcome in outcomes:
        kind, message = outcome.value
        assert kind == "CommTimeout" and "rank 1" in message, outcomes


def test_a_rank_that_is_gone_is_lost(ranks):
    outcomes = ranks.launch(on_rails, 4, with_fault, "killed", 20.0, False)
    for rank in (0, 2, 3):
        kind, message = outcomes[rank].value
        assert kind == "PeerLost" and "rank 1" in message, outcomes
