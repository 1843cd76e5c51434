"""Seconds of transfers over nested groups, and what the parallelisms move.

Ring collectives: of g ranks each moves (g - 1)/g of the whole operand through its link, in g - 1 steps.
Bandwidth is the effective one of nested groups, see `Cluster.bandwidth`.
"""

from __future__ import annotations

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


def link(cluster: Cluster, inner: int, size: int) -> Link:
    """Of groups of `size` ranks whose faster-varying axes have `inner` ranks together."""
    crosses = size > 1 and not cluster.fits(inner, size)
    core = 1 / cluster.core_bandwidth if cluster.core_bandwidth else 0.0
    return Link(size, cluster.bandwidth(inner, size), cluster.latency(inner, size), crosses, core)


def all_gather(nbytes: float, over: Link) -> float:
    """Seconds of an all-gather or a reduce-scatter whose whole operand is `nbytes`."""
    if over.size == 1:
        return 0.0
    steps = over.size - 1
    return steps / over.size * nbytes / over.bandwidth + steps * over.latency


def own_seconds(nbytes: float, over: Link) -> float:
    """What of an all-gather or a reduce-scatter of `nbytes` bytes in all the rank spends itself: no product
    can hide that."""
    return (over.size - 1) / over.size * nbytes * over.core


def all_reduce(nbytes: float, over: Link) -> float:
    """Seconds: a reduce-scatter and an all-gather."""
    return 2 * all_gather(nbytes, over)


def send(nbytes: float, over: Link) -> float:
    """Seconds from one rank to the next."""
    return 0.0 if over.size == 1 else nbytes / over.bandwidth + over.latency


def tensor_parallel_elements(tokens: int, hidden: int, tp: int) -> float:
    """Elements through each rank for one layer and one micro-batch of `tokens` tokens, forward and backward:
    8 b s h (t - 1)/t (arXiv 2104.04473, section 3.2). With sequence parallelism and gathered inputs thrown
    away it is 10: each column linear gathers its input again."""
    return 8 * tokens * hidden * (tp - 1) / tp


def pipeline_elements(tokens: int, hidden: int, tp: int, *, scattered: bool = True) -> float:
    """Elements between two stages for one micro-batch and direction: b s h, or b s h / t where each
    tensor-parallel rank sends its part (arXiv 2104.04473, section 4.1)."""
    return tokens * hidden / (tp if scattered else 1)


def data_parallel_elements(parameters: float, dp: int) -> float:
    """Elements through each rank for one reduction of the gradients and the return of the sums or of new
    weights: 2 N (d - 1)/d, once a step."""
    return 2 * parameters * (dp - 1) / dp
