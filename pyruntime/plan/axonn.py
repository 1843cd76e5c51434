"""AxoNN's 4D tensor parallelism: what its collectives take on each axis.

A linear O = I W, I [m, k], W [k, n]: rows of I lie over z, its columns and the rows of W over y, columns of
W over x; each (x, y) block of W is cut into z pieces more. Then each layer of the network

    all-gathers W over z, forward and backward    (g_z - 1)/g_z  k n / (g_x g_y)
    reduce-scatters dW over z                     the same
    all-reduces O over y                          2 (g_y - 1)/g_y  m n / (g_z g_x)
    all-reduces dI over x                         2 (g_x - 1)/g_x  m k / (g_z g_y)
    all-reduces dW over data                      2 (g_data - 1)/g_data  k n / (g_x g_y g_z)

elements. Every second linear has x and y exchanged, because its input lies as the output before it.

Source: arXiv 2305.13525, algorithm 1 and the communication model, and its released script.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyruntime.plan.cluster import Cluster
from pyruntime.plan.communication import all_gather, all_reduce, link
from pyruntime.plan.mesh import divisors
from pyruntime.plan.models import ModelShape

GIB = 2**30


@dataclass(frozen=True)
class Grid:
    """Ranks by axis; y varies fastest, then x, z, data."""

    x: int
    y: int
    z: int
    data: int = 1


@dataclass(frozen=True)
class Linear:
    """k input and n output features; `transposed`: x and y exchanged."""

    name: str
    k: int
    n: int
    transposed: bool


@dataclass(frozen=True)
class Seconds:
    """Of one linear's collectives in one step."""

    gather: float
    """Of W over z, once."""
    scatter: float
    """Of dW over z."""
    output: float
    """All-reduce of O, once."""
    input: float
    """All-reduce of dI."""
    data: float
    """All-reduce of dW over data, 4 bytes an element."""


def linears(model: ModelShape, *, released: bool = False) -> tuple[Linear, ...]:
    """Those of one layer. released: as AxoNN's script counts the last one, whose ratio of 4 it takes for the
    output's width, where it is the input's; a defect that changes the ranking."""
    hidden, ffn = model.hidden, model.ffn
    down = Linear("down", hidden, ffn, True) if released else Linear("down", ffn, hidden, True)
    return (
        Linear("qkv", hidden, model.qkv, False),
        Linear("out", model.attention_width, hidden, True),
        Linear("up", hidden, model.up, False),
        down,
    )


def seconds_of(
    linear: Linear, grid: Grid, cluster: Cluster, tokens: float, *, latency: bool = True
) -> Seconds:
    """Seconds of the collectives of `linear` for `tokens` tokens of a data-parallel replica, 2 bytes an
    element."""
    over_y, over_x = link(cluster, 1, grid.y), link(cluster, grid.y, grid.x)
    over_z = link(cluster, grid.x * grid.y, grid.z)
    over_data = link(cluster, grid.x * grid.y * grid.z, grid.data)
    if not latency:
        over_x, over_y, over_z, over_data = (
            replace(each, latency=0.0) for each in (over_x, over_y, over_z, over_data)
        )
    inner, outer = (over_x, over_y) if linear.transposed else (over_y, over_x)
    weight = linear.k * linear.n / (grid.x * grid.y)
    rows = tokens / grid.z
    return Seconds(
        gather=all_gather(2 * weight, over_z),
        scatter=all_gather(2 * weight, over_z),
        output=all_reduce(2 * rows * linear.n / outer.size, inner),
        input=all_reduce(2 * rows * linear.k / inner.size, outer),
        data=all_reduce(4 * weight / grid.z, over_data),
    )


def communication_seconds(
    model: ModelShape,
    grid: Grid,
    cluster: Cluster,
    batch: int,
    seq: int,
    *,
    released: bool = False,
) -> float:
    """Seconds of all collectives of a step with full recomputation, none of them hidden and without latency:
    the figure by which AxoNN ranks grids. Its bandwidths are read as GiB/s.

    W is gathered twice, O reduced twice (again in the recomputation). released: see `linears`.
    """
    total = 0.0
    for linear in linears(model, released=released):
        one = seconds_of(linear, grid, cluster, batch * seq / grid.data, latency=False)
        total += 2 * one.gather + one.scatter + 2 * one.output + one.input + one.data
    return model.layers * total * 1e9 / GIB


def grids(ranks: int, batch: int, least_model_parallel: int = 1) -> Iterator[Grid]:
    """All grids of so many ranks over which `batch` sequences divide, and which cut a model into at least so
    many parts."""
    for x in divisors(ranks):
        for y in divisors(ranks // x):
            for z in divisors(ranks // (x * y)):
                data = ranks // (x * y * z)
                if x * y * z >= least_model_parallel and batch % (z * data) == 0:
                    yield Grid(x, y, z, data)
