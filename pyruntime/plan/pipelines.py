"""Costs and memory of a pipeline schedule by formula, for a search among thousands of meshes.

`pyruntime.pipeline.simulated` and `Schedule.peak_in_flight` find the same numbers on complete schedules.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import assert_never

from pyruntime.pipeline.actions import Kind
from pyruntime.pipeline.closed_forms import bubble_1f1b, bubble_interleaved, bubble_zb_h1
from pyruntime.pipeline.schedules import make_schedule
from pyruntime.pipeline.simulated import Costs, simulate
from pyruntime.pipeline.skipping import shares
from pyruntime.pipeline.split import split_layers
from pyruntime.pipeline.v_schedule import zb_v
from pyruntime.plan.mesh import Mesh
from pyruntime.plan.models import ModelShape


def in_flight(mesh: Mesh, rank: int, micro_batches: int) -> float:
    """Returns the most micro-batches whose activations rank `rank` of the pipeline holds. Unit: what all its
    stages store for one micro-batch.

    Without a pipeline 1. gpipe, terapipe: all of them. 1f1b: min(p - r, m). interleaved: min(m v, 2 (p - r -
    1) + (v - 1) p + 1) / v (arXiv 2104.04473, section 2.2). 1f1b that skips stages: at most as many. zb-h1:
    as 1f1b, and up to r more whose weight gradient waits (arXiv 2401.10241, table 2; see `deferred`). zb-v:
    p, that is 2 p halves, waiting ones included (arXiv 2405.15362). seq1f1b with q slices: min(p - r - 1 + q,
    m q) / q (arXiv 2406.03488).
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
        case "1f1b" | "interleaved":
            return min(p - r, m)
        case _:
            assert_never(mesh.kind)


def deferred(mesh: Mesh, rank: int, micro_batches: int) -> float:
    """Returns the most micro-batches of `in_flight` whose weight gradient waits. Each keeps inputs of linears
    and gradients of their outputs.

    zb-h1: r + 1, but none on rank 0, where the weight gradient is part of the backward pass. zb-v: 2 r + 1
    halves; with fewer than 2 p micro-batches, what its schedule has. Other schedules: none. Derived: counted
    in the schedules."""
    if mesh.pp == 1:
        return 0
    match mesh.kind:
        case "zb-h1":
            return min(rank + 1, micro_batches) if rank else 0
        case "zb-v" if micro_batches < 2 * mesh.pp:
            return deferred_by_zb_v(mesh.pp, micro_batches)[rank] / 2
        case "zb-v":
            return min(rank + 0.5, micro_batches)
        case "gpipe" | "1f1b" | "interleaved" | "terapipe" | "seq1f1b":
            return 0
        case _:
            assert_never(mesh.kind)


@functools.lru_cache(maxsize=1024)
def gaps_of_zb_v(ranks: int, micro_batches: int) -> float:
    """Returns the time in which a rank idles, in actions, if all actions cost the same."""
    if micro_batches >= 2 * ranks:
        return ranks - 1
    made = make_schedule("zb-v", ranks, micro_batches)
    return simulate(made, Costs()).bubble(0)


@functools.lru_cache(maxsize=1024)
def deferred_by_zb_v(ranks: int, micro_batches: int) -> list[int]:
    """Returns, for each rank, the most weight gradients of a stage that wait."""
    found = []
    for computes in zb_v(ranks, micro_batches):
        kinds = [action.kind for action in computes]
        steps = ((kind is Kind.BACKWARD_INPUT) - (kind is Kind.BACKWARD_WEIGHT) for kind in kinds)
        found.append(max(itertools.accumulate(steps)))
    return found


