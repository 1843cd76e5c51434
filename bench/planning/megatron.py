"""Compares the planner with Megatron-LM's published runs and closed forms for a GPT (arXiv 2104.04473).

python -m bench.planning.megatron
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyruntime.cli.plan_facts import find_model
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.step import Predictor

SEQ, VOCAB = 2048, 51200


@dataclass(frozen=True)
class Row:
    """One line of table 1: runs on Selene, sequences of 2048 tokens, activations recomputed."""

    model: str
    tp: int
    pp: int
    gpus: int
    batch: int
    """Sequences of a step."""
    tflops: float
    """10^12 operations/s of each GPU, counted by `flops_per_step`."""


TABLE_1 = (
    Row("gpt-1.7b", 1, 1, 32, 512, 137),
    Row("gpt-3.6b", 2, 1, 64, 512, 138),
    Row("gpt-7.5b", 4, 1, 128, 512, 142),
    Row("gpt-18.4b", 8, 1, 256, 1024, 135),
    Row("gpt-39.1b", 8, 2, 512, 1536, 138),
    Row("gpt-76.1b", 8, 4, 1024, 1792, 140),
    Row("gpt-145.6b", 8, 8, 1536, 2304, 148),
    Row("gpt-310.1b", 8, 16, 1920, 2160, 155),
    Row("gpt-529.6b", 8, 35, 2520, 2520, 163),
    Row("gpt-1008b", 8, 64, 3072, 3072, 163),
)
FITTED_ON = (0, 9)
"""The rows used to fit the one constant, the share of the peak that GEMMs reach."""


def parameters(layers: int, hidden: int, vocab: int, seq: int) -> float:
    """Returns 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)): equation 2."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden))


def flops_per_step(batch: int, seq: int, layers: int, hidden: int, vocab: int) -> float:
    """Returns 96 B s l h^2 (1 + s/(6 h) + V/(16 l h)), with all activations recomputed: equation 3."""
    work = 96.0 * batch * seq * layers * hidden**2
    return work * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))


def training_seconds(tokens: float, parameters: float, gpus: int, flops: float) -> float:
    """Returns 8 T P / (n X): equation 4. flops: operations/s of each GPU."""
    return 8 * tokens * parameters / (gpus * flops)


def mesh_of(row: Row, micro_batch: int = 1) -> Mesh:
    """Returns the mesh of a row, with interleaved stages if they divide, as few a rank as possible."""
    dp = row.gpus // (row.tp * row.pp)
    layers, micro_batches = find_model(row.model).layers, row.batch // dp // micro_batch
    fits = row.pp > 1 and micro_batches % row.pp == 0
    virtual = next((v for v in (2, 3, 4) if fits and layers % (v * row.pp) == 0), 1)
    kind = "interleaved" if virtual > 1 else "1f1b"
    return Mesh(
        tp=row.tp,
        pp=row.pp,
        dp=dp,
        zero=0,
        micro_batch=micro_batch,
        recompute="full",
        kind=kind,
        virtual=virtual,
    )


def prediction(row: Row, efficiency: float) -> tuple[Mesh, float]:
    """Returns the mesh of that run with the best micro-batch (the paper searched for it, section 3.4), and
    the predicted 10^12 operations/s of each GPU. Only the pipeline's messages overlap, as in Megatron-LM
    then; attention also computes the masked half."""
    cluster = replace(find_cluster("selene"), efficiency=efficiency)
    model = find_model(row.model)
    job = Job(model, cluster, row.gpus, row.batch, SEQ, causal=False)
    predictor = Predictor(job, "none", reduce_bytes=4, regather=False)
    own = row.batch // (row.gpus // (row.tp * row.pp))
    possible = [mesh_of(row, size) for size in (1, 2, 4, 8) if own % size == 0]
    seconds, mesh = min(((predictor.step(mesh).total, mesh) for mesh in possible), key=lambda each: each[0])
    flops = flops_per_step(row.batch, SEQ, model.layers, model.hidden, VOCAB)
    return mesh, flops / seconds / row.gpus / 1e12


def predicted_tflops(row: Row, efficiency: float) -> float:
    """Returns the operations/s of `prediction`."""
    return prediction(row, efficiency)[1]


def fitted_efficiency(rows: Sequence[Row]) -> float:
    """Returns the share of the peak with which predicted over published is 1 on average over these rows."""
    low, high = 0.2, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        ratio = sum(predicted_tflops(row, middle) / row.tflops for row in rows) / len(rows)
        low, high = (low, middle) if ratio > 1 else (middle, high)
    return (low + high) / 2


def comparison() -> str:
    """Returns table 1 in Markdown, next to predictions after fitting one constant on two rows."""
    efficiency = fitted_efficiency([TABLE_1[index] for index in FITTED_ON])
    lines = [
        f"Share of the peak that GEMMs reach, fitted on rows {', '.join(str(i + 1) for i in FITTED_ON)}: "
        f"{efficiency:.3f}",
        "",
        "| model | mesh | GPUs | published TFLOP/s | predicted | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in TABLE_1:
        mesh, predicted = prediction(row, efficiency)
        lines.append(
            f"| {row.model} | {mesh.text()} | {row.gpus} | {row.tflops:.0f} | {predicted:.0f} | "
            f"{predicted / row.tflops - 1:+.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(comparison())
