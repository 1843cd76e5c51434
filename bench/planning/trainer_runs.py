"""Runs the trainer on every mesh of a job that it supports, to compare the planner's figures with."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pyruntime.choices import Recomputation
from pyruntime.cli.plan_facts import Asked, toml
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import ModelShape
from pyruntime.plan.search import SearchSpace, meshes
from pyruntime.plan.step import Predictor

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "dim1024": ModelShape("dim1024", 4, 1024, 16, 8, 64, 2816, 8192),
    "dim512": ModelShape("dim512", 4, 512, 8, 4, 64, 1408, 2048),
    "experts": ModelShape("experts", 4, 1024, 16, 8, 64, 768, 8192, experts=16, per_token=2, expert_ffn=768),
    "tiny": ModelShape("tiny", 4, 64, 4, 4, 16, 128, 256),
}
ENDS_S = 600.0
"""Seconds after which a run is ended."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run's figures from the trainer's metrics."""

    memory_bytes: int
    """Peak resident memory of a rank."""
    step_seconds: tuple[float, ...]
    """Seconds of the steps after the first two, which also measure and allocate."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.step_seconds)


def job_of(shape: str, cluster: Cluster, ranks: int, batch: int, seq: int) -> Job:
    return Job(SHAPES[shape], cluster, ranks, batch, seq)


def runnable(
    job: Job,
    micro_batch: int,
    most: int,
    *,
    recompute: Recomputation = "none",
    grids: bool = False,
    seed: int = 0,
) -> list[Mesh]:
    """Returns the meshes of `job` that the trainer runs with that micro-batch, at most `most`, drawn by seed
    but in order. recompute: the activation checkpointing. grids: only 4D tensor parallelism, with plain
    tensor parallelism as a special case."""
    asked = Asked(job)
    found = [
        mesh
        for mesh in meshes(job, SearchSpace(axonn=grids, co2=False))
        if mesh.micro_batch == micro_batch
        and mesh.recompute == recompute
        and (not grids or job.gpus in (mesh.tp, mesh.x * mesh.y * mesh.z))
        and asked.refusal(mesh) is None
    ]
    if len(found) <= most:
        return found
    kept = set(random.Random(seed).sample(range(len(found)), most))
    return [mesh for index, mesh in enumerate(found) if index in kept]


def launcher(ranks: int, netlab: list[str] | None) -> list[str]:
    """Returns the command that starts `ranks` ranks of a module: torchrun, or bench/netlab with options."""
    if netlab is None:
        starter = ["torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    else:
        starter = ["bench.netlab", *netlab, "--", sys.executable]
    return [sys.executable, "-m", *starter, "-m"]


def run(command: list[str]) -> None:
    """Runs a command with one thread a rank. Raises RuntimeError with the end of its output if it fails."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=ENDS_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(command[-12:])} ended with {process.returncode}:\n{out[:2000]}\n...\n{out[-500:]}"
        )


def train(job: Job, mesh: Mesh, steps: int, netlab: list[str] | None = None) -> Run:
    """Trains `steps` steps on this machine. Raises RuntimeError if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        file, run_dir = Path(folder) / "run.toml", Path(folder) / "run"
        file.write_text(toml(job, mesh))
        options = {
            "train.steps": steps,
            "train.threads": 1,
            "train.val_every": 0,
            "train.val_sequences": 1,
            "optimizer.warmup_steps": 0,
            "output.sample_tokens": 0,
            "output.progress": "off",
            "output.run_dir": run_dir,
            "data.paths": Path(asyncio.__file__).parent,
        }
        flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        run([*launcher(job.gpus, netlab), "pyruntime", "train", "--config", str(file), *flags])
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Run(
        max(line["memory_bytes"] for line in lines),
        tuple(line["step_time_s"] for line in lines[min(2, len(lines) - 1) :]),
    )


def fit_flops(job: Job, seconds: float, *, sums_whole: bool = False) -> Cluster:
    """Returns the cluster of `job` with the GEMM operations/s at which a step of one rank alone takes
    `seconds`; all else, attention too, is unchanged. sums_whole: see `Predictor`."""
    cluster = job.cluster
    low, high = cluster.peak_flops / 100, cluster.peak_flops * 100
    for _ in range(60):
        middle = (low * high) ** 0.5
        attention = cluster.attention_flops / middle
        fitted = dataclasses.replace(
            cluster, peak_flops=middle, efficiency=1.0, attention_efficiency=attention
        )
        took = (
            Predictor(dataclasses.replace(job, cluster=fitted), sums_whole=sums_whole)
            .step(Mesh(zero=0))
            .total
        )
        low, high = (middle, high) if took > seconds else (low, middle)
    return fitted
