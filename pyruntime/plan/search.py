"""Finds all legal meshes of a job, prunes them by memory and ranks them by predicted time."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyruntime.choices import (
    FEW_PLANNED_KINDS,
    PLANNED_KINDS,
    SLICED_KINDS,
    Overlap,
    PipelineKind,
    Recomputation,
    values,
)
from pyruntime.plan import co2
from pyruntime.plan.memory import PAPER, Memory, Rules, verdict, worst_memory
from pyruntime.plan.mesh import Job, Mesh, check_job, divisors
from pyruntime.plan.pipelines import layers_by_rank
from pyruntime.plan.seconds import StepSeconds
from pyruntime.plan.step import Predictor

MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL = (2, 3, 4)
SLICES = (2, 4)
MOST_CP = 64
MOST_MESHES = 100_000
"""Most meshes that are searched, which takes seconds; GPU counts with many divisors have more."""
SAME_TIME = 0.003
"""Relative difference of times below which they count as equal."""


@dataclass(frozen=True)
class Candidate:
    """A mesh, the memory of its fullest rank, and the time of a step."""

    mesh: Mesh
    memory: Memory
    verdict: str
    """fits, risky or does not fit; see `pyruntime.plan.memory.verdict`."""
    seconds: StepSeconds

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.seconds.total


@dataclass(frozen=True)
class SearchSpace:
    """The kinds of meshes to search."""

    axonn: bool = True
    co2: bool = True
    hybrid: bool = True
    """ZeRO inside groups of data-parallel ranks (HSDP)."""
    recompute: bool = True
    between_nodes: bool = True
    """Tensor parallelism over more GPUs than a node has."""
    expert_groups: bool = True
    """Experts over other ranks than the tensor-parallel ones."""
    kinds: tuple[PipelineKind, ...] = PLANNED_KINDS


@dataclass(frozen=True)
class Result:
    job: Job
    candidates: tuple[Candidate, ...]
    """Meshes that fit, fastest first; also risky ones with `search(risky=True)`."""
    considered: int
    """Legal meshes."""
    too_big: int
    """Legal meshes that do not fit."""
    nearest: Candidate | None
    """If nothing fits: the mesh that needs least memory."""
    left_out: tuple[str, ...] = ()
    """Kinds of meshes that were not searched because there are too many in all, in words."""


def search(
    job: Job,
    choice: SearchSpace | None = None,
    *,
    overlap: Overlap = "fused",
    rules: Rules = PAPER,
    risky: bool = False,
) -> Result:
    """Returns all legal meshes of `job` that fit, fastest first; of two with equal time the simpler one.

    risky: also return meshes between 80 and 100 % of the memory. Raises ValueError for an impossible job.
    """
    check_job(job)
    predictor = Predictor(job, overlap, sums_whole=rules.sums_whole, head_rows=rules.head_rows)
    capacity = job.cluster.memory_bytes
    every, left_out = _bounded(job, choice or SearchSpace())
    held = [(mesh, worst_memory(job, mesh, rules)) for mesh in every]
    rated = [(mesh, memory, verdict(memory.total, capacity)) for mesh, memory in held]
    wanted = ("fits", "risky") if risky else ("fits",)
    found = [candidate_of(predictor, *each) for each in rated if each[2] in wanted]
    candidates = sorted((each for each in found if each is not None), key=_rank)
    nearest = None
    if rated and not candidates:
        mesh, memory, word = min(rated, key=lambda each: each[1].total)
        nearest = Candidate(mesh, memory, word, predictor.step(mesh))
    too_big = sum(word == "does not fit" for _, _, word in rated)
    return Result(job, tuple(candidates), len(rated), too_big, nearest, left_out)


def _bounded(job: Job, choice: SearchSpace) -> tuple[list[Mesh], tuple[str, ...]]:
    """Returns at most MOST_MESHES legal meshes, and in words the kinds left out for that."""
    left_out: list[str] = []
    narrowings: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", {}),
        ("ZeRO inside groups", {"hybrid": False}),
        ("4D meshes", {"axonn": False}),
        ("pipelines but 1F1B and ZB-V", {"kinds": tuple(set(choice.kinds) & {*FEW_PLANNED_KINDS})}),
        ("CO2", {"co2": False}),
        ("tensor parallelism between nodes", {"between_nodes": False}),
        ("experts over groups of their own", {"expert_groups": False}),
    )
    for words, narrower in narrowings:
        narrowed = replace(choice, **narrower)
        if words and narrowed == choice:
            continue
        choice = narrowed
        left_out += [words] if words else []
        every = list(itertools.islice(meshes(job, choice), MOST_MESHES + 1))
        if len(every) <= MOST_MESHES:
            break
    else:
        left_out.append(f"all after the first {MOST_MESHES:,}")
    return every[:MOST_MESHES], tuple(left_out)


def candidate_of(predictor: Predictor, mesh: Mesh, memory: Memory, word: str) -> Candidate | None:
    """Returns the candidate of `mesh`. A CO2 mesh gets the least usual number of inner steps that hides its
    average; None if that would be more than the largest usual number."""
    seconds = predictor.step(mesh)
    if mesh.tau:
        step = seconds.total - seconds.dp
        least = co2.tau_min(2 * predictor.parameters(mesh), predictor.link(mesh, "dp", mesh.dp), step)
        if least > co2.TAUS[-1]:
            return None
        mesh = replace(mesh, tau=co2.usual_tau(least))
        seconds = predictor.step(mesh)
    return Candidate(mesh, memory, word, seconds)


def _rank(candidate: Candidate) -> tuple:
    # Times too close for the model to distinguish are ordered by simplicity.
    return (round(math.log(candidate.total) / SAME_TIME), complexity(candidate.mesh), candidate.total)


def complexity(mesh: Mesh) -> tuple[int, ...]:
    """Returns a sort key; the lesser of two meshes of equal time is simpler and preferred."""
    axes = sum(getattr(mesh, name) > 1 for name in ("tp", "cp", "pp", "dp", "x", "y", "z"))
    extras = (
        mesh.recompute != "none",
        mesh.is_axonn,
        mesh.tau > 0,
        mesh.replicate > 1,
        mesh.kind != "1f1b",
        mesh.ep > 0,
    )
    return (axes + sum(extras) + mesh.virtual, mesh.zero, mesh.pp, mesh.tp)


def meshes(job: Job, choice: SearchSpace) -> Iterator[Mesh]:
    """Yields all legal meshes: whole key/value heads on each tensor-parallel rank, whole sequences in each
    micro-batch, equal chunks for zigzag, at least one layer for each stage."""
    model = job.model
    recomputes = values(Recomputation) if choice.recompute else ("none",)
    for tp in divisors(job.gpus):
        if not model.fits_tp(tp) or (tp > job.cluster.gpus_per_node and not choice.between_nodes):
            continue
        for pp in divisors(job.gpus // tp):
            if pp > model.layers:
                continue
            for cp in divisors(job.gpus // (tp * pp)):
                if cp > MOST_CP or (cp > 1 and job.seq % (2 * cp)):
                    continue
                dp = job.gpus // (tp * pp * cp)
                for micro in MICRO_BATCHES:
                    if job.batch % (dp * micro):
                        continue
                    base = Mesh(tp=tp, cp=cp, dp=dp, pp=pp, micro_batch=micro)
                    for pipelined in _schedules(job, base, choice):
                        for recompute in recomputes:
                            for each in _sharded(replace(pipelined, recompute=recompute), choice):
                                yield from _with_experts(job, each, choice)
    if choice.axonn:
        yield from _axonn(job, recomputes)


def _schedules(job: Job, mesh: Mesh, choice: SearchSpace) -> Iterator[Mesh]:
    if mesh.pp == 1:
        yield mesh
        return
    micro_batches = mesh.micro_batches(job.batch)
    options: list[Mesh] = []
    for kind in choice.kinds:
        if kind == "interleaved":
            options += [replace(mesh, kind=kind, virtual=v) for v in VIRTUAL if micro_batches % mesh.pp == 0]
        elif kind in SLICED_KINDS:
            options += [replace(mesh, kind=kind, slices=q) for q in SLICES if mesh.cp == 1]
        else:
            options.append(replace(mesh, kind=kind))
    for each in options:
        with contextlib.suppress(ValueError):  # fewer layers than stages
            layers_by_rank(job.model, each)
            yield each


def _sharded(mesh: Mesh, choice: SearchSpace) -> Iterator[Mesh]:
    if mesh.dp * mesh.cp == 1:
        yield replace(mesh, zero=0)
        return
    for zero in (0, 1, 2, 3):
        if zero == 3 and mesh.pp > 1:
            continue  # Weights would be gathered for every micro-batch of every stage.
        yield replace(mesh, zero=zero)
        if zero and choice.hybrid:
            for replicate in divisors(mesh.dp):
                if 1 < replicate < mesh.dp:
                    yield replace(mesh, zero=zero, replicate=replicate)
    if choice.co2 and mesh.dp > 1:
        yield replace(mesh, zero=0, tau=1)


def _with_experts(job: Job, mesh: Mesh, choice: SearchSpace) -> Iterator[Mesh]:
    """Yields the mesh with experts over the tensor-parallel ranks, and over groups of their own that give
    each rank equally many."""
    yield mesh
    if not (job.model.experts and choice.expert_groups) or mesh.tau:
        return
    sharing = mesh.tp * mesh.cp * mesh.dp // mesh.replicate
    for ep in divisors(math.gcd(sharing, job.model.experts)):
        if ep != mesh.tp:
            yield replace(mesh, ep=ep)


def _axonn(job: Job, recomputes: Sequence[Recomputation]) -> Iterable[Mesh]:
    model = job.model
    for x in divisors(job.gpus):
        if model.experts or not model.fits_tp(x):  # experts have one axis
            continue
        for y in divisors(job.gpus // x):
            if model.hidden % y:
                continue
            for z in divisors(job.gpus // (x * y)):
                dp = job.gpus // (x * y * z)
                if y == 1:
                    continue  # This is Megatron's tensor parallelism, with ZeRO 3 if z is above 1.
                for micro in MICRO_BATCHES:
                    if job.batch % (dp * z * micro) == 0:
                        for recompute in recomputes:
                            yield Mesh(x=x, y=y, z=z, dp=dp, zero=0, micro_batch=micro, recompute=recompute)


def each_shape(candidates: Iterable[Candidate], wanted: Callable[[Candidate], bool]) -> Iterator[Candidate]:
    """Yields the first wanted candidate of each combination of axis sizes, in order; lazily."""
    seen = set()
    for each in candidates:
        mesh = each.mesh
        sizes = (mesh.x, mesh.y, mesh.z, mesh.tp, mesh.cp, mesh.pp, mesh.dp, mesh.tau > 0)
        if sizes not in seen and wanted(each):
            seen.add(sizes)
            yield each


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates that no other beats in both time and memory, fastest first."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (each.total, each.memory.total)):
        if not front or each.memory.total < front[-1].memory.total:
            front.append(each)
    return front


def gpu_hours(job: Job, seconds: float, tokens: float) -> float:
    """Returns the GPU hours of training on `tokens` tokens with steps of `seconds` seconds."""
    return tokens / job.tokens * seconds * job.gpus / 3600
