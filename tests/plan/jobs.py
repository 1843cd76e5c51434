"""Jobs that the tests of the planner share."""

from __future__ import annotations

from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.mesh import Job
from pyruntime.plan.models import find_model


def job(model: str, cluster: str, gpus: int, batch: int, seq: int = 2048, causal: bool = True) -> Job:
    return Job(find_model(model), find_cluster(cluster), gpus, batch, seq, causal)
