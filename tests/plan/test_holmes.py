"""Layers are shared out by speed, and that is faster than sharing them evenly."""

from dataclasses import replace

import pytest

from pyruntime.pipeline.split import least_largest
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.holmes import across, search_across
from pyruntime.plan.memory import memory_of_rank
from pyruntime.plan.mesh import Mesh
from tests.plan.jobs import job


@pytest.mark.parametrize(
    ("layers", "expected", "seconds"), [(48, [27, 21], 0.13706), (30, [17, 13], 0.08629)]
)
def test_layers_of_infiniband_and_roce_nodes(layers, expected, seconds):
    # TFLOP/s of a GPU over either network (Holmes), whose rule gives 26 and 22, 16 and 14.
    speeds = (197, 160)
    assert least_largest([1 / speed for speed in speeds], [0.0, 0.0], 1, layers) == expected
    slowest = max(count / speed for count, speed in zip(expected, speeds, strict=True))
    assert slowest == pytest.approx(seconds, abs=5e-6)


def test_more_stages_than_layers_are_refused():
    wanted, mesh = job("gpt-7.5b", "dgx-h100", 148, 512), Mesh(tp=1, dp=2, pp=74, micro_batch=1)
    with pytest.raises(ValueError, match="36 layers do not give 1 to each of 74 stages"):
        across(wanted, [find_cluster("dgx-h100"), find_cluster("selene")], mesh, between=1e9)


def test_faster_nodes_get_more_layers_and_the_step_is_shorter():
    wanted, mesh = job("gpt-7.5b", "dgx-h100", 64, 512), Mesh(tp=4, dp=4, pp=4, micro_batch=1)
    clusters = [find_cluster("dgx-h100"), find_cluster("selene")]
    found = across(wanted, clusters, mesh, between=1e9)
    assert sum(found.layers) == 36 and found.layers[0] > found.layers[-1]
    slowest = max(found.seconds)
    even = 36 // 4 * found.seconds[-1] / found.layers[-1]
    assert slowest < 0.8 * even


def test_tensor_parallelism_stays_inside_a_node():
    clusters = [find_cluster("dgx-h100"), find_cluster("perlmutter")]  # nodes of 8 and of 4
    found = search_across(job("llama3-8b", "dgx-h100", 32, 64), clusters, between=1e9)
    assert {each.mesh.tp for each in found} == {1, 2, 4}


def test_every_stage_fits_into_its_own_cluster():
    wanted = job("llama3-8b", "dgx-h100", 32, 64, 8192)
    clusters = [find_cluster("dgx-h100"), find_cluster("thin")]
    found = search_across(wanted, clusters, between=1e9)
    assert [each.total for each in found] == sorted(each.total for each in found)
    for each in found[:20]:
        assert sum(each.layers) == 32 and each.mesh.ranks == 32
        for stage, layers in enumerate(each.layers):
            cluster = clusters[stage >= each.mesh.pp // 2]
            held = memory_of_rank(replace(wanted, cluster=cluster), each.mesh, stage, layers=layers)
            assert held.total <= 0.8 * cluster.memory_bytes


def test_gpus_that_do_not_divide_over_the_clusters_are_refused():
    with pytest.raises(ValueError, match="16 GPUs do not divide over 3 clusters"):
        search_across(job("llama3-8b", "dgx-h100", 16, 64), [find_cluster("thin")] * 3, between=1e9)
