"""Links between hosts are told apart by what they carry, and ranks are numbered by them."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from pyruntime.comm.links import HostLinks, islands, rounds
from tests.bench.netlab_runs import command, netlab, on_a_network


def table(fast, count, inside=1e9, between=5e7):
    """Rates between `count` hosts, of which those of a group in `fast` are joined by fast links."""
    of = {host: number for number, group in enumerate(fast) for host in group}

    def rate(one, other):
        return math.inf if one == other else inside if of.get(one, one + 9) == of.get(other, -1) else between

    return tuple(tuple(rate(one, other) for other in range(count)) for one in range(count))


def test_hosts_that_fast_links_join_are_an_island():
    assert islands(table([(0, 2), (1, 3)], 4)) == ((0, 2), (1, 3))
    assert islands(table([(0, 3, 4), (1, 2)], 5)) == ((0, 3, 4), (1, 2))
    assert islands(table([(1, 3)], 4)) == ((0,), (1, 3), (2,))
    assert islands(((math.inf,),)) == ((0,),)


def test_links_that_differ_little_make_one_island():
    assert islands(table([(0, 2), (1, 3)], 4, between=0.6e9)) == ((0, 1, 2, 3),)


def test_hosts_that_fast_links_join_in_a_chain_are_one_island():
    rates = [list(row) for row in table([], 4)]
    for one, other in ((0, 1), (1, 2), (2, 3)):
        rates[one][other] = rates[other][one] = 1e9
    assert islands(tuple(map(tuple, rates))) == ((0, 1, 2, 3),)


def test_the_slower_direction_of_a_link_counts():
    rates = [list(row) for row in table([(0, 1), (2, 3)], 4)]
    rates[1][0] = 4e7
    assert islands(tuple(map(tuple, rates))) == ((0,), (1,), (2, 3))


def test_one_link_that_is_much_slower_than_all_hides_no_islands():
    rates = [list(row) for row in table([(0, 2), (1, 3)], 4)]
    rates[0][1] = rates[1][0] = 2e5  # a wider gap, which separates no hosts
    assert islands(tuple(map(tuple, rates))) == ((0, 2), (1, 3))


@pytest.mark.parametrize("between", [9e8, 3e9])
def test_racks_of_a_site_follow_each_other(between):
    """Racks 0 to 3 have hosts 0 and 4, 1 and 5 ..; racks 0 and 2 are one site, 1 and 3 the other."""

    def rate(one, other):
        return (
            math.inf
            if one == other
            else 1e10
            if one % 4 == other % 4
            else between
            if near(one, other)
            else 1e8
        )

    def near(one, other):
        return one % 2 == other % 2

    found = islands(tuple(tuple(rate(one, other) for other in range(8)) for one in range(8)))
    assert list(itertools.chain(*found)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert len(found) == (4 if between == 9e8 else 2)


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7, 8])
def test_all_hosts_meet_once_in_rounds_of_disjoint_pairs(hosts):
    found = rounds(hosts)
    assert len(found) == (hosts - 1 if hosts % 2 == 0 else hosts) or hosts == 1
    assert sorted(itertools.chain(*found)) == list(itertools.combinations(range(hosts), 2))
    for pairs in found:
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)


def links(ranks, fast=((0, 2), (1, 3)), **rates):
    hosts = tuple("abcd"[: len(ranks)])
    found = table(fast, len(hosts), **rates)
    return HostLinks(hosts, ranks, found)


def test_ranks_are_numbered_island_by_island():
    found = links(((0, 1), (2, 3), (4, 5), (6, 7)))
    assert [found.number_of(rank) for rank in range(8)] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert found.words() == (
        "islands of hosts a c | b d: 8 Gbit/s inside, 0.4 Gbit/s between; ranks are numbered in this order"
    )
    alike = links(((0,), (1,), (2,), (3,)), between=1e9)
    assert [alike.number_of(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert alike.words() == "4 host(s) with links alike of 8 Gbit/s; ranks keep their numbers"
    alone = links(((0, 1),))
    assert alone.words() == "1 host(s) with links alike; ranks keep their numbers"


def test_hosts_of_unequal_numbers_of_ranks_are_refused():
    with pytest.raises(
        ValueError, match="hosts have 2, 1, 1 ranks; to number them by their links, start equally"
    ):
        links(((0, 1), (2,), (3,)), fast=((0, 2), (1,))).number_of(0)
    assert links(((0, 2), (1,))).number_of(2) == 2  # one link: nothing to number by


PROGRAM = """
from pyruntime import Runtime
for _ in range(2):  # the second time they are in order
    with Runtime.start(pp=2, dp=2, tp=1, hosts="measured", deadline_s=30) as runtime:
        tell(host, runtime.rank, runtime.links.islands, list(runtime.coordinate))
"""


@on_a_network
@pytest.mark.second_tier
def test_of_two_islands_each_gets_a_stage_of_the_pipeline():
    network = ["--hosts", "4", "--ranks-per-host", "1", "--rate", "1gbit", "--between", "100mbit"]
    done = netlab(*network, "--islands", "0,2/1,3", *command(PROGRAM), timeout=120)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    places = {host: at for host, _, _, at in told}
    assert {host: rank for host, rank, *_ in told} == {0: 0, 2: 1, 1: 2, 3: 3}
    assert len(told) == 8 and sorted(map(str, (found for _, _, found, _ in told))) == sorted(
        [str([[0, 2], [1, 3]])] * 4 + [str([[0, 1], [2, 3]])] * 4
    )
    assert [places[host][0] for host in (0, 2, 1, 3)] == [0, 0, 1, 1]  # the stage
