"""Explains one candidate: its time and memory by part, and advice."""

from __future__ import annotations

from dataclasses import replace

from pyruntime.choices import LESS_BUBBLE
from pyruntime.plan.findings import GB, Refusal, mfu
from pyruntime.plan.memory import memory_of_rank
from pyruntime.plan.mesh import Mesh
from pyruntime.plan.overlap import advice, threshold
from pyruntime.plan.pipelines import in_flight, layers_by_rank
from pyruntime.plan.search import Candidate
from pyruntime.plan.step import Predictor
from pyruntime.text import columns

NAMES = {
    "compute": "GEMMs, attention, norms of the slowest stage",
    "recompute": "recomputation in backward passes",
    "tp": "exposed: tensor parallelism (AxoNN: sums over x and y)",
    "cp": "exposed: keys and values round the ring",
    "ep": "exposed: rows and counts of experts on GPUs",
    "pp": "exposed: first and last messages between stages",
    "z": "exposed: AxoNN's weights over z",
    "dp": "exposed: gradients and weights over data-parallel ranks",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
}


def explain(predictor: Predictor, candidate: Candidate, refusal: Refusal) -> str:
    """Returns sections of text: time, linears, memory, pipeline, advice, and whether the trainer runs it."""
    parts = [_time(predictor, candidate), _linears(predictor, candidate.mesh), _memory(predictor, candidate)]
    parts += [_pipeline(predictor, candidate.mesh), "\n".join(sentences(predictor, candidate))]
    why = refusal(candidate.mesh)
    parts.append("The trainer runs it." if why is None else f"The trainer does not run it: {why}")
    return "\n\n".join(part for part in parts if part)


def _time(predictor: Predictor, candidate: Candidate) -> str:
    total = candidate.total
    rows = [
        [NAMES[name], f"{value:.3f}", f"{value / total:.1%}"]
        for name, value in vars(candidate.seconds).items()
        if value
    ]
    rows.append(["step", f"{total:.3f}", f"MFU {mfu(predictor.job, candidate):.1%}"])
    return f"{candidate.mesh.text()}\n\n" + columns(["time", "s", ""], rows)


def _linears(predictor: Predictor, mesh: Mesh) -> str:
    layer = predictor.layer(mesh)
    if mesh.tp == 1 or not layer.linears:
        return ""
    over = predictor.link(mesh, "tp", mesh.tp)
    wanted = threshold(mesh.tp, predictor.job.cluster.flops, over.bandwidth)
    rows = [
        [
            each.linear.name,
            f"{each.linear.deciding:,}",
            f"{each.compute * 1e3:.3f}",
            f"{each.transfer * 1e3:.3f}",
            f"{each.forward * 1e3:.3f}",
            f"{each.backward * 1e3:.3f}",
            "by itself" if each.linear.deciding >= wanted else "not by itself",
        ]
        for each in layer.linears
    ]
    head = ["linear, ms a micro-batch", "features", "GEMM", "transfer", "exposed", "backward", "hides"]
    return columns(head, rows) + f"\nhides from {wanted:,.0f} features on: (P - 1) F / B"


def _memory(predictor: Predictor, candidate: Candidate) -> str:
    capacity = predictor.job.cluster.memory_bytes
    rows = [
        [name, f"{value / GB:.2f}", f"{value / capacity:.1%}"]
        for name, value in vars(replace(candidate.memory, start=0.0)).items()
        if value
    ]
    total = candidate.memory.total
    if total > candidate.memory.step:
        rows.append(["(while the model is made)", f"{total / GB:.2f}", f"{total / capacity:.1%}"])
    rows.append([f"all: {candidate.verdict}", f"{total / GB:.2f}", f"{total / capacity:.1%}"])
    return columns(["memory of the fullest rank", "GB", f"of {capacity / GB:.0f} GB"], rows)


def _pipeline(predictor: Predictor, mesh: Mesh) -> str:
    if mesh.pp == 1:
        return ""
    micro_batches = mesh.micro_batches(predictor.job.batch)
    layers = layers_by_rank(predictor.job.model, mesh)
    held = in_flight(mesh, 0, micro_batches)
    shown = " ".join(map(str, layers))
    return (
        f"pipeline: {mesh.kind}, {micro_batches} micro-batches; layers of the ranks {shown}; the first holds "
        f"{held:g} micro-batches"
    )


def _offloading(predictor: Predictor, candidate: Candidate) -> str:
    """Says whether this mesh should keep its optimizer states elsewhere, and what hides them there."""
    job, mesh = predictor.job, candidate.mesh
    resident = memory_of_rank(replace(job, offload="none"), mesh, 0).optimizer
    backward = 2 / 3 * candidate.seconds.compute / mesh.micro_batches(job.batch)
    hidden = (
        f"they are read and written once in a step, hidden behind the last backward pass of {backward:.3g} s "
        f"if the host's memory takes {resident / backward / GB:.1f} GB/s each way"
        if mesh.shard > 1
        else "they are read and written once in a step, after the backward pass"
    )
    if job.offload == "states":
        return f"{resident / GB:.1f} GB of optimizer states lie elsewhere: {hidden}"
    if candidate.verdict == "fits":
        return (
            f"it fits with its optimizer states of {resident / GB:.1f} GB, so --offload states gains nothing"
        )
    return f"--offload states would free {resident / GB:.1f} GB: {hidden}"


def sentences(predictor: Predictor, candidate: Candidate) -> list[str]:
    """Returns advice, one sentence for each item."""
    job, mesh, seconds = predictor.job, candidate.mesh, candidate.seconds
    found = advice(job, mesh, predictor.link(mesh, "tp", mesh.tp))
    if seconds.bubble > 0.1 * candidate.total:
        found.append(
            f"{seconds.bubble / candidate.total:.0%} of the step is bubble: use more micro-batches, "
            f"fewer stages, or one of {', '.join(LESS_BUBBLE)}"
        )
    if seconds.dp > 0.05 * candidate.total and not mesh.tau:
        found.append(
            "the backward pass does not hide the gradients: use more micro-batches a step, hybrid sharding "
            "inside fast groups" + ("" if job.cluster.is_of_gpus else ", or CO2")
        )
    if mesh.tau:
        found.append(
            f"CO2 averages parameters once in {mesh.tau} steps: it is another algorithm, so check its loss"
        )
    if candidate.verdict == "risky":
        found.append(
            "it needs 80 to 100 % of the memory: some such runs ran out of memory (arXiv 2411.06465)"
        )
    if job.optimizer == "adamw" and not mesh.tau:
        found.append(_offloading(predictor, candidate))
    return [f"- {sentence}" for sentence in found]
