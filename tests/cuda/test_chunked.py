"""The chunked engine as it runs on devices: puts, waits and signals on their memory, here by the host dialect
of the kernels."""

import time

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.comm import CommTimeout, group_name, group_rank, group_size
from pyruntime.comm.core import _C
from tests.cuda import build
from tests.data_parallel.test_shard import trained
from tests.ops.test_primitives import all_reduce_case, column_case, plain_case, row_case
from tests.transports import take


def on_device(group, case, *arguments):
    """`case(group, *arguments)` while the group's chunks travel as those of devices."""
    _C.use_device_library("cpu", str(build.LIBRARY))
    take(group, "device")
    return case(group, *arguments)


pytestmark = pytest.mark.usefixtures("host_kernels")


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "dim"), [(0, 0), (1, 0), (3, 1), (41, 0), (50, 1)])
@pytest.mark.second_tier("0-0-dtype0-2", "0-0-dtype1-4", "3-1-dtype0-4", "50-1-dtype0-4")
def test_primitives_equal_exact_products(ranks, world, dtype, rows, dim):
    seed = int(torch.randint(2**31, ()))
    ranks.run(on_device, world, column_case, seed, rows, dim, 7, 9, dtype, "chunked", False, True, False)
    ranks.run(on_device, world, column_case, seed, rows, dim, 7, 9, dtype, "chunked", True, False, True)
    ranks.run(on_device, world, row_case, seed, rows, dim, 6, 11, dtype, "chunked", True)
    ranks.run(on_device, world, all_reduce_case, seed, max(1, rows), 6, 5, dtype, "chunked")
    ranks.run(on_device, world, plain_case, seed, rows, dim, dtype)


def test_plain_collectives_of_doubles(ranks):
    ranks.run(on_device, 3, plain_case, 5, 7, 1, torch.float64)


