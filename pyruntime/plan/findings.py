"""Presents the result of a search: a table and sentences for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.search import Candidate, Result, gpu_hours, pareto
from pyruntime.text import columns

GB = 1e9
VERDICTS = {"fits": "fits", "risky": "is risky", "does not fit": "does not fit"}
Refusal = Callable[[Mesh], str | None]
"""Returns why the trainer would not run a mesh, in a sentence; None if it would."""


def table(result: Result, shown: Sequence[Candidate], refusal: Refusal, tokens: float) -> str:
    """Returns the candidates as lines, each with the number by which it can be explained."""
    job = result.job
    head = [
        "",
        "mesh",
        "step s",
        "tok/s/GPU",
        "MFU",
        "exposed",
        "bubble",
        "memory GB",
        "",
        "GPU hours",
        "trainer",
    ]
    front = {each.mesh for each in pareto(result.candidates)}
    rows = [
        [
            str(number),
            ("* " if each.mesh in front else "  ") + each.mesh.text(),
            f"{each.total:.3f}",
            f"{job.tokens / each.total / job.gpus:,.0f}",
            f"{mfu(job, each):.1%}",
            f"{each.seconds.exposed / each.total:.1%}",
            f"{each.seconds.bubble / each.total:.1%}",
            f"{each.memory.total / GB:.1f}",
            each.verdict,
            f"{gpu_hours(job, each.total, tokens):,.0f}",
            "runs" if refusal(each.mesh) is None else "not yet",
        ]
        for number, each in enumerate(shown, 1)
    ]
    return columns(head, rows, left=(1, 8, 10))


def verdict(result: Result, shown: Sequence[Candidate], refusal: Refusal) -> str:
    """Returns which line to take, and why the trainer does not run the others."""
    capacity = result.job.cluster.memory_bytes
    first, why = shown[0], refusal(shown[0].mesh)
    if why is None:
        lines = [
            f"The trainer runs line 1, {first.mesh.text()}, which {VERDICTS[first.verdict]}: "
            f"{first.memory.total / GB:.1f} of {capacity / GB:.4g} GB."
        ]
    else:
        lines = ["The trainer runs none of the meshes that fit."]
    refused: dict[str, list[str]] = {}
    for number, each in enumerate(shown, 1):
        if (sentence := refusal(each.mesh)) is not None:
            refused.setdefault(sentence, []).append(str(number))
    for sentence, numbers in refused.items():
        lines.append(f"It does not run line{'s' * (len(numbers) > 1)} {', '.join(numbers)} yet: {sentence}")
    return "\n".join(lines)


def mfu(job: Job, candidate: Candidate) -> float:
    """Returns the model's operations as a share of what the GPUs could compute at their peak."""
    peak = job.cluster.peak_flops * job.gpus
    return job.model.step_flops(job.tokens, job.seq) / candidate.total / peak


def heading(result: Result, seconds: float) -> str:
    """Returns a description of the job and the number of meshes searched."""
    job = result.job
    lines = [
        f"{job.model.name}: {job.model.parameters / 1e9:.1f} B parameters; {job.gpus} x {job.cluster.gpu} "
        f"({job.cluster.description})",
        f"step of {job.tokens:,} tokens: {job.batch} sequences of {job.seq}",
        f"{result.considered:,} legal meshes, {result.too_big:,} too big for "
        f"{job.cluster.memory_bytes / GB:.0f} GB; searched in {seconds:.1f} s",
    ]
    if result.left_out:
        lines.append(f"too many meshes for all kinds to be searched; left out: {', '.join(result.left_out)}")
    return "\n".join(lines)


def nothing_fits(result: Result) -> str:
    """Returns the sentence for a search without result."""
    nearest = result.nearest
    if nearest is None:
        return (
            f"There is no legal mesh of {result.job.gpus} GPUs for {result.job.batch} sequences; use a batch "
            "that more data-parallel ranks divide, or another number of GPUs."
        )
    need = nearest.memory.total / GB
    offload = result.job.optimizer == "adamw" and result.job.offload == "none"
    less = "use --offload states, " if offload else ""
    return (
        f"No mesh of {result.job.gpus} GPUs fits {result.job.model.name} into 80 % of "
        f"{result.job.cluster.memory_bytes / GB:.0f} GB; the nearest, {nearest.mesh.text()}, needs "
        f"{need:.1f} GB ({nearest.verdict}); {less}take more GPUs, or see risky ones with --risky True."
    )


def document(result: Result, shown: Sequence[Candidate], refusal: Refusal, tokens: float) -> str:
    """Returns the search as JSON: the job, and candidates with all parts of time and memory, in SI units."""
    job = result.job

    def one(candidate: Candidate) -> dict[str, Any]:
        why = refusal(candidate.mesh)
        return {
            "name": candidate.mesh.text(),
            "mesh": dataclasses.asdict(candidate.mesh),
            "step_seconds": candidate.total,
            "seconds": dataclasses.asdict(candidate.seconds),
            "memory_bytes": candidate.memory.total,
            "memory": dataclasses.asdict(candidate.memory),
            "verdict": candidate.verdict,
            "mfu": mfu(job, candidate),
            "gpu_hours": gpu_hours(job, candidate.total, tokens),
            "trainer": "runs" if why is None else why,
        }

    return json.dumps(
        {
            "job": dataclasses.asdict(job),
            "considered": result.considered,
            "too_big": result.too_big,
            "left_out": list(result.left_out),
            "candidates": [one(each) for each in shown],
            "pareto": [one(each) for each in pareto(result.candidates)],
        },
        indent=2,
    )
