"""One address for all ranks' memory, as the chunked engine uses it on devices: here the host dialect of the
kernels stores into every rank's copy and sums the copies, last rank first."""

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.comm import CommTimeout, group_name, group_rank, group_size
from pyruntime.comm.core import _C
from tests.cuda import build
from tests.cuda.test_chunked import late, many
from tests.ops.test_primitives import all_reduce_case, column_case, plain_case, row_case
from tests.ranks import without_processes
from tests.transports import CHUNK_BYTES

pytestmark = [pytest.mark.usefixtures("host_kernels"), pytest.mark.second_tier]

BEGINS = "symmetric memory and copy engines"
OPEN_AS = {
    "off": BEGINS + ", {} ranks",
    "gather": BEGINS + " with multicast of what goes to all, {} ranks",
    "gather_and_reduce": BEGINS + " with multicast of what goes to all and sums in the switch, {} ranks",
}


def on_multicast(group, multicast, case, *arguments):
    """`case(group, *arguments)` while the group's chunks travel as those of devices, by multicast or not."""
    _C.use_device_library("cpu", str(build.LIBRARY))
    opened = OPEN_AS[multicast].format(group_size(group))
    if not comm.transport_of(group).startswith(opened):
        comm.close(group)
        comm.configure(group, transport="device", chunk_bytes=CHUNK_BYTES, multicast=multicast)
        ops.all_gather(torch.ones(1, 1), group)  # opens it: cases take what is open
    result = case(group, *arguments)
    assert comm.transport_of(group).startswith(opened)
    return result


@pytest.mark.parametrize("multicast", ["gather", "gather_and_reduce"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "dim"), [(0, 0), (3, 1), (41, 0)])
def test_primitives_equal_exact_products(ranks, multicast, world, dtype, rows, dim):
    seed = int(torch.randint(2**31, ()))

    def run(case, *arguments):
        ranks.run(on_multicast, world, multicast, case, seed, *arguments)

    run(column_case, rows, dim, 7, 9, dtype, "chunked", False, True, False)
    run(row_case, rows, dim, 6, 11, dtype, "chunked", True)
    run(all_reduce_case, max(1, rows), 6, 5, dtype, "chunked")
    run(plain_case, rows, dim, dtype)


@pytest.mark.parametrize("multicast", ["gather", "gather_and_reduce"])
def test_doubles_are_summed_by_their_owners(ranks, multicast):
    ranks.run(on_multicast, 3, multicast, plain_case, 5, 7, 1, torch.float64)


