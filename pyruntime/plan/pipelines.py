"""What a pipeline schedule costs and holds, by formula: for searching among thousands of meshes.

`pyruntime.pipeline.simulate` and `Schedule.peak_in_flight` find the same on schedules that have been made.
"""

from __future__ import annotations

import functools
import itertools

from pyruntime.choices import ZERO_BUBBLE
from pyruntime.pipeline.actions import Kind
from pyruntime.pipeline.closed_forms import bubble_1f1b, bubble_interleaved, bubble_zb_h1
from pyruntime.pipeline.schedules import make_schedule
from pyruntime.pipeline.simulate import Costs, simulate
from pyruntime.pipeline.split import split_layers
from pyruntime.pipeline.v_schedule import zb_v
from pyruntime.plan.mesh import Mesh
from pyruntime.plan.models import ModelShape


def in_flight(mesh: Mesh, rank: int, micro_batches: int) -> float:
    """Most micro-batches whose activations rank `rank` of the pipeline holds, in units of what all its stages
    store for one micro-batch.

    Without a pipeline 1. gpipe, terapipe: all of them. 1f1b: min(p - r, m); interleaved: min(m v, 2 (p - r -
    1) + (v - 1) p + 1) / v (arXiv 2104.04473, section 2.2). zb-h1: as 1f1b, and up to r more whose weights'
    gradient waits (arXiv 2401.10241, table 2; see `deferred`). zb-v: p, that is 2 p halves, those included
    (arXiv 2405.15362). seq1f1b: with q slices min(p - r - 1 + q, m q) / q (arXiv 2406.03488).
    """
    p, r, m, v, q = mesh.pp, rank, micro_batches, mesh.virtual, mesh.slices
    if p == 1:
        return 1
    match mesh.kind:
        case "gpipe" | "terapipe":
            return m
        case "interleaved" if v > 1:
            return min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) / v
        case "zb-h1" | "zb-v":
            return min(p, m)
        case "seq1f1b":
            return min(p - r - 1 + q, m * q) / q
    return min(p - r, m)


def deferred(mesh: Mesh, rank: int, micro_batches: int) -> float:
    """Of those, the most whose weights' gradient waits: what is kept of them is inputs of linears and the
    gradients of their outputs. zb-h1: r + 1; zb-v: 2 r + 1 halves, and with fewer than 2 p micro-batches what
    its schedule has; none where the weights' gradient is a part of the backward pass, as on rank 0 of
    zb-h1. Derived: counted in the schedules."""
    kind = mesh.kind
    if mesh.pp == 1 or kind not in ZERO_BUBBLE or (kind == "zb-h1" and rank == 0):
        return 0
    if kind == "zb-v" and micro_batches < 2 * mesh.pp:
        return deferred_by_zb_v(mesh.pp, micro_batches)[rank] / 2
    return min(rank + (1 if kind == "zb-h1" else 0.5), micro_batches)


@functools.lru_cache(maxsize=1024)
def gaps_of_zb_v(ranks: int, micro_batches: int) -> float:
    """Actions' time in which a rank idles where all cost the same."""
    if micro_batches >= 2 * ranks:
        return ranks - 1
    made = make_schedule("zb-v", ranks, micro_batches)
    return simulate(made, Costs()).bubble(0)


@functools.lru_cache(maxsize=1024)
def deferred_by_zb_v(ranks: int, micro_batches: int) -> list[int]:
    """Most weight gradients of a stage that wait on each rank."""
    found = []
    for computes in zb_v(ranks, micro_batches):
        kinds = [action.kind for action in computes]
        steps = ((kind is Kind.BACKWARD_INPUT) - (kind is Kind.BACKWARD_WEIGHT) for kind in kinds)
        found.append(max(itertools.accumulate(steps)))
    return found


def bubble(
    mesh: Mesh, micro_batches: int, forward: float, backward_input: float, backward_weight: float
) -> float:
    """Seconds of a step in which a rank idles; given are the seconds of all its stages for one micro-batch.

    The closed forms of pyruntime.pipeline, and for zb-v, with F, I and W those of a stage (half of what is
    given)::

        (p - 1) max(F, I, W, 2 F - I, 2 (I - W))

    with fewer than 2 p micro-batches the gaps of its schedule in place of p - 1.
    Derived: simulated; exact where the three cost the same and m >= 2 p. Elsewhere an estimate, of which
    the error stays below 2 % of the work for costs up to 1.4 times apart, and below 15 % with fewer
    micro-batches. (Qi et al. state 0, which leaves out the ends of a step.)
    """
    p, m = mesh.pp, micro_batches
    whole = backward_input + backward_weight
    match mesh.kind:
        case "interleaved":
            return bubble_interleaved(p, mesh.virtual, forward, whole)
        case "terapipe" | "seq1f1b":
            return bubble_1f1b(p, forward / mesh.slices, whole / mesh.slices)
        case "zb-h1":
            # Weights' gradients that are longer than what they wait for do not fill more.
            fill = min(forward, backward_input, backward_weight)
            return bubble_zb_h1(p, forward, backward_input, fill if m >= p else 0.0)
        case "zb-v":
            f, i, w = forward / 2, backward_input / 2, backward_weight / 2
            return gaps_of_zb_v(p, m) * max(f, i, w, 2 * f - i, 2 * (i - w))
    return bubble_1f1b(p, forward, whole)


def layers_by_rank(model: ModelShape, mesh: Mesh) -> tuple[int, ...]:
    """Layers that each rank of the pipeline holds, as the mesh says or cut as the trainer cuts them: the head
    counts as the layers that take as long as its GEMM.

    Raises ValueError where there are fewer layers than stages.
    """
    stages_of_a_rank = 2 if mesh.kind == "zb-v" else mesh.virtual
    return _layers_by_rank(model, mesh.kind, mesh.pp, stages_of_a_rank, mesh.layers)


@functools.lru_cache(maxsize=1024)
def _layers_by_rank(
    model: ModelShape, kind: str, ranks: int, stages_of_a_rank: int, chosen: tuple[int, ...]
) -> tuple[int, ...]:
    stages = ranks * stages_of_a_rank
    layers = chosen or [
        len(run) for run in split_layers([1.0] * model.layers, stages, last=model.head / model.layer_matrices)
    ]
    held = [0] * ranks
    for stage, count in enumerate(layers):
        held[stage % ranks if kind != "zb-v" or stage < ranks else stages - 1 - stage] += count
    return tuple(held)


def last_stage_rank(mesh: Mesh) -> int:
    """The rank that holds the head."""
    return 0 if mesh.kind == "zb-v" else mesh.pp - 1
