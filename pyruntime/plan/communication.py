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


ALONE = Link(1, math.inf, 0.0, False)
"""The link of a group of one rank."""


def link(cluster: Cluster, inner: int, size: int) -> Link:
    """Returns the link of groups of `size` ranks whose faster-varying axes have `inner` ranks together."""
    crosses = size > 1 and not cluster.fits(inner, size)
    latency = 0.0 if size == 1 else cluster.latency_between if crosses else cluster.latency_inside
    core = 1 / cluster.core_bandwidth if cluster.core_bandwidth else 0.0
    return Link(size, cluster.bandwidth(inner, size), latency, crosses, core)


def direct(cluster: Cluster, inner: int, size: int) -> Link:
    """Returns the same for ranks that each send to all others by their own adapter, as this project's GPUs do
    between nodes; its bandwidth is the one at which a ring would take as long."""
    found = link(cluster, inner, size)
    if not found.crosses:
        return found
    near = max(1, cluster.gpus_per_node // inner)  # ranks of the group in a node
    adapter = cluster.between / cluster.gpus_per_node
    return replace(found, bandwidth=adapter * (size - 1) / (size - min(near, size - 1)))


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
            all_gather(self.gradients, self.over) + all_reduce(part, self.replicas),
            all_gather(2 * self.parameters, self.over),
            own_seconds(self.gradients, self.over) + 2 * own_seconds(part, self.replicas),
            own_seconds(2 * self.parameters, self.over),
        )
