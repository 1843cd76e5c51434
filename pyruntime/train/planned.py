"""Translates a trainer's configuration to the planner, and reads the planner's estimate of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from pyruntime.llama.config import LlamaConfig
from pyruntime.nn.chunked_head import chunk_rows
from pyruntime.nn.sliced import MOST_GATHERED_AGAIN
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.measured import PROCESS_BYTES
from pyruntime.plan.memory import Memory, Rules, worst_memory
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import Adapters, ModelShape
from pyruntime.plan.seconds import StepSeconds
from pyruntime.plan.step import Predictor
from pyruntime.train.config import DataParallel, RunConfig

if TYPE_CHECKING:  # the planner by itself does not import the model
    from pyruntime.train.resolved import ResolvedRun

TRAINER = Rules(
    gradient=2,
    ffn_kept=1,
    heap=0.95,
    largest_gradients=2,
    logits=2,
    reduced_gradient=2,
    workspaces=True,
    outer=10,
    made_whole=True,
    head_rows=partial(chunk_rows, device_type="cpu"),
)
"""Memory rules of this trainer in bf16 on CPU ranks of one host, by resident memory. Gradients have the
weights' type. With several data-parallel ranks, sums of earlier micro-batches are fp32 and whole at every
stage (docs/explanation/data-parallel.md). `heap` was measured (docs/how-to/plan-and-tune.md)."""
DEVICE = dataclasses.replace(
    TRAINER, heap=0, peers_resident=False, head_rows=partial(chunk_rows, device_type="cuda")
)
"""Memory rules on GPUs, where torch's allocator reuses freed memory, and peers' memory does not count as a
rank's own. Derived; no GPU has been measured."""


def rules_of(cluster: Cluster) -> Rules:
    """Returns the memory rules of a bf16 run on `cluster`."""
    return DEVICE if cluster.is_of_gpus else TRAINER


def trainer_rules(config: RunConfig, cluster: Cluster | None = None) -> Rules:
    """Returns the memory rules of a run in its dtype on its device; `auto` is a GPU if `cluster` has some,
    else a CPU. fp32 weights need no master weights."""
    rules = DEVICE if _on_gpus(config, cluster) else TRAINER
    slices, selective = config.parallel.tp_slices, config.train.activation_checkpointing == "selective"
    if slices != "auto" and slices > (MOST_GATHERED_AGAIN if selective else 1):
        rules = dataclasses.replace(rules, whole_inputs=True)
    if config.train.dtype == "bf16":
        return rules
    return dataclasses.replace(
        rules, weight=4, gradient=4, optimizer=8, logits=4, reduced_gradient=4, element=4
    )


def _on_gpus(config: RunConfig, cluster: Cluster | None) -> bool:
    auto = config.train.device == "auto" and cluster is not None and cluster.is_of_gpus
    return config.train.device == "cuda" or auto


def estimate(run: ResolvedRun, cluster: Cluster | None = None) -> Memory:
    """Returns the planner's estimate of the memory of the fullest rank. Without `cluster`, ranks are on CPUs
    unless train.device is cuda. Memory for rare synchronization is counted only for CO2."""
    config = run.config
    job, mesh = planned(run, cluster or Cluster.of_ranks(run.mesh.ranks))
    known = cluster is not None or _on_gpus(config, cluster)
    process = job.cluster.process_bytes if known else PROCESS_BYTES
    return worst_memory(job, mesh, trainer_rules(config, cluster), process)


def of_llama(name: str, config: LlamaConfig, preset: str = "") -> ModelShape:
    shape = ModelShape(
        name,
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        tied=config.tie_word_embeddings,
        preset=preset,
        head_norms=config.qk_norm,
        attention_vectors=config.attention_vectors,
        norms_after=config.norms_after,
        window=config.sliding_window or 0,
        windowed=config.windowed_layers,
        latent=config.latent,
    )
    if config.mixture is None:
        return shape
    return dataclasses.replace(
        shape,
        experts=config.mixture.experts,
        per_token=config.mixture.per_token,
        expert_ffn=config.mixture.width,
        shared_ffn=config.mixture.shared_width,
        shared_gate=config.mixture.has_shared_gate,
        dense_layers=config.mixture.dense_layers,
    )


def planned(run: ResolvedRun, cluster: Cluster) -> tuple[Job, Mesh]:
    """A run as the planner's job and mesh; `settings` of `pyruntime.cli.plan_facts` is the inverse."""
    config, sizes = run.config, run.mesh
    train, parallel, pipeline = config.train, config.parallel, config.pipeline
    job = Job(
        of_llama("the run", run.shape),
        cluster,
        sizes.ranks,
        train.batch_size,
        train.seq_len,
        rounding=config.optimizer.rounding,
        optimizer=config.optimizer.name,
        offload=config.optimizer.offload,
        adapters=adapters_of(run.shape, config.lora.rank, config.lora.targets),
    )
    mesh = Mesh(
        pp=parallel.pp,
        cp=parallel.cp,
        kind=pipeline.kind,
        virtual=pipeline.virtual,
        slices=pipeline.slices,
        skip=pipeline.skip,
        micro_batch=train.micro_batch_size,
        recompute=train.activation_checkpointing,
        layers=tuple(pipeline.layers),
        ep=0 if sizes.experts_over == sizes.tp else sizes.experts_over,
        tp_share=run.cuts.largest_share(run.shape, sizes.tp) if str(run.cuts) else 0.0,
    )
    tau = _tau(config.data_parallel)
    if sizes.tp_y > 1:
        replicated = parallel.dp_replicate if parallel.zero == 3 else parallel.dp
        z = parallel.dp // replicated
        return job, dataclasses.replace(mesh, x=sizes.tp, y=sizes.tp_y, z=z, dp=replicated, zero=0)
    replicate = parallel.dp_replicate if tau else sizes.dp_replicate
    dp, zero = parallel.dp, 0 if tau else parallel.zero  # CO2 cuts nothing
    return job, dataclasses.replace(mesh, tp=sizes.tp, dp=dp, zero=zero, replicate=replicate, tau=tau)


def adapters_of(config: LlamaConfig, rank: int, targets: Iterable[str]) -> Adapters | None:
    """Returns the low-rank adapters of a model's layers; None for rank 0."""
    if rank == 0:
        return None
    shapes, targets = config.linear_shapes(), set(targets)
    hidden, ffn = config.hidden_size, config.intermediate_size
    if config.mixture is not None:  # of a shared expert; inputs of the others are never kept
        ffn = config.mixture.shared_width
    inputs = (
        ({"q_proj", "k_proj", "v_proj"}, hidden),
        ({"gate_proj", "up_proj"}, hidden),
        ({"down_proj"}, ffn),
    )
    unread = sum(width for readers, width in inputs if not readers & targets)
    asked = [(name in ("o_proj", "down_proj"), shapes[name]) for name in sorted(targets)]
    columns, rows = (tuple(shape for is_row, shape in asked if is_row == kind) for kind in (False, True))
    return Adapters(rank, columns, rows, unread)


def _tau(method: DataParallel) -> int:
    """Returns the mesh's tau: 0 if ranks synchronize in every step, or by another method than CO2; 1 if it
    will be measured."""
    if method.method != "co2":
        return 0
    return 1 if method.tau == "auto" else method.tau


def predicted(job: Job, mesh: Mesh) -> StepSeconds:
    """Predicts a step of this trainer."""
    return Predictor(job, sums_whole=TRAINER.sums_whole, head_rows=TRAINER.head_rows).step(mesh)
