"""Makes a cluster from measurements of a machine: alpha and beta of its links, GEMMs, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyruntime.plan.cluster import Cluster, Inside

PROCESS_BYTES = 0.3e9
"""Bytes of a CPU rank's process besides tensors."""


@dataclass(frozen=True)
class AlphaBeta:
    """Seconds of a collective of n bytes over g ranks: (g - 1) alpha + (g - 1)/g n / bandwidth."""

    alpha: float
    """Seconds of one step of a ring."""
    bandwidth: float
    """Bytes/s through each rank."""
    error: float
    """Mean of |fitted - measured| / measured."""


def fit_alpha_beta(nbytes: Sequence[float], seconds: Sequence[float], ranks: int) -> AlphaBeta:
    """Fits alpha and bandwidth by least squares in relative error to all-gathers of `nbytes` bytes in all
    that took `seconds`.

    Raises ValueError for fewer than two sizes, and for times that do not rise with size by more than the
    error of the fit.
    """
    if len(set(nbytes)) < 2 or len(nbytes) != len(seconds):
        raise ValueError(f"alpha and beta need two sizes or more with a time each, found {len(set(nbytes))}.")
    if ranks < 2:
        raise ValueError(f"alpha and beta need 2 ranks or more, found {ranks}.")
    n, t = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    if not (t > 0).all():
        raise ValueError(f"times must be above 0 seconds, found {t.min()}.")
    steps = ranks - 1
    terms = np.stack([np.full_like(n, steps), steps / ranks * n], axis=1)
    alpha, beta = np.linalg.lstsq(terms / t[:, None], np.ones_like(t), rcond=None)[0]
    if alpha < 0:  # Noise: fit a line through the origin.
        alpha, beta = 0.0, float((terms[:, 1] / t).sum() / ((terms[:, 1] / t) ** 2).sum())
    if not beta > 0:
        raise ValueError("times do not rise with the size, so there is no bandwidth; measure larger ones.")
    fitted = terms @ np.array([alpha, beta])
    error = float(np.abs(fitted / t - 1).mean())
    largest = int(n.argmax())
    share = beta * terms[largest, 1] / fitted[largest]
    if alpha > 0 and share <= 2 * error:  # the slope is as small as the noise
        raise ValueError(
            f"the bytes of the largest size take {share:.0%} of its time, and "
            f"the fit is wrong by {error:.0%}: there is no bandwidth in such times; measure larger ones, "
            "or on a machine that does nothing else."
        )
    return AlphaBeta(float(alpha), float(1 / beta), error)


def cluster_of(
    name: str,
    description: str,
    *,
    flops: float,
    attention_flops: float,
    memory_bytes: float,
    memory_bandwidth: float,
    ranks_per_host: int,
    inside: AlphaBeta | None,
    between: AlphaBeta | None,
    core_bandwidth: float = 0.0,
    core_share: float = 1.0,
) -> Cluster:
    """Returns a machine of hosts with `ranks_per_host` ranks. flops: operations/s that GEMMs reach; it
    becomes the peak, with efficiency 1.

    between: measured on a ring with one rank on each host, which has the host's adapter to itself. If
    `inside` or `between` was not measured, the other one stands for it.
    """
    near = inside or between
    far = between or inside
    bandwidth = near.bandwidth if near else memory_bandwidth
    return Cluster(
        name=name,
        description=description,
        gpu="measured rank",
        peak_flops=flops,
        efficiency=1.0,
        memory_bytes=memory_bytes,
        memory_bandwidth=memory_bandwidth,
        gpus_per_node=ranks_per_host,
        between=far.bandwidth if far else bandwidth,
        inside=(Inside(1, max(2, ranks_per_host), bandwidth),),
        latency_inside=near.alpha if near else 0.0,
        latency_between=far.alpha if far else 0.0,
        attention_efficiency=attention_flops / flops,
        core_bandwidth=core_bandwidth,
        core_share=core_share,
        process_bytes=PROCESS_BYTES,
    )