@pytest.mark.parametrize("world", [2, 4])
def test_rows_stored_once_are_bitwise_those_of_a_copy_for_each_peer(ranks, world):
    found = ranks.run(on_multicast, world, "gather", many, "device")
    expected = ranks.run(on_multicast, world, "off", many, "device")
    for (products, sums), (other_products, other_sums) in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(sums, other_sums, strict=True))
        for a, b in zip(products, other_products, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("world", [2, 3])
def test_sums_in_the_switch_are_those_of_their_owners_but_for_rounding(ranks, world):
    found = ranks.run(on_multicast, world, "gather_and_reduce", many, "device")
    expected = ranks.run(on_multicast, world, "off", many, "device")
    for (_, sums), (_, other_sums) in zip(found, expected, strict=True):
        for a, b in zip(sums, other_sums, strict=True):
            unit = 2**-7 if a.dtype == torch.bfloat16 else 2**-22
            torch.testing.assert_close(a, b, rtol=unit, atol=8 * unit)


def order_of_sums(group):
    """(1 + 1e8) - 1e8 is 0 in fp32, and 1 from the last rank on."""
    part = torch.full((6, 4), (1.0, 1e8, -1e8)[group_rank(group)])
    return ops.reduce_scatter(part, group), ops.all_reduce(part, group)


@pytest.mark.parametrize(("multicast", "sum"), [("gather", 0.0), ("gather_and_reduce", 1.0)])
def test_the_order_of_sums_is_given_up_by_name_alone(ranks, multicast, sum):
    for scattered, reduced in ranks.run(on_multicast, 3, multicast, order_of_sums):
        assert (scattered == sum).all() and (reduced == sum).all()


@pytest.mark.parametrize("multicast", ["gather", "gather_and_reduce"])
def test_a_late_rank_does_no_harm(ranks, multicast):
    outcomes = ranks.launch(on_multicast, 3, multicast, late, 0.5, 30.0)
    assert [outcome.value for outcome in outcomes] == ["", "", ""]


def test_a_rank_that_stays_away_is_named_on_all(ranks):
    outcomes = ranks.launch(on_multicast, 3, "gather", late, 4.0, 1.0)
    for outcome in outcomes:
        assert "waiting for rank 1 to send chunk 0 into slot" in outcome.value, outcomes
        assert "the deadline has passed" in outcome.value


def held(group):
    """Rank 1 reads the first of five gathers for ever; what rank 0 hears."""
    rank = group_rank(group)
    comm.set_deadline(group, 1.0)
    gathers = []
    for _ in range(4 if rank == 1 else 5):
        gather = _C.LineGather(group_name(group), 2, 3, torch.float32, "cpu")
        gather.own(0).fill_(rank)
        gather.publish(0)
        if rank == 0 or gathers:
            gather.finish()
        gathers.append(gather)
    if rank == 1:
        return ""
    with pytest.raises(CommTimeout) as error:
        ops.all_gather(torch.ones(1, 3), group)
    return str(error.value)


def test_a_rank_that_still_reads_is_waited_for_and_named(ranks):
    said = ranks.launch(on_multicast, 2, "gather", held)[0].value
    assert "multicast of rows, rank 0 waiting for rank 1 to have done with slot 3" in said


def refusals(group):
    """What each way of asking for multicast in vain is told."""
    found, x = {}, torch.ones(2, 2)

    def refused(name, op, **settings):
        comm.close(group)
        with pytest.raises(ValueError) as error:
            comm.configure(group, **settings)
            op()
        found[name] = str(error.value)

    def gather():
        ops.all_gather(x, group)

    refused("name", gather, multicast="nvls")
    refused("collectives", gather, transport="collectives", multicast="gather")
    refused("cpu", gather, multicast="gather")
    refused("no kernels", gather, transport="device", multicast="gather_and_reduce")
    if group_rank(group) == 0:
        _C.use_device_library("cpu", str(build.LIBRARY))
    refused("one rank", gather, transport="device", multicast="gather")
    _C.use_device_library("cpu", str(build.LIBRARY))
    refused("hosts", gather, transport="device", hosts=["a", "b"], multicast="gather")
    comm.close(group)
    comm.configure(group, transport="device", multicast=["off", "gather"][group_rank(group)])
    with pytest.raises(ValueError) as error:
        gather()
    found["disagree"] = str(error.value)
    return found


def test_what_cannot_be_is_refused_in_a_sentence(ranks):
    for outcome in ranks.launch(refusals, 2):
        found = outcome.value
        assert found["name"] == "multicast='nvls' is none; use 'off', 'gather' or 'gather_and_reduce'."
        assert "with transport='collectives', which leaves all to the process group" in found["collectives"]
        assert "and an op has tensors on the CPU; it is for the devices of one host" in found["cpu"]
        assert "multicast='gather_and_reduce' was asked for" in found["no kernels"]
        assert "and rank 0 cannot: there are no device kernels for cpu tensors; it is" in without_processes(
            found["no kernels"]
        )
        assert "and rank 1 cannot: there are no device kernels for cpu tensors; it is" in without_processes(
            found["one rank"]
        )
        assert "and its ranks are on 2 hosts; it is for" in found["hosts"]
        assert "multicast=off" in found["disagree"] and "multicast=gather" in found["disagree"]
