"""Plans one pipeline across clusters that share only a slow network: its stages have unequal speeds.

The pipeline, which sends least, goes across clusters. Tensor parallelism stays inside a node, data
parallelism inside one kind of network adapter. Each stage gets as many layers as its speed allows.

Source: Holmes, arXiv 2312.03549, sections 3 and 4. It rounds every share of the layers down and gives the
rest to the last cluster. Here the slowest stage takes as little as possible: for its example of 48 layers on
two clusters 27 and 21, not 26 and 22.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyruntime.choices import KINDS_BETWEEN_CLUSTERS
from pyruntime.pipeline.split import least_largest
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
        except ValueError:  # a stage would get no layer
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

    between: bytes/s of one rank to another cluster. Raises ValueError for more stages than layers.
    """
    own = mesh.pp // len(clusters)
    predictors = [Predictor(replace(job, cluster=cluster), overlap) for cluster in clusters]
    one = [each.layer(mesh) for each in predictors]
    forward = [each.forward + each.waits_forward for each in one]
    backward = [each.backward_input + each.waits_backward for each in one]
    whole = [f + b + each.backward_weight for f, b, each in zip(forward, backward, one, strict=True)]
    per_layer = [whole[stage // own] for stage in range(mesh.pp)]
    layers = tuple(least_largest(per_layer, [0.0] * mesh.pp, 1, job.model.layers))
    seconds = tuple(count * each for count, each in zip(layers, per_layer, strict=True))
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
