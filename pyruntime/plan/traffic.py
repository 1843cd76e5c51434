"""Bytes that a rank receives over each axis in an optimizer step.

The transfers are those of `step.py`: what takes a second there on a link of one byte per second is a byte.
What small things exchange besides (norms, statistics of the loss, marks) is not counted.
"""

from __future__ import annotations

from pyruntime.plan.communication import Link, all_gather, all_reduce
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.overlap import exposed_of, linears
from pyruntime.plan.pipelines import layers_by_rank
from pyruntime.plan.step import Predictor


def _bytes_over(size: int, crosses: bool = False) -> Link:
    return Link(size, bandwidth=1.0, latency=0.0, crosses=crosses)


def bytes_of_step(job: Job, mesh: Mesh, element: int = 2) -> dict[str, float]:
    """By axis: tp, cp, pp (of a rank that has neighbours on both sides), of what data parallelism moves over
    data- and context-parallel ranks `gradients` and `weights`, and sums over `replicas`. element: bytes of an
    activation, a weight and a gradient.

    Of the pipeline's rank with most layers, and of data parallelism of its first one. Of cp it is the most,
    as keys that nobody sees stay; sums of their gradients are fp32. Where ZeRO cuts nothing, `weights` are
    whole sums of gradients, which return. Raises ValueError for AxoNN's and CO2's meshes.
    """
    if mesh.is_axonn or mesh.tau:
        raise ValueError(
            f"{mesh.text()} is not counted here; use tp, cp, pp and a dp that meets in every step."
        )
    predictor = Predictor(job, sums_whole=True)
    model, scale = job.model, element / 2
    micro_batches, layers = mesh.micro_batches(job.batch), max(layers_by_rank(model, mesh))
    tokens = mesh.micro_batch * job.seq / mesh.cp
    passes = 2 if mesh.recompute else 1

    tp = _bytes_over(mesh.tp, predictor.link(mesh, "tp", mesh.tp).crosses)
    found = [exposed_of(each, tokens, tp, 1.0, "none", regather=not tp.crosses) for each in linears(model)]
    of_linears = sum(passes * each.transfer + each.transfers_backward for each in found)

    keys = (mesh.cp - 1) * tokens * 2 * model.kv_heads * model.head_dim / mesh.tp
    stages = 2 if mesh.kind == "zb-v" else mesh.virtual
    stream = tokens * model.hidden / mesh.tp

    shard, replicas = _bytes_over(mesh.dp // mesh.replicate * mesh.cp), _bytes_over(mesh.replicate)
    travelling = predictor.gradient_bytes(mesh)
    weights = all_gather(2 * predictor.parameters(mesh), shard)
    if mesh.zero == 3:
        weights *= 2 * micro_batches
    return {
        "tp": scale * micro_batches * layers * of_linears,
        "cp": micro_batches * layers * keys * (element * (passes + 1) + 4),
        "pp": scale * 2 * 2 * stages * stream * micro_batches if mesh.pp > 1 else 0.0,
        "gradients": scale * all_gather(travelling, shard),
        "weights": scale * weights,
        "replicas": scale * all_reduce(travelling / shard.size, replicas),
    }