def many(group, transport):
    """Results of many calls of changing sizes, two at a time under way in the backward pass: of products, and
    of sums alone."""
    take(group, transport)
    generator = torch.Generator().manual_seed(4 + group_rank(group))
    sizes = torch.Generator().manual_seed(5)
    products, sums = [], []
    for call in range(40):
        rows, n, k = (int(size) for size in torch.randint(1, 60, (3,), generator=sizes))
        shard = len(torch.arange(rows).tensor_split(group_size(group))[group_rank(group)])
        x = torch.randn(shard, k, generator=generator).requires_grad_()
        weight = torch.randn(n, k, generator=generator).requires_grad_()
        y = ops.all_gather_matmul(x, weight, group, rows=rows, tier="chunked", keep_gathered=call % 2 == 0)
        y.square().sum().backward()
        z = ops.matmul_all_reduce(y.detach(), weight.detach().T.contiguous(), group, tier="chunked")
        products += [y.detach(), x.grad, weight.grad, z]
        part = torch.randn(rows, n, generator=generator).to([torch.float32, torch.bfloat16][call % 2])
        sums += [ops.reduce_scatter(part, group), ops.all_reduce(part, group), ops.all_gather(part, group)]
    return products, sums


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.second_tier("4")
def test_sums_are_bitwise_those_of_symmetric_memory_and_of_the_next_run(ranks, world):
    """The order of sums is the same, and epochs go on from call to call. Products of another library may
    depend on where in memory their operands lie."""
    found, again = (ranks.run(on_device, world, many, "device") for _ in range(2))
    expected = ranks.run(many, world, "symmetric_memory")
    for mine, next_run, theirs in zip(found, again, expected, strict=True):
        for one, other in ((mine[0], next_run[0]), (mine[1], next_run[1]), (mine[1], theirs[1])):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for a, b in zip(mine[0], theirs[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-3)


def late(group, seconds, deadline, rows=4):
    """What a rank hears when rank 1 comes late to the third of five gathers of so many rows a rank."""
    comm.set_deadline(group, deadline)
    x, weight = torch.ones(rows, 3), torch.ones(5, 3)
    message, rows = "", rows * group_size(group)
    try:
        for call in range(4):
            if call == 2 and group_rank(group) == 1:
                time.sleep(seconds)
            y = ops.all_gather_matmul(x, weight, group, rows=rows, tier="chunked")
            assert (y == 3).all() or deadline < seconds
        ops.all_gather_matmul(x, weight, group, rows=rows, tier="chunked")
    except CommTimeout as error:
        message = str(error)
    return message


def test_a_late_rank_does_no_harm(ranks):
    outcomes = ranks.launch(on_device, 3, late, 0.5, 30.0)
    assert [outcome.value for outcome in outcomes] == ["", "", ""]


@pytest.mark.second_tier
def test_a_rank_that_stays_away_is_named_on_all(ranks):
    outcomes = ranks.launch(on_device, 3, late, 4.0, 1.0)
    for outcome in outcomes:
        assert "waiting for rank 1 to send chunk 0 into slot" in outcome.value, outcomes
        assert "the deadline has passed" in outcome.value


def four_flights(group):
    """Rows of four gathers that are under way at once; a fifth is refused."""
    rank, name = group_rank(group), group_name(group)

    def begin():
        return _C.LineGather(name, 2 * group_size(group), 3, torch.float32, "cpu")

    gathers = [begin() for _ in range(4)]
    with pytest.raises(RuntimeError, match="already has 4 ops in flight on cpu; finish one before"):
        begin()
    for number, gather in enumerate(gathers):
        for chunk in range(len(gather.own_chunks())):
            gather.own(chunk).fill_(10 * number + rank)
            gather.publish(chunk)
    found = {}
    for number, gather in reversed(list(enumerate(gathers))):
        for chunk, (first, _) in enumerate(gather.chunks()):
            found[number, first // 2] = gather.chunk(chunk).clone()
        gather.finish()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_four_ops_may_be_in_flight(ranks, world):
    for rank, found in enumerate(ranks.run(on_device, world, four_flights)):
        assert len(found) == 4 * (world - 1)
        for (number, peer), rows in found.items():
            assert peer != rank and (rows == 10 * number + peer).all()


def data_parallel_steps(group, transport, stage, dtype):
    return trained(group, transport, "dp", stage, False, dtype, 2 * group_size(group), 0.0)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.float64)])
@pytest.mark.second_tier(but=["2-dtype0-3"])
def test_data_parallel_training_is_bitwise_that_over_symmetric_memory(ranks, world, stage, dtype):
    found = ranks.run(on_device, world, data_parallel_steps, "device", stage, dtype)
    expected = ranks.run(data_parallel_steps, world, "symmetric_memory", stage, dtype)
    for (losses, weights, norms), (other_losses, other_weights, other_norms) in zip(
        found, expected, strict=True
    ):
        assert losses == other_losses and norms == other_norms
        assert all(torch.equal(weights[name], other_weights[name]) for name in other_weights)


def without_library(group):
    comm.close(group)
    comm.configure(group, transport="device")
    try:
        ops.all_gather(torch.ones(2, 2), group)
        with pytest.raises(ValueError, match=r"tier='chunked' was asked for .* no device kernels for cpu"):
            ops.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2), group, tier="chunked")
        return comm.transport_of(group)
    finally:
        comm.close(group)


@pytest.mark.second_tier
def test_without_the_kernels_it_says_so(ranks):
    outcomes = ranks.launch(without_library, 2)
    assert all("there are no device kernels for cpu tensors" in outcome.value for outcome in outcomes)


def broken_library(group, path):
    with pytest.raises(RuntimeError, match=r"The device kernels cannot be loaded: .*nothing.so"):
        _C.use_device_library("cpu", path + "/nothing.so")
    return True


def test_a_library_that_is_none_is_refused(ranks, tmp_path):
    assert all(ranks.run(broken_library, 1, str(tmp_path)))
