"""AxoNN's 4D tensor parallelism: the seconds of its collectives on each axis.

A linear is O = I W with I [m, k] and W [k, n]. Rows of I are cut over z, columns of I and rows of W over y,
columns of W over x. Each (x, y) block of W is cut further into z pieces. Then each layer of the network

    all-gathers W over z, forward and backward    (g_z - 1)/g_z  k n / (g_x g_y)
    reduce-scatters dW over z                     the same
    all-reduces O over y                          2 (g_y - 1)/g_y  m n / (g_z g_x)
    all-reduces dI over x                         2 (g_x - 1)/g_x  m k / (g_z g_y)
    all-reduces dW over data                      2 (g_data - 1)/g_data  k n / (g_x g_y g_z)

elements. Every second linear has x and y exchanged, so its input has the layout of the previous output.

Source: arXiv 2305.13525, algorithm 1 and the communication model, and its released script.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.plan.cluster import Cluster
from pyruntime.plan.communication import all_gather, all_reduce, link
from pyruntime.plan.mesh import Mesh
from pyruntime.plan.overlap import LinearShape


@dataclass(frozen=True)
class Seconds:
    """Seconds of one linear's collectives in one step."""

    gather: float
    """All-gather of W over z, once; the reduce-scatter of dW takes as long."""
    output: float
    """All-reduce of O, once."""
    input: float
    """All-reduce of dI."""


def seconds_of(linear: LinearShape, mesh: Mesh, cluster: Cluster, tokens: float) -> Seconds:
    """Returns the seconds of the collectives of `linear` for `tokens` tokens of a data-parallel replica, with
    2 bytes an element."""
    over_y, over_x = link(cluster, mesh.inner("y"), mesh.y), link(cluster, mesh.inner("x"), mesh.x)
    over_z = link(cluster, mesh.inner("z"), mesh.z)
    inner, outer = (over_y, over_x) if linear.column else (over_x, over_y)
    weight = linear.k * linear.n / (mesh.x * mesh.y)
    rows = tokens / mesh.z
    return Seconds(
        gather=all_gather(2 * weight, over_z),
        output=all_reduce(2 * rows * linear.n / outer.size, inner),
        input=all_reduce(2 * rows * linear.k / inner.size, outer),
    )
