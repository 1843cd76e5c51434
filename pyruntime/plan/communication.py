"""Seconds of transfers over nested groups.

Ring collectives: of g ranks each moves (g - 1)/g of the whole operand through its link, in g - 1 steps.
Bandwidth is the effective one of nested groups, see `Cluster.bandwidth`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyruntime.plan.cluster import Cluster


@dataclass(frozen=True)
class Link:
    """What a group of one axis has to itself while all groups of the axis communicate."""

    size: int
    """Ranks of a group."""
    bandwidth: float
    """Bytes/s through each rank."""
    latency: float
    """Seconds of a step of a ring."""
    crosses: bool
    """Whether it leaves the node, and shares its adapters with other axes that do."""
    core: float = 0.0
    """Seconds of its own that a rank spends on a byte; see `Cluster.core_bandwidth`."""


ALONE = Link(1, math.inf, 0.0, False)
"""Of a group of one rank."""


def link(cluster: Cluster, inner: int, size: int) -> Link:
    """Of groups of `size` ranks whose faster-varying axes have `inner` ranks together."""
    crosses = size > 1 and not cluster.fits(inner, size)
    latency = 0.0 if size == 1 else cluster.latency_between if crosses else cluster.latency_inside
    core = 1 / cluster.core_bandwidth if cluster.core_bandwidth else 0.0
    return Link(size, cluster.bandwidth(inner, size), latency, crosses, core)


def all_gather(nbytes: float, over: Link) -> float:
    """Seconds of an all-gather or a reduce-scatter whose whole operand is `nbytes`."""
    if over.size == 1:
        return 0.0
    steps = over.size - 1
    return steps / over.size * nbytes / over.bandwidth + steps * over.latency


def own_seconds(nbytes: float, over: Link) -> float:
    """What of an all-gather or a reduce-scatter of `nbytes` bytes in all the rank spends itself: no GEMM
    can hide that."""
    return (over.size - 1) / over.size * nbytes * over.core


def all_reduce(nbytes: float, over: Link) -> float:
    """Seconds: a reduce-scatter and an all-gather."""
    return 2 * all_gather(nbytes, over)


def send(nbytes: float, over: Link) -> float:
    """Seconds from one rank to the next."""
    return 0.0 if over.size == 1 else nbytes / over.bandwidth + over.latency
