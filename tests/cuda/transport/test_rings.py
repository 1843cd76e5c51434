"""What is gathered goes around rings of direct links: through the host dialect of the kernels, on 8 ranks
that stand for the GCDs of a node of Frontier, and on 3."""

from __future__ import annotations

import collections
import ctypes
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from pyruntime import comm, ops
from pyruntime.comm import group_name, group_rank, group_size
from pyruntime.comm.core import _C
from pyruntime.plan.cluster import find_cluster
from tests.cuda import build
from tests.cuda.test_chunked import late, many
from tests.cuda.test_fused_tier import always_chunked, in_turn, integers_case
from tests.ops.test_primitives import column_case, plain_case, row_case
from tests.plan.test_frontier import LINKS, gcds_of_local_ranks
from tests.transports import CHUNK_BYTES

pytestmark = [pytest.mark.usefixtures("host_kernels"), pytest.mark.second_tier]

NODE = [[int(rank) for rank in order.split("-")] for order in find_cluster("frontier").rings]
THREE = [[0, 2, 1]]
PER_WAY = 50e9
"""Bytes/s of a piece: the narrowest links, each used one way by one ring."""


@pytest.fixture(scope="module")
def recorder(host_kernels, tmp_path_factory) -> str:
    """The library of kernels behind one that writes down what is put where."""
    return build.stand_before_library("recorded_calls", tmp_path_factory.mktemp("recorder"))


def around(group, rings, case, *arguments, library=None):
    """`case(group, *arguments)` while what is gathered goes around `rings`; [] for straight to each peer."""
    _C.use_device_library("cpu", library or str(build.LIBRARY))
    comm.close(group)
    comm.configure(group, transport="device", chunk_bytes=CHUNK_BYTES, rings=rings)
    try:
        return case(group, *arguments)
    finally:
        comm.close(group)
        _C.use_device_library("cpu", str(build.LIBRARY))


@pytest.mark.parametrize(("world", "rings"), [(3, THREE), (8, NODE)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "dim"), [(3, 0), (200, 0), (64, 1)])
def test_primitives_equal_exact_products(ranks, world, rings, dtype, rows, dim):
    seed = int(torch.randint(2**31, ()))
    for tier in ("chunked", "fused") if dtype == torch.bfloat16 and dim == 0 else ("chunked",):
        ranks.run(around, world, rings, column_case, seed, rows, dim, 7, 24, dtype, tier, False, True, False)
    ranks.run(around, world, rings, row_case, seed, rows, dim, 136, 11, dtype, "chunked", True)
    ranks.run(around, world, rings, plain_case, seed, rows, dim, dtype)


def test_on_a_node_the_bits_are_those_of_rows_that_come_straight(ranks):
    found, expected = (ranks.run(around, 8, rings, many, "") for rings in (NODE, []))
    for (_, sums), (_, other_sums) in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(sums, other_sums, strict=True))


