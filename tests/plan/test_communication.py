"""The link of GPUs whose rows cross between nodes on rails."""

from __future__ import annotations

import pytest

from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.communication import all_gather, all_reduce, link, neighbours, rails

CLUSTER = find_cluster("dgx-h100")
OWN = 64e6
"""Bytes of a rank."""


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_an_adapter_carries_a_rank_s_rows_once_to_each_node(nodes):
    ranks = 8 * nodes
    across = (nodes - 1) * OWN / (CLUSTER.between / 8)
    inside = nodes * 7 * OWN / CLUSTER.bandwidth(1, 8)
    exchanges = min(8, nodes - 1)
    expected = max(across, inside) + min(across, inside) / exchanges
    latencies = exchanges * CLUSTER.latency_between + CLUSTER.latency_inside
    over = rails(CLUSTER, 1, ranks)
    assert over.crosses and over.inside == pytest.approx(inside / OWN)
    assert all_gather(ranks * OWN, over) == pytest.approx(expected + latencies)
    assert all_reduce(ranks * OWN, over) == pytest.approx(2 * (expected + latencies))


def test_one_rank_of_a_node_has_its_adapter_alone():
    assert rails(CLUSTER, 8, 16) == neighbours(CLUSTER, 8, 16)
    assert neighbours(CLUSTER, 8, 16).bandwidth == CLUSTER.between / 8


@pytest.mark.parametrize("size", [1, 4, 8])
def test_inside_a_node_nothing_changes(size):
    assert rails(CLUSTER, 1, size) == neighbours(CLUSTER, 1, size) == link(CLUSTER, 1, size)