def bubble(
    mesh: Mesh, micro_batches: int, forward: float, backward_input: float, backward_weight: float
) -> float:
    """Returns the seconds of a step in which a rank idles. The arguments are the seconds of all its stages
    for one micro-batch.

    Uses the closed forms of pyruntime.pipeline. For zb-v, with F, I and W those of one stage (half of the
    arguments)::

        (p - 1) max(F, I, W, 2 F - I, 2 (I - W))

    With fewer than 2 p micro-batches, the gaps of its schedule replace p - 1. Derived from simulations. It is
    exact if the three cost the same and m >= 2 p. Otherwise its error is below 2 % of the work for costs up
    to 1.4 times apart, and below 15 % with fewer micro-batches. (Qi et al. state 0, which leaves out the ends
    of a step.)
    """
    p, m = mesh.pp, micro_batches
    whole = backward_input + backward_weight
    match mesh.kind:
        case "interleaved":
            return bubble_interleaved(p, mesh.virtual, forward, whole)
        case "terapipe" | "seq1f1b":
            return bubble_1f1b(p, forward / mesh.slices, whole / mesh.slices)
        case "zb-h1":
            # Weight gradients longer than the gaps that they fill do not fill more.
            fill = min(forward, backward_input, backward_weight)
            return bubble_zb_h1(p, forward, backward_input, fill if m >= p else 0.0)
        case "zb-v":
            f, i, w = forward / 2, backward_input / 2, backward_weight / 2
            return gaps_of_zb_v(p, m) * max(f, i, w, 2 * f - i, 2 * (i - w))
        case "gpipe" | "1f1b":
            return bubble_1f1b(p, forward, whole)
        case _:
            assert_never(mesh.kind)


def bubble_of_skipping(
    mesh: Mesh, micro_batches: int, forward: Sequence[float], backward: Sequence[float]
) -> float:
    """Returns the seconds of a step in which the busiest rank idles, if micro-batches skip stages: simulated,
    with the schedule that is best for these seconds of each rank's stage and a micro-batch."""
    costs = Costs([[each] for each in forward], [[each] for each in backward], [[0.0]] * mesh.pp)
    made = simulate(make_schedule(mesh.kind, mesh.pp, micro_batches, skip=mesh.skip, costs=costs), costs)
    return min(made.bubble(rank) for rank in range(mesh.pp))


def layers_by_rank(model: ModelShape, mesh: Mesh) -> tuple[int, ...]:
    """Returns the layers of each rank of the pipeline: those of the mesh, or as the trainer cuts them. The
    trainer counts the head as the number of layers that take as long as its GEMM.

    Raises ValueError for fewer layers than stages.
    """
    return _cut(model, mesh)[0]


def dense_by_rank(model: ModelShape, mesh: Mesh) -> tuple[int, ...]:
    """Returns how many of each rank's layers have no experts, though the model has. Raises ValueError for
    fewer layers than stages."""
    return _cut(model, mesh)[1]


def _cut(model: ModelShape, mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    stages_of_a_rank = 2 if mesh.kind == "zb-v" else mesh.virtual
    return _cut_layers(model, mesh.kind, mesh.pp, stages_of_a_rank, mesh.layers, mesh.skip)


@functools.lru_cache(maxsize=1024)
def _cut_layers(
    model: ModelShape, kind: str, ranks: int, stages_of_a_rank: int, chosen: tuple[int, ...], skip: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns each rank's layers, and how many of them have no experts."""
    stages = ranks * stages_of_a_rank
    # As pyruntime.llama.stage cuts them: by the weights that a token meets.
    last = model.layer_flops(1) / 2
    dense = model.dense_layers
    costs = [model.dense_flops(1) / 2 / last] * dense + [1.0] * (model.layers - dense)
    head, visited = model.head / last, shares(stages, skip)
    layers = chosen or [len(run) for run in split_layers(costs, stages, last=head, shares=visited)]
    held, without, before = [0] * ranks, [0] * ranks, 0
    for stage, count in enumerate(layers):
        rank = stage % ranks if kind != "zb-v" or stage < ranks else stages - 1 - stage
        held[rank] += count
        without[rank] += min(count, max(0, dense - before))
        before += count
    return tuple(held), tuple(without)


def last_stage_rank(mesh: Mesh) -> int:
    """Returns the rank that holds the head."""
    return 0 if mesh.kind == "zb-v" else mesh.pp - 1