def test_ranks_may_take_different_tiers_and_get_the_same_bits(ranks):
    expected = ranks.run(around, 3, [], integers_case, always_chunked, 6)
    found = ranks.run(around, 3, THREE, integers_case, in_turn, 6)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def puts_of_a_gather(group, library, rows, width):
    """What this rank puts for an all-gather of [rows, width] fp32, as recorded_calls.cpp has it."""
    recorded = ctypes.CDLL(library).recorded_puts
    recorded.restype = ctypes.c_int64
    each = rows // group_size(group)
    gathered = ops.all_gather(torch.full((each, width), float(group_rank(group))), group)
    assert torch.equal(gathered[:, 0], (torch.arange(rows) // each).float())
    out = (ctypes.c_int64 * (5 * recorded(None)))()
    recorded(out)
    puts = [tuple(out[i : i + 5]) for i in range(0, len(out), 5)]
    return [put for put in puts if put[4] > 8]  # not of how many rows each has


def around_recorded(group, rings, library, rows):
    return around(group, rings, puts_of_a_gather, library, rows, 8, library=library)


def test_on_a_node_every_byte_goes_over_a_direct_link_that_has_room_for_it(ranks, recorder):
    """All pieces of all ranks, each seven times: the time is that of 7 pieces at 50 GB/s."""
    rows, width = 8 * 12, 8
    gcds = gcds_of_local_ranks()
    pieces = collections.Counter()  # by link, one way
    had = [{(rank, way) for way in range(4)} for rank in range(8)]
    every = ranks.run(around_recorded, 8, NODE, recorder, rows)
    assert {len(puts) for puts in every} == {28}
    # Round by round, as the ranks put them: each has what it passes on.
    for number in range(28):
        before = [set(known) for known in had]
        for rank, puts in enumerate(every):
            owner, peer, way, offset, size = puts[number]
            assert (owner, way) in before[rank] and (owner, way) not in had[peer]
            had[peer].add((owner, way))
            link = frozenset((gcds[rank], gcds[peer]))
            assert link in LINKS, f"GCDs {gcds[rank]} and {gcds[peer]} have no link"
            pieces[gcds[rank], gcds[peer]] += 1
            assert (offset, size) == ((owner * 12 + 3 * way) * 4 * width, 3 * 4 * width)
    assert all(len(known) == 32 for known in had)
    for (one, other), count in pieces.items():
        assert count % 7 == 0 and count / 7 * PER_WAY <= LINKS[frozenset((one, other))]


def test_little_goes_straight_to_each_peer(ranks, recorder):
    # 8 rows of 32 bytes: less than a chunk for each way.
    for rank, puts in enumerate(ranks.run(around_recorded, 8, NODE, recorder, 8)):
        assert [(owner, peer) for owner, peer, *_ in puts] == [
            (rank, (rank - step) % 8) for step in range(1, 8)
        ]


def test_a_rank_that_stays_away_is_named_on_all(ranks):
    for outcome in ranks.launch(around, 3, THREE, late, 4.0, 1.0, 16):
        assert "waiting for rank 1 to send chunk" in outcome.value, outcome
        assert "the deadline has passed" in outcome.value


def out_of_order(group):
    """Two gathers, of which the second is published first."""
    first, second = (_C.LineGather(group_name(group), 96, 8, torch.float32, "cpu") for _ in range(2))
    assert first.own_chunks() == second.own_chunks()
    with pytest.raises(RuntimeError, match="is published in another order than it began"):
        second.publish(0)
    dist.barrier(group)  # no rank leaves while another still opens the group
    return True


def test_gathers_that_are_published_in_another_order_are_refused(ranks):
    outcomes = ranks.launch(around, 3, THREE, out_of_order)
    assert [outcome.value for outcome in outcomes] == [True] * 3


def refusals(group):
    """What each way of asking for rings in vain is told."""
    found, x = {}, torch.ones(2, 2)
    _C.use_device_library("cpu", str(build.LIBRARY))
    ring = [[0, 1, 2]]

    def refused(name, **settings):
        comm.close(group)
        with pytest.raises(ValueError) as error:
            comm.configure(group, **settings)
            ops.all_gather(x, group)
        found[name] = str(error.value)

    refused("ring", transport="device", rings=[[0, 1, 1]])
    refused("multicast", transport="device", rings=ring, multicast="gather")
    refused("cpu", rings=ring)
    refused("collectives", transport="collectives", rings=ring)
    refused("hosts", transport="device", hosts=["a", "b", "c"], rings=ring)
    refused("disagree", transport="device", rings=[ring, [[0, 2, 1]]][group_rank(group) % 2])
    refused("many", transport="device", rings=10 * [[0, 1, 2], [0, 2, 1]])
    comm.close(group)
    return found


def test_what_cannot_be_is_refused_in_a_sentence(ranks):
    for outcome in ranks.launch(refusals, 3):
        found = outcome.value
        assert found is not None, outcome
        assert "the ring 0-1-1 does not name each of 3 ranks once; give orders of 0 to 2" in found["ring"]
        assert "rings and multicast='gather' were asked for" in found["multicast"]
        assert "and an op has tensors on the CPU; rows go around rings between the devices" in found["cpu"]
        assert "transport='collectives' leaves all to the process group" in found["collectives"]
        assert "and its ranks are on 3 hosts" in found["hosts"]
        assert "rings=[0-1-2]" in found["disagree"] and "rings=[0-2-1]" in found["disagree"]
        assert "make 79 chunks of what comes to a rank; a fused GEMM takes 72" in found["many"]


def test_a_ring_goes_back_to_where_it_began():
    for order in NODE:
        gcds = gcds_of_local_ranks()
        assert all(frozenset((gcds[a], gcds[b])) in LINKS for a, b in pairwise([*order, order[0]]))
