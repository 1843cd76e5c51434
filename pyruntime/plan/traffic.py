"""Bytes that a rank receives over each axis in an optimizer step.

The transfers are those of `step.py`, on a link of one byte per second. Small exchanges (norms, statistics of
the loss, marks) are not counted. Rows of experts count as gathered, also where GPUs send each only to ranks
that need it.
"""

from __future__ import annotations

from pyruntime.plan.communication import Link, all_gather, all_reduce
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import ModelShape
from pyruntime.plan.overlap import exposed_of, linears
from pyruntime.plan.pipelines import dense_by_rank, layers_by_rank
from pyruntime.plan.step import Predictor


def _bytes_over(size: int, crosses: bool = False) -> Link:
    return Link(size, bandwidth=1.0, latency=0.0, crosses=crosses)


def bytes_of_step(job: Job, mesh: Mesh, element: int = 2) -> dict[str, float]:
    """Returns bytes by axis: tp, ep if experts lie over a group of their own, cp, pp (for a rank with
    neighbours on both sides), `gradients` and `weights` of data parallelism over dp and cp ranks, and sums
    over `replicas`. element: bytes of an activation, a weight and a gradient.

    tp and cp count the pipeline's rank with most layers, data parallelism its first rank. cp is an upper
    bound: keys that no query sees do not travel; sums of key gradients are fp32. If ZeRO cuts nothing,
    `weights` are the whole sums of gradients that return. For AxoNN meshes tp is x, y is an extra entry, and
    z is ZeRO 3. Raises ValueError for CO2 meshes, and for AxoNN meshes with cp or pp.
    """
    if mesh.tau or (mesh.is_axonn and mesh.cp * mesh.pp > 1):
        raise ValueError(
            f"The bytes of {mesh.text()} cannot be counted; use tp, cp, pp, and a dp that meets in every "
            "step, or x, y, z and dp."
        )
    if mesh.is_axonn:
        return _bytes_of_grid(job, mesh, element)
    predictor = Predictor(job, sums_whole=True)
    model, scale = job.model, element / 2
    micro_batches, counts = mesh.micro_batches(job.batch), layers_by_rank(model, mesh)
    layers = max(counts)
    dense = dense_by_rank(model, mesh)[counts.index(layers)]
    tokens = mesh.micro_batch * job.seq / mesh.cp
    passes = 2 if mesh.recompute == "full" else 1

    def of_linears(model: ModelShape, axis: str, size: int, *, experts: bool) -> float:
        """Returns the bytes of a layer's linears whose rows travel over the axis."""
        over = _bytes_over(size, predictor.link(mesh, axis, size).crosses)
        wanted = [each for each in linears(model) if (each.alone is not None and mesh.ep > 0) == experts]
        rows = tokens / mesh.tp * size
        found = [exposed_of(each, rows, over, 1.0, "none", regather=not over.crosses) for each in wanted]
        return sum(passes * each.transfer + each.transfers_backward for each in found)

    keys = (mesh.cp - 1) * tokens * 2 * model.kv_heads * model.head_dim / mesh.tp
    stages = 2 if mesh.kind == "zb-v" else mesh.virtual
    stream = tokens * model.hidden / mesh.tp

    of_replicas = {"gradients": 0.0, "weights": 0.0, "replicas": 0.0}
    for each in predictor.exchanges(mesh):
        shard, replicas = _bytes_over(each.over.size), _bytes_over(each.replicas.size)
        weights = all_gather(2 * each.parameters, shard)
        of_replicas["gradients"] += scale * all_gather(each.gradients, shard)
        of_replicas["weights"] += scale * weights * (2 * micro_batches if mesh.zero == 3 else 1)
        of_replicas["replicas"] += scale * all_reduce(each.gradients / shard.size, replicas)
    of_experts = {}
    if mesh.ep:
        of_experts["ep"] = (
            scale * micro_batches * (layers - dense) * of_linears(model, "ep", mesh.ep, experts=True)
        )
    of_tp = (layers - dense) * of_linears(model, "tp", mesh.tp, experts=False)
    if dense:
        of_tp += dense * of_linears(model.dense, "tp", mesh.tp, experts=False)
    return {
        "tp": scale * micro_batches * of_tp,
        **of_experts,
        "cp": micro_batches * layers * keys * (element * (passes + 1) + 4),
        "pp": scale * 2 * 2 * stages * stream * micro_batches if mesh.pp > 1 else 0.0,
        **of_replicas,
    }


def _bytes_of_grid(job: Job, mesh: Mesh, element: int) -> dict[str, float]:
    """Returns the bytes of an x, y, z mesh (docs/explanation/primitives.md): activations over x and y; over z
    and dp the weights and gradients of ZeRO on the same blocks."""
    tokens, passes = mesh.micro_batch * job.seq, 2 if mesh.recompute == "full" else 1
    over_x, over_y = _bytes_over(mesh.x), _bytes_over(mesh.y)
    crosses = Predictor(job).link(mesh, "x", mesh.x).crosses
    of_x = of_y = 0.0
    for linear in linears(job.model):
        # Over x, rows of the stream are gathered and scattered; over y, the linear's other side is summed.
        rows = all_gather(tokens * linear.travels / mesh.y, over_x)
        sums = all_reduce(tokens * linear.deciding / mesh.x, over_y)
        again = linear.column and not crosses  # for dW
        of_x += rows * (passes + (2 if again else 1))
        of_y += sums * (passes if linear.column else 1)
    layers = mesh.micro_batches(job.batch) * job.model.layers * element
    found = bytes_of_step(job, mesh.as_zero, element)
    return {**found, "tp": layers * of_x, "y": layers * of_y}
