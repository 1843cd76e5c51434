"""Seconds of transfers over nested groups.

In a ring collective each of g ranks moves (g - 1)/g of the whole operand through its link, in g - 1 steps.
The bandwidth is the effective one of nested groups (`Cluster.bandwidth`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pyruntime.plan.cluster import Cluster


@dataclass(frozen=True)
class Link:
    """Bandwidth and latency of a group of one axis while all groups of the axis communicate."""

    size: int
    """Ranks of a group."""
    bandwidth: float
    """Bytes/s through each rank."""
    latency: float
    """Seconds of one step of a ring."""
    crosses: bool
    """Whether it leaves the node and shares its adapters with other axes that do."""
    core: float = 0.0
    """Seconds of its own that a rank spends on a byte; see `Cluster.core_bandwidth`."""
    inside: float = 0.0
    """Seconds in which a byte of a rank's own keeps its links inside the node busy, if rows go on there."""


MOST_EXCHANGES = 8
"""The exchanges between nodes in which rows travel, at most (kMostExchanges)."""
ALONE = Link(1, math.inf, 0.0, False)
"""The link of a group of one rank."""


def link(cluster: Cluster, inner: int, size: int) -> Link:
    """Returns the link of groups of `size` ranks whose faster-varying axes have `inner` ranks together."""
    crosses = size > 1 and not cluster.fits(inner, size)
    latency = 0.0 if size == 1 else cluster.latency_between if crosses else cluster.latency_inside
    core = 1 / cluster.core_bandwidth if cluster.core_bandwidth else 0.0
    return Link(size, cluster.bandwidth(inner, size), latency, crosses, core)


def neighbours(cluster: Cluster, inner: int, size: int) -> Link:
    """Returns the same for GPUs that each send to the next one, or to all, by their own adapter."""
    found = link(cluster, inner, size)
    return replace(found, bandwidth=cluster.between / cluster.gpus_per_node) if found.crosses else found


def rails(cluster: Cluster, inner: int, size: int) -> Link:
    """Returns the same for this project's GPUs, whose rows cross between nodes on rails and go on inside them
    (csrc/transport/device/hosts/rails.h); its bandwidth and latency are those at which a ring would take as
    long.

    Of a rank's b bytes its adapter sends (H - 1) b to the H - 1 other nodes, and of what it has and gets it
    sends H (L - 1) b to the L - 1 others of its node, piece by piece under the former."""
    found = link(cluster, inner, size)
    if not found.crosses:
        return found
    near = near_ranks(cluster, inner, size)
    if near == 1:
        return neighbours(cluster, inner, size)
    nodes = math.ceil(size / near)
    across = (nodes - 1) * cluster.gpus_per_node / cluster.between
    inside = nodes * (near - 1) / cluster.bandwidth(inner, near)
    exchanges = min(MOST_EXCHANGES, nodes - 1)
    seconds = max(across, inside) + min(across, inside) / exchanges
    latency = (exchanges * cluster.latency_between + cluster.latency_inside) / (size - 1)
    return replace(found, bandwidth=(size - 1) / seconds, latency=latency, inside=inside)


def near_ranks(cluster: Cluster, inner: int, size: int) -> int:
    """Returns how many ranks of such a group are on a node."""
    return min(max(1, cluster.gpus_per_node // inner), size)


def straight(cluster: Cluster, inner: int, size: int) -> Link:
    """Returns the same for this project's GPUs, whose rows go straight to each rank: what goes to other nodes
    leaves by a GPU's own adapter, and what stays inside one travels beside it."""
    found = neighbours(cluster, inner, size)
    near = near_ranks(cluster, inner, size)
    return replace(found, bandwidth=found.bandwidth * (size - 1) / (size - near)) if found.crosses else found


def all_gather(nbytes: float, over: Link) -> float:
    """Returns the seconds of an all-gather or a reduce-scatter whose whole operand is `nbytes`."""
    if over.size == 1:
        return 0.0
    steps = over.size - 1
    return steps / over.size * nbytes / over.bandwidth + steps * over.latency


def own_seconds(nbytes: float, over: Link) -> float:
    """Returns the seconds that the rank itself spends on an all-gather or a reduce-scatter of `nbytes` in
    all; no GEMM can hide them."""
    return (over.size - 1) / over.size * nbytes * over.core


def all_reduce(nbytes: float, over: Link) -> float:
    """Returns the seconds of a reduce-scatter and an all-gather."""
    return 2 * all_gather(nbytes, over)


def send(nbytes: float, over: Link) -> float:
    """Returns the seconds from one rank to the next."""
    return 0.0 if over.size == 1 else nbytes / over.bandwidth + over.latency


@dataclass(frozen=True)
class DataParallelExchange:
    """The exchange of some parameters and their gradients among the ranks that hold the same ones."""

    parameters: float
    gradients: float
    """Bytes of gradients that travel."""
    over: Link
    """The ranks over which ZeRO cuts."""
    replicas: Link
    """The groups of these."""
    stacked: float = 0.0
    """Bytes of experts' gradients, which are copied to where they leave from; others are written there."""

    def seconds(self) -> tuple[float, float, float, float]:
        """Returns the seconds of gradients and of weights, and of these the rank's own for each."""
        part = self.gradients / self.over.size
        return (
            # A bucket's parts are summed inside a node before the sum leaves it.
            all_gather(self.gradients, self.over) + part * self.over.inside + all_reduce(part, self.replicas),
            all_gather(2 * self.parameters, self.over),
            own_seconds(self.gradients, self.over) + 2 * own_seconds(part, self.replicas),
            own_seconds(2 * self.parameters, self.over),
        )
