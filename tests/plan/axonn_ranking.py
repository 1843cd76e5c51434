"""The figure by which AxoNN ranks grids (arXiv 2305.13525 and its released script), from the planner's
seconds of each linear's collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pyruntime.plan import overlap
from pyruntime.plan.axonn import seconds_of
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.communication import all_reduce, link
from pyruntime.plan.mesh import Mesh, divisors
from pyruntime.plan.models import ModelShape
from pyruntime.plan.overlap import LinearShape

GIB = 2**30


def without_latency(cluster: Cluster) -> Cluster:
    return replace(cluster, latency_inside=0.0, latency_between=0.0)


def linears(model: ModelShape, *, released: bool) -> tuple[LinearShape, ...]:
    """Those of one layer. released: as AxoNN's script counts the last one, whose ratio of 4 it takes for the
    output's width, where it is the input's; a defect that changes the ranking."""
    *others, down = overlap.linears(model)
    return (*others, replace(down, k=down.n, n=down.k) if released else down)


def communication_seconds(
    model: ModelShape, mesh: Mesh, cluster: Cluster, batch: int, seq: int, *, released: bool
) -> float:
    """Seconds of all collectives of a step with full recomputation, none of them hidden and without latency.
    AxoNN's bandwidths are read as GiB/s.

    W is gathered twice, O reduced twice (again in the recomputation), dW reduced over data, 4 bytes an
    element.
    """
    quick, total = without_latency(cluster), 0.0
    over_data = link(quick, mesh.inner("dp"), mesh.dp)
    for linear in linears(model, released=released):
        one = seconds_of(linear, mesh, quick, batch * seq / mesh.dp)
        total += 3 * one.gather + 2 * one.output + one.input
        total += all_reduce(4 * linear.k * linear.n / (mesh.x * mesh.y * mesh.z), over_data)
    return model.layers * total * 1e9 / GIB


def grids(ranks: int, batch: int, least_model_parallel: int) -> Iterator[Mesh]:
    """All grids of so many ranks over which `batch` sequences divide, and which cut a model into at least so
    many parts."""
    for x in divisors(ranks):
        for y in divisors(ranks // x):
            for z in divisors(ranks // (x * y)):
                data = ranks // (x * y * z)
                if x * y * z >= least_model_parallel and batch % (z * data) == 0:
                    yield Mesh(x=x, y=y, z=z, dp=data)
