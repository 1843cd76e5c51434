"""Plans one pipeline across clusters that share only a slow network: its stages have unequal speeds.

The pipeline, which sends least, goes across clusters. Tensor parallelism stays inside a node, data
parallelism inside one kind of network adapter. Layers are divided in proportion to speed.

Source: Holmes, arXiv 2312.03549, sections 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyruntime.choices import KINDS_BETWEEN_CLUSTERS
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.memory import PAPER, Rules, memory_of_rank, verdict
from pyruntime.plan.mesh import Job, Mesh, check_job
from pyruntime.plan.overlap import Overlap
from pyruntime.plan.pipelines import bubble
from pyruntime.plan.search import SearchSpace, meshes
from pyruntime.plan.step import Predictor


@dataclass(frozen=True)
class Across:
    """A mesh over several clusters."""

    mesh: Mesh
    """Its pp counts the stages of all clusters."""
    layers: tuple[int, ...]
    """Layers of each stage, in the pipeline's order; every cluster has equally many stages."""
    seconds: tuple[float, ...]
    """Seconds of each stage for one micro-batch, forward and backward."""
    total: float
    """Seconds of a step."""


def layers_of_clusters(layers: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Returns the layers of each cluster: floor(N S_i / sum S), and the rest for the last.

    speeds: in any unit. Raises ValueError if a cluster gets no layer.
    """
    total = sum(speeds)
    # Quotients that should be whole may be smaller by a rounding error.
    shares = [math.floor(layers * speed / total + 1e-9) for speed in speeds[:-1]]
    shares.append(layers - sum(shares))
    if min(shares) < 1:
        raise ValueError(
            f"{layers} layers over clusters of speeds {', '.join(f'{speed:g}' for speed in speeds)} leave "
            "one without a layer; do not use that cluster."
        )
    return tuple(shares)


def split_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Returns the layers of each of `stages` stages; the first ones get more. Raises ValueError for more
    stages than layers."""
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages; use 1 to {layers}.")
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def search_across(
    job: Job, clusters: Sequence[Cluster], between: float, overlap: Overlap = "fused", rules: Rules = PAPER
) -> list[Across]:
    """Returns all meshes over several clusters, fastest first; each stage fits into 80 % of its memory.

    Tensor parallelism stays inside nodes of every cluster, and clusters have equally many stages. between:
    bytes/s of one rank to another cluster. Raises ValueError if the GPUs do not divide over the clusters.
    """
    check_job(job)
    if job.gpus % len(clusters):
        raise ValueError(f"{job.gpus} GPUs do not divide over {len(clusters)} clusters; use as many in each.")
    node = min(cluster.gpus_per_node for cluster in clusters)
    choice = SearchSpace(axonn=False, co2=False, hybrid=False, kinds=KINDS_BETWEEN_CLUSTERS)
    found = []
    for mesh in meshes(job, choice):
        if mesh.pp == 1 or mesh.pp % len(clusters) or mesh.tp > node:
            continue
        try:
            one = across(job, clusters, mesh, between, overlap)
        except ValueError:  # a cluster would get no layer
            continue
        if _fits(job, clusters, one, rules):
            found.append(one)
    return sorted(found, key=lambda each: each.total)


def _fits(job: Job, clusters: Sequence[Cluster], one: Across, rules: Rules) -> bool:
    for stage, layers in enumerate(one.layers):
        cluster = clusters[stage * len(clusters) // one.mesh.pp]
        own = replace(job, cluster=cluster)
        held = memory_of_rank(own, one.mesh, stage, rules, layers=layers)
        if verdict(held.total, cluster.memory_bytes) != "fits":
            return False
    return True


def across(
    job: Job,
    clusters: Sequence[Cluster],
    mesh: Mesh,
    between: float,
    overlap: Overlap = "fused",
) -> Across:
    """Returns `mesh` over `clusters`: each has as many GPUs and stages, and layers by predicted speed.

    between: bytes/s of one rank to another cluster. Raises ValueError if a stage would get no layer.
    """
    own = mesh.pp // len(clusters)
    predictors = [Predictor(replace(job, cluster=cluster), overlap) for cluster in clusters]
    one = [each.layer(mesh) for each in predictors]
    forward = [each.forward + each.tp_forward + each.cp_forward for each in one]
    backward = [each.backward_input + each.tp_backward + each.cp_backward for each in one]
    whole = [f + b + each.backward_weight for f, b, each in zip(forward, backward, one, strict=True)]
    shares = layers_of_clusters(job.model.layers, [1 / seconds for seconds in whole])
    layers = tuple(count for share in shares for count in split_evenly(share, own))
    seconds = tuple(count * whole[stage // own] for stage, count in enumerate(layers))
    slowest = max(range(mesh.pp), key=lambda stage: seconds[stage])
    at = slowest // own
    micro_batches = mesh.micro_batches(job.batch)
    idle = bubble(
        mesh,
        micro_batches,
        layers[slowest] * forward[at],
        layers[slowest] * backward[at],
        layers[slowest] * one[at].backward_weight,
    )
    message = 2 * mesh.micro_batch * job.seq / mesh.cp * job.model.hidden / mesh.tp
    crossing = 2 * (len(clusters) - 1) * message / between
    # Each cluster reduces its own gradients; the slowest decides.
    reduced = max(each.step(replace(mesh, kind="1f1b", virtual=1)).dp for each in predictors)
    total = micro_batches * max(seconds[slowest], message / between) + idle + crossing + reduced
    return Across(mesh, layers, seconds, total)
