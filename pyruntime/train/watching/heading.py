"""The first lines that a run prints: model, device, text and steps."""

from __future__ import annotations

from pathlib import Path

import torch

from pyruntime.comm import Runtime
from pyruntime.train.data.corpus import Corpus
from pyruntime.train.device import Device
from pyruntime.train.resolved import ResolvedRun


def first_lines(run: ResolvedRun, data: Corpus, run_dir: Path, runtime: Runtime) -> str:
    config, shape = run.config, run.shape
    train = config.train
    return "\n".join(
        [
            f"model  {shape.parameter_count() / 1e6:.1f} M parameters, {train.dtype}, {_axes(run)}, "
            f"{torch.get_num_threads()} thread(s) a rank",
            f"device {Device(runtime.device, runtime.why_device).describe()}",
            *([f"links  {runtime.links.words()}"] if runtime.links is not None else []),
            *([f"lora   {adapters_in_words(run)}"] if config.lora.rank else []),
            *([f"dpo    beta {config.dpo.beta:g}"] if config.dpo.beta else []),
            f"text   {data}",
            f"steps  {train.steps} of {run.tokens_per_step:,} tokens, in micro-batches of "
            f"{train.micro_batch_size} x {train.seq_len}{_unequal(run)}",
            f"run    {run_dir}",
        ]
    )


def _unequal(run: ResolvedRun) -> str:
    """Says how many micro-batches data-parallel ranks take, if that differs."""
    counts = run.micro_batches_of
    return f", {', '.join(map(str, counts))} on the data-parallel ranks" if len(set(counts)) > 1 else ""


def adapters_in_words(run: ResolvedRun) -> str:
    """Says which adapters a run trains, and how much of the model they are."""
    lora, share = run.config.lora, run.adapters / run.shape.parameter_count()
    return (
        f"rank {lora.rank} on {', '.join(lora.targets)}: {run.adapters / 1e6:.3g} M parameters train "
        f"({share:.2%} of the model's)"
    )


def skipped_in_words(run: ResolvedRun) -> str:
    """Says which part of the layers micro-batches skip, after a comma; empty if they skip none."""
    shares, skip = run.layer_shares, run.config.pipeline.skip
    if not shares:
        return ""
    return (
        f", each micro-batch skips {skip} of {len(run.layers)} stages: on average {sum(shares):.3g} of "
        f"{len(shares)} layers train"
    )


def routed_in_words(run: ResolvedRun) -> str:
    """Says how many micro-batches the data-parallel ranks of each stage take, after a comma; empty if they
    are not routed by speed."""
    if not run.speeds:
        return ""
    pp, dp = (range(size) for size in (run.mesh.pp, run.mesh.dp))
    stages = [[str(len(run.micro_batches_at(stage, rank))) for rank in dp] for stage in pp]
    return f", {'; '.join(map(' '.join, stages))} micro-batches on the data-parallel ranks of the stages"


def _axes(run: ResolvedRun) -> str:
    config, parallel, mesh = run.config, run.config.parallel, run.mesh
    axes = f"tp={parallel.tp or mesh.tp} with sequence parallelism"
    if str(run.cuts):
        axes += f", by speed {run.cuts}"
    if parallel.tp_wire != "same":
        axes += f", rows gathered as {parallel.tp_wire}"
    if run.shape.mixture is not None and mesh.experts_over != mesh.tp:
        axes += f", ep={mesh.ep}"
    if parallel.dp > 1:
        axes += f", dp={parallel.dp} at zero {parallel.zero}"
    if config.data_parallel.compression != "none":
        what = "gradients" if run.meets_every_step else "displacements"
        axes += f", {what} by {config.data_parallel.compression}"
    if config.data_parallel.weight_wire != "same":
        axes += f", weights gathered as {config.data_parallel.weight_wire}"
    if mesh.dp_replicate > 1:
        axes += f" in {mesh.dp_replicate} replicas"
    if config.data_parallel.members:
        axes += ", one of the replicas"
    if not run.meets_every_step:
        axes += f" that meet by {config.data_parallel.method}"
    if parallel.pp > 1:
        wire = config.pipeline.wire
        rounded = "" if wire == "same" else f", activations and their gradients sent as {wire}"
        paths = skipped_in_words(run) + routed_in_words(run)
        axes += f", pp={parallel.pp} ({config.pipeline.kind}{paths}{rounded})"
    if parallel.cp > 1:
        wire = config.context.wire
        rounded = "" if wire == "same" else f", keys and values as {wire}"
        axes += f", cp={parallel.cp} ({config.context.layout}, {config.context.variant}{rounded})"
    return axes
