"""Jobs that the tests of the planner share."""

from __future__ import annotations

from pyruntime.cli.plan_facts import find_model
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.mesh import Job, Mesh


def job(model: str, cluster: str, gpus: int, batch: int, seq: int = 2048, causal: bool = True) -> Job:
    return Job(find_model(model), find_cluster(cluster), gpus, batch, seq, causal)


def pipe(kind: str, ranks: int, virtual: int = 1, slices: int = 1) -> Mesh:
    """A pipeline alone."""
    return Mesh(pp=ranks, kind=kind, virtual=virtual, slices=slices)
