"""What a search found, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from pyruntime.plan.mesh import Job
from pyruntime.plan.search import Candidate, Result, gpu_hours, pareto

GB = 1e9
Refusal = Callable[[Candidate], str | None]


def table(result: Result, shown: Sequence[Candidate], refusal: Refusal, tokens: float) -> str:
    """Candidates as lines with a number, by which they can be explained."""
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
            "runs" if refusal(each) is None else "not yet",
        ]
        for number, each in enumerate(shown, 1)
    ]
    return columns(head, rows, left=(1, 8, 10))


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Aligned: the columns `left` to the left, others to the right."""
    widths = [max(len(row[index]) for row in [head, *rows]) for index in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def mfu(job: Job, candidate: Candidate) -> float:
    """Model FLOPs over what the GPUs could have computed."""
    peak = job.cluster.peak_flops * job.gpus
    return job.model.step_flops(job.tokens, job.seq) / candidate.total / peak


def opening(result: Result, seconds: float) -> str:
    """What was asked and how many meshes there were."""
    job = result.job
    lines = [
        f"{job.model.name}: {job.model.parameters / 1e9:.1f} B parameters; {job.gpus} x {job.cluster.gpu} "
        f"({job.cluster.description})",
        f"step of {job.tokens:,} tokens: {job.batch} sequences of {job.seq}",
        f"{result.considered:,} legal meshes, {result.too_big:,} too big for "
        f"{job.cluster.memory_bytes / GB:.0f} GB; "
        f"searched in {seconds:.1f} s",
    ]
    return "\n".join(lines)


def nothing_fits(result: Result) -> str:
    """The sentence for a search without result."""
    nearest = result.nearest
    if nearest is None:
        return (
            f"There is no legal mesh of {result.job.gpus} GPUs for {result.job.batch} sequences; a batch "
            "that "
            "divides by more data-parallel ranks, or another number of GPUs, has some."
        )
    need = nearest.memory.total / GB
    return (
        f"No mesh of {result.job.gpus} GPUs fits {result.job.model.name} into 80 % of "
        f"{result.job.cluster.memory_bytes / GB:.0f} GB; the nearest, {nearest.mesh.text()}, needs "
        f"{need:.1f} GB "
        f"({nearest.verdict}); take more GPUs, or see risky ones with --risky True."
    )


def document(result: Result, shown: Sequence[Candidate], refusal: Refusal, tokens: float) -> str:
    """The search as JSON: the job, then the candidates with all parts of their time and memory, in SI
    units."""
    job = result.job

    def one(candidate: Candidate) -> dict[str, Any]:
        why = refusal(candidate)
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

    front = {each.mesh for each in pareto(result.candidates)}
    return json.dumps(
        {
            "job": dataclasses.asdict(job),
            "considered": result.considered,
            "too_big": result.too_big,
            "candidates": [one(each) for each in shown],
            "pareto": [one(each) for each in pareto(result.candidates) if each.mesh in front],
        },
        indent=2,
    )
