"""Steps of this project's grids: x is tensor parallelism, z is ZeRO 3, and y sums what both leave."""

from dataclasses import astuple, replace

import pytest

from pyruntime.plan.cluster import Cluster
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import ModelShape
from pyruntime.plan.overlap import exposed_of, linears
from pyruntime.plan.step import NORMS_OF_A_LAYER, Predictor
from pyruntime.plan.traffic import bytes_of_step
from tests.plan.jobs import job

SHAPE = ModelShape("dim1024", 4, 1024, 16, 8, 64, 2816, 8192)


def ours(wanted: Job, overlap="fused") -> Predictor:
    return Predictor(wanted, overlap, sums_whole=True)


def machine(**changes) -> Cluster:
    """Hosts of one rank on a link of 100 MB/s."""
    plain = replace(Cluster.of_ranks(1), peak_flops=1e11, memory_bandwidth=2e10, between=1e8)
    return replace(plain, latency_between=1e-3, **changes)


@pytest.mark.parametrize("core_bandwidth", [0.0, 2e8])
@pytest.mark.parametrize(
    ("grid", "known"),
    [
        (Mesh(x=4, zero=0), Mesh(tp=4)),
        (Mesh(z=4, zero=0), Mesh(dp=4, zero=3)),
        (Mesh(x=2, z=2, zero=0), Mesh(tp=2, dp=2, zero=3)),
        (Mesh(z=2, dp=2, zero=0), Mesh(dp=4, zero=3, replicate=2)),
    ],
    ids=str,
)
def test_x_is_tensor_parallelism_and_z_is_zero_3(grid, known, core_bandwidth):
    predictor = ours(Job(SHAPE, machine(core_bandwidth=core_bandwidth), 4, 8, 512))
    found, expected = predictor.step(grid), predictor.step(known)
    if grid.z > 1:
        found = replace(found, z=0.0, dp=found.z)
    assert astuple(found) == pytest.approx(astuple(expected))
    assert expected.exposed > 0


@pytest.mark.parametrize("grid", [Mesh(x=2, y=2, zero=0), Mesh(y=4, zero=0), Mesh(x=4, y=2, zero=0)], ids=str)
def test_what_nothing_hides_takes_as_long_as_the_bytes_of_x_and_y(grid):
    wanted = Job(SHAPE, replace(machine(), latency_between=0.0), grid.ranks, 2, 512)
    counted = bytes_of_step(wanted, grid)
    tokens, share = 2 * 512, 2 * (grid.y - 1) / grid.y
    head = 2 * share * tokens * SHAPE.vocab / grid.x
    norms = SHAPE.layers * 2 * NORMS_OF_A_LAYER * 4 * (grid.y - 1) * tokens / grid.x
    seconds = ours(wanted, "none").step(grid).tp
    assert seconds * wanted.cluster.between == pytest.approx(counted["tp"] + counted["y"] + head + norms)


def test_a_gemm_hides_what_travels_over_both_axes():
    over = ours(Job(SHAPE, machine(), 4, 2, 512)).link(Mesh(x=2, y=2), "x", 2)
    for linear in linears(SHAPE):
        none = exposed_of(linear, 512, over, 1e11, "none", regather=False, sums=over)
        slow, fast = (
            exposed_of(linear, 512, over, flops, regather=False, sums=over) for flops in (1e8, 1e15)
        )
        assert slow.forward == slow.backward == 0.0
        assert fast.forward == pytest.approx(none.transfer, rel=1e-2)
        assert fast.backward == pytest.approx(none.transfers_backward, rel=1e-2)
        # A column linear sums its results, a row linear dX.
        assert (none.transfer > none.transfers_backward) == linear.column


def test_norms_wait_for_each_other_once_in_each_direction():
    near, far = (
        ours(Job(SHAPE, replace(machine(), latency_between=latency, peak_flops=1e6), 2, 1, 512))
        for latency in (0.0, 1e-3)
    )
    # GEMMs so slow hide all else of y.
    grid = Mesh(y=2, zero=0)
    later = far.step(grid).tp - near.step(grid).tp
    assert later == pytest.approx(2 * NORMS_OF_A_LAYER * SHAPE.layers * 1e-3)


def test_processor_time_of_sums_is_counted():
    grid = Mesh(y=2, zero=0)
    free, busy = (
        ours(Job(SHAPE, machine(core_bandwidth=core, latency_inside=0.0), 2, 1, 512)).step(grid).tp
        for core in (0.0, 1e8)
    )
    assert busy > free


def test_published_meshes_stay_axonns():
    wanted = job("llama3-8b", "frontier", 64, 64, 8192)
    grid = Mesh(x=4, y=2, z=8, zero=0)
    of_axonn, of_ours = Predictor(wanted).step(grid), ours(wanted).step(grid)
    assert of_axonn.z != of_ours.z
    assert of_axonn.dp == of_ours.dp == 0.0
