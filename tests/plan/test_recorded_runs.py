"""Steps that this project's benchmarks measured and recorded are predicted, from what one rank alone took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.planning.trainer_runs import fit_flops
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.measured import AlphaBeta, cluster_of
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import ModelShape
from pyruntime.plan.step import Predictor

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
DIM1024 = ModelShape("dim1024", 4, 1024, 16, 8, 64, 2816, 8192)
SEQ = 512


def one_host() -> Cluster:
    """A core that multiplies also copies and sums, 1.6 GB/s (T_c of data_parallel_dim1024_bf16.json)."""
    link = AlphaBeta(1e-4, 1.6e9, 0.0)
    return machine(link, None, 1.6e9)


def two_hosts(rate: float) -> Cluster:
    """Links of `rate` bits/s, of which TCP reaches 95.6 %; threads and kernel take 30 ms of a core for 17 MB
    (docs/figures/results.md)."""
    return machine(None, AlphaBeta(2e-4, 0.956 * rate / 8, 0.0), 17e6 / 30e-3)


def machine(inside: AlphaBeta | None, between: AlphaBeta | None, core: float) -> Cluster:
    return cluster_of(
        "recorded",
        "",
        flops=200e9,
        attention_flops=44e9,
        memory_bytes=12e9,
        memory_bandwidth=12e9,
        ranks_per_host=1 if inside is None else 2,
        inside=inside,
        between=between,
        core_bandwidth=core,
    )


def seconds_of(name: str) -> dict[str, float]:
    """Seconds of a step by line of a result file."""
    (result,) = (
        one
        for one in json.loads((RESULTS / name).read_text())["results"]
        if one["shape_name"] == "dim1024" and one["dtype"] == "bf16"
    )
    lines = result["lines"]
    if isinstance(lines, dict):
        tokens = SEQ * result["shape"]["accumulate"]
        return {line: tokens / one["tokens_per_second"] for line, one in lines.items()}
    found = {one["name"]: one.get("step_s", one.get("seconds")) for one in lines}
    return found | ({"limit": result["limit"]} if "limit" in result else {})


def predicted(cluster: Cluster, alone: float, batch_alone: int, mesh: Mesh, batch: int) -> float:
    fitted = fit_flops(Job(DIM1024, cluster, 1, batch_alone, SEQ), alone, sums_whole=True)
    return Predictor(Job(DIM1024, fitted, mesh.ranks, batch, SEQ), sums_whole=True).step(mesh).total


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallelism_on_one_host(zero):
    measured = seconds_of("data_parallel/data_parallel_dim1024_bf16.json")
    found = predicted(one_host(), measured["pyruntime, each rank alone"], 1, Mesh(dp=2, zero=zero), 2)
    assert found == pytest.approx(measured[f"pyruntime zero {zero}"], rel=0.15)


@pytest.mark.parametrize(("name", "rate"), [("1gbit", 1e9), ("350mbit", 350e6)])
@pytest.mark.parametrize("zero", [1, 3])
def test_data_parallelism_between_hosts(name, rate, zero):
    measured = seconds_of(f"data_parallel/data_parallel_dim1024_{name}.json")
    found = predicted(two_hosts(rate), measured["pyruntime, each rank alone"], 1, Mesh(dp=2, zero=zero), 2)
    assert found == pytest.approx(measured[f"pyruntime zero {zero}"], rel=0.15)


# Without zb-v, whose schedule is another since.
PIPELINES = {
    "1f1b": Mesh(pp=2, zero=0),
    "interleaved": Mesh(pp=2, zero=0, kind="interleaved", virtual=2),
    "zb-h1": Mesh(pp=2, zero=0, kind="zb-h1"),
}


def test_pipelines_on_one_host_and_which_is_best():
    measured = seconds_of("pipeline/pipeline.json")
    found = {
        name: predicted(one_host(), measured["limit"] / 4, 1, mesh, 8) for name, mesh in PIPELINES.items()
    }
    for name, seconds in found.items():
        assert seconds == pytest.approx(measured[name], rel=0.15)
    best = min(PIPELINES, key=lambda name: measured[name])
    assert measured[min(found, key=lambda name: found[name])] <= 1.05 * measured[best]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_pipelines_between_hosts(name):
    measured = seconds_of("pipeline/pipeline_2hosts.json")
    found = predicted(two_hosts(1e9), measured["limit"] / 4, 1, PIPELINES[name], 8)
    assert found == pytest.approx(measured[name], rel=0.15)


def test_tensor_parallelism_on_one_host():
    measured = seconds_of("training/train_dim1024.json")
    # Two ranks that each train alone take twice as long for a step as both together for two.
    alone = 2 * measured["limit: two pyruntime ranks, each alone"]
    found = predicted(one_host(), alone, 4, Mesh(tp=2, zero=0), 4)
    assert found == pytest.approx(measured["pyruntime tp=2"], rel=0.15)
