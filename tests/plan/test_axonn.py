"""AxoNN's communication model: the released script's figures to the digit, and the corrected ones."""

import pytest

from pyruntime.cli.plan_facts import find_model
from pyruntime.plan.axonn import seconds_of
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.mesh import Mesh
from pyruntime.plan.overlap import linears
from tests.plan.axonn_ranking import communication_seconds, grids, without_latency
from tests.plan.axonn_ranking import linears as ranked_linears

# Seconds and (rows, columns, depth, data) of the best grid for 80 B on 1024 GPUs of Perlmutter.
BEST = {
    (128, True): (2.2187, (4, 8, 32, 1)),
    (256, True): (3.2769, (2, 8, 64, 1)),
    (1024, True): (5.310, (1, 1, 1024, 1)),
    (128, False): (1.7880, (32, 1, 32, 1)),
    (256, False): (2.4156, (16, 1, 64, 1)),
}


@pytest.mark.parametrize(("case", "expected"), BEST.items())
def test_the_best_grid_of_80b_on_1024_gpus(case, expected):
    batch, released = case
    model, cluster = find_model("axonn-80b"), find_cluster("perlmutter")
    timed = (
        (communication_seconds(model, mesh, cluster, batch, 2048, released=released), mesh)
        for mesh in grids(1024, batch, least_model_parallel=64)
    )
    seconds, mesh = min(timed, key=lambda each: each[0])
    assert seconds == pytest.approx(expected[0], rel=1e-4)
    assert (mesh.x, mesh.y, mesh.z, mesh.dp) == expected[1]


def test_released_volumes_of_the_last_linear_are_off_by_four():
    cluster, grid = without_latency(find_cluster("perlmutter")), Mesh(x=4, y=4, z=4)
    down, released = (ranked_linears(find_model("axonn-80b"), released=which)[-1] for which in (False, True))
    right, wrong = (seconds_of(each, grid, cluster, 8192) for each in (down, released))
    assert wrong.output == pytest.approx(4 * right.output)
    assert wrong.input == pytest.approx(right.input / 4)
    assert wrong.gather == right.gather


def test_volumes_are_the_formulas():
    cluster = without_latency(find_cluster("perlmutter"))
    x, y, z, tokens = 4, 2, 8, 4096
    qkv, out, _, _ = linears(find_model("axonn-5b"))
    k, n = 4096, 3 * 4096
    found = seconds_of(qkv, Mesh(x=x, y=y, z=z), cluster, tokens)
    b_y, b_x, b_z = (cluster.bandwidth(*each) for each in ((1, y), (y, x), (x * y, z)))
    assert found.gather == pytest.approx(2 * (z - 1) / z * k * n / (x * y) / b_z)
    assert found.output == pytest.approx(2 * 2 * (y - 1) / y * tokens * n / (z * x) / b_y)
    assert found.input == pytest.approx(2 * 2 * (x - 1) / x * tokens * k / (z * y) / b_x)
    # The next linear has x and y exchanged.
    found = seconds_of(out, Mesh(x=x, y=y, z=z), cluster, tokens)
    assert found.output == pytest.approx(2 * 2 * (x - 1) / x * tokens * 4096 / (z * y) / b_x)


def test_special_grids_are_the_known_parallelisms():
    cluster = find_cluster("perlmutter")
    for linear in linears(find_model("axonn-5b")):
        tensor = seconds_of(linear, Mesh(x=4), cluster, 4096)
        assert tensor.gather == 0
        assert (tensor.output > 0) != linear.column  # Megatron: sums after rows, and of dX before columns.
        assert (tensor.input > 0) == linear.column
        fsdp = seconds_of(linear, Mesh(z=8), cluster, 4096)
        assert fsdp.output == fsdp.input == 0 < fsdp.gather


PERLMUTTER = {
    (1, 2): 76,
    (1, 4): 225,
    (1, 8): 80,
    (1, 64): 80,
    (2, 2): 76,
    (2, 4): 40,
    (2, 32): 40,
    (4, 2): 20,
    (16, 8): 20,
}
FRONTIER = {
    (1, 2): 129,
    (1, 4): 52,
    (1, 8): 135,
    (1, 16): 40,
    (2, 2): 50,
    (2, 4): 72,
    (2, 8): 20,
    (4, 2): 36,
    (4, 4): 10,
    (8, 2): 5,
    (64, 16): 5,
}


@pytest.mark.parametrize(
    ("name", "inner", "size", "gbytes"),
    [("perlmutter", *key, value) for key, value in PERLMUTTER.items()]
    + [("frontier", *key, value) for key, value in FRONTIER.items()],
)
def test_the_effective_bandwidth_of_nested_groups(name, inner, size, gbytes):
    assert find_cluster(name).bandwidth(inner, size) == gbytes * 1e9
