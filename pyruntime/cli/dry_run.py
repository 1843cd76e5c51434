"""What `train --dry_run RANKS` prints: the run as it would be, without ranks and without weights."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pyruntime.pipeline import Costs, simulate
from pyruntime.plan.cluster import Cluster, find_cluster
from pyruntime.plan.memory import SAFE, Memory, verdict
from pyruntime.text import columns
from pyruntime.train.config import RunConfig, warmup_steps
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.planned import estimate
from pyruntime.train.resolved import ResolvedRun, check

GB = 1e9
MOST_ACTIONS = 20_000
"""Of a pipeline's schedule that is simulated to tell its bubble; a larger one takes seconds."""
COMPUTED_AGAIN = {
    "none": "",
    "selective": ", norms and SwiGLU computed again in the backward pass",
    "full": ", layers computed again in the backward pass",
}


def held(run: ResolvedRun) -> Memory:
    """Bytes that the fullest rank of a run holds, on the cluster that output.cluster names."""
    return estimate(run, _cluster(run.config))


def _cluster(config: RunConfig) -> Cluster | None:
    with refusing("output.cluster: "):
        return find_cluster(config.output.cluster) if config.output.cluster else None


def report(config: RunConfig, ranks: int) -> tuple[str, str]:
    """Mesh, shapes, memory and schedule, for people; and why it does not fit into the memory of the cluster
    that output.cluster names, empty where it does or none is named. Raises ConfigError, as the run would."""
    run = check(config, ranks)
    cluster, memory = _cluster(config), held(run)
    parts = [_heading(run), _shapes(run), _memory(run, memory, cluster)]
    if run.mesh.pp > 1:
        parts.append(_pipeline(run))
    refusal = ""
    if cluster is not None and memory.total > cluster.memory_bytes:
        refusal = (
            f"{config.output.cluster} has {cluster.memory_bytes / GB:.4g} GB a rank, and this run needs "
            f"{memory.total / GB:.3g} GB on {ranks} ranks: it does not fit. {_remedy(run, cluster)}"
        )
    return "\n\n".join([*parts, "Nothing was started."]), refusal


def _levers(run: ResolvedRun) -> Iterator[dict[str, dict[str, Any]]]:
    """Changes that take memory out of a run, the cheapest in time first, each with those before it."""
    train, parallel = run.config.train, run.config.parallel
    changes: dict[str, dict[str, Any]] = {"train": {}, "parallel": {}}
    steps: list[tuple[str, str, Any]] = []
    if parallel.dp * parallel.cp > 1:
        wanted = 3 if parallel.pp == 1 else 2
        steps += [("parallel", "zero", wanted)] if parallel.zero < wanted else []
        steps += [("parallel", "dp_replicate", 1)] if parallel.dp_replicate > 1 else []
    if train.activation_checkpointing == "none":
        steps.append(("train", "activation_checkpointing", "selective"))
    if train.activation_checkpointing != "full":
        steps.append(("train", "activation_checkpointing", "full"))
    for size in (8, 4, 2, 1):
        if size < train.micro_batch_size:
            steps.append(("train", "micro_batch_size", size))
    if run.micro_batches > 1 and parallel.pp == 1:  # no sums of earlier micro-batches are kept
        steps.append(("train", "batch_size", train.batch_size // run.micro_batches))
    for section, key, value in steps:
        yield {section: {key: value}}
    for section, key, value in steps:
        if key == "batch_size":
            value = parallel.dp * changes["train"].get("micro_batch_size", train.micro_batch_size)
        changes[section][key] = value
        yield {name: dict(keys) for name, keys in changes.items() if keys}


def _remedy(run: ResolvedRun, cluster: Cluster) -> str:
    """What would make the run fit, in a sentence."""
    for changes in _levers(run):
        other = run.config
        for section, keys in changes.items():
            other = dataclasses.replace(
                other, **{section: dataclasses.replace(getattr(other, section), **keys)}
            )
        try:
            memory = held(check(other, run.mesh.ranks))
        except ConfigError:
            continue  # the trainer does not run that
        if verdict(memory.total, cluster.memory_bytes) == "fits":
            said = " and ".join(
                f"{section}.{key}={value}" for section, keys in changes.items() for key, value in keys.items()
            )
            return f"With {said} it takes {memory.total / GB:.3g} GB and fits."
    return "Take more ranks, or let `python -m pyruntime plan` look for a mesh that fits."


def _heading(run: ResolvedRun) -> str:
    config, shape, mesh = run.config, run.shape, run.mesh
    train, parallel, optimizer = config.train, config.parallel, config.optimizer
    axes = {"tp": mesh.tp, **({"tp_y": mesh.tp_y} if mesh.tp_y > 1 else {})}
    axes |= {"cp": mesh.cp, "pp": mesh.pp, "dp": mesh.dp}
    sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
    cut = f" at zero {parallel.zero}" if parallel.dp * parallel.cp > 1 else ""
    if mesh.dp_replicate > 1:
        cut += f" in {mesh.dp_replicate} replicas"
    if not run.meets_every_step:
        cut += f" that meet by {config.data_parallel.method}"
    again = COMPUTED_AGAIN[train.activation_checkpointing]
    falls = f"{optimizer.schedule} to {optimizer.lr * optimizer.min_lr_fraction:.3g}"
    every = config.checkpoint.every_steps
    saved = f"after every {every} steps and at the end" if every else "at the end"
    validated = f"after every {train.val_every} steps and at the end" if train.val_every else "at the end"
    return "\n".join(
        [
            f"model     {shape.parameter_count() / 1e6:,.1f} M parameters in {train.dtype}: "
            f"{shape.num_hidden_layers} layers of {shape.hidden_size} features, {shape.num_attention_heads} "
            f"heads and {shape.num_key_value_heads} of keys and values, feed-forward "
            f"{shape.intermediate_size}, vocabulary {shape.vocab_size}",
            f"mesh      {sizes}{cut} on {mesh.ranks} rank(s), device {train.device}",
            f"step      steps of {run.tokens_per_step:,} tokens, {train.batch_size} sequences of "
            f"{train.seq_len}: on a rank {run.micro_batches} micro-batch(es) of "
            f"{train.micro_batch_size}{again}",
            f"schedule  {train.steps:,} steps by {optimizer.name}; learning rate up to {optimizer.lr:.3g} "
            f"over {warmup_steps(optimizer, train.steps):,} steps, then {falls}; validated {validated}; "
            f"saved {saved}",
        ]
    )


def _shapes(run: ResolvedRun) -> str:
    """Of what one rank holds of a layer's weights before ZeRO cuts them, and of activations of a micro-batch;
    of what does not divide, the largest."""
    train, shape, cp = run.config.train, run.shape, run.mesh.cp
    x, y = run.mesh.tp, run.mesh.tp_y
    tokens = train.micro_batch_size * train.seq_len // cp
    hidden, head_dim = shape.hidden_size // y, shape.head_dim
    heads, kv_heads = shape.num_attention_heads // x, shape.num_key_value_heads // x
    ffn, vocab = shape.intermediate_size // x, math.ceil(shape.vocab_size / x)
    qkv = (heads + 2 * kv_heads) * head_dim
    sequences, seq = train.micro_batch_size, train.seq_len // cp
    rows = [
        ["queries, keys, values", f"[{qkv}, {hidden}]", f"[{tokens}, {qkv}]"],
        ["attention", "", f"[{sequences}, {seq}, {heads} and {kv_heads}, {head_dim}]"],
        ["its output", f"[{hidden}, {heads * head_dim}]", f"[{math.ceil(tokens / x)}, {hidden}]"],
        ["gate and up", f"[{2 * ffn}, {hidden}]", f"[{tokens}, {2 * ffn}]"],
        ["down", f"[{hidden}, {ffn}]", f"[{math.ceil(tokens / x)}, {hidden}]"],
        ["embedding, head", f"[{vocab}, {hidden}]", f"[{tokens}, {vocab}]"],
    ]
    return columns(["shapes on a rank", "weight", "result for a micro-batch"], rows, left=(0, 1, 2))


def _memory(run: ResolvedRun, found: Memory, cluster: Cluster | None) -> str:
    config = run.config
    parts = ", ".join(
        f"{name} {value / GB:.3g}" for name, value in vars(found).items() if value and name != "start"
    )
    device = "a GPU" if config.train.device == "cuda" else "a rank on CPUs"
    start = f" ({found.start / GB:.3g} while the model is made)" if found.start > found.step else ""
    uncounted = not run.meets_every_step and config.data_parallel.method != "co2"
    without = f"; what {config.data_parallel.method} keeps besides is not counted" if uncounted else ""
    if cluster is None:
        judged = f"it wants {found.total / SAFE / GB:.3g} GB, {1 - SAFE:.0%} of it unused"
    else:
        judged = (
            f"{verdict(found.total, cluster.memory_bytes)}, as that is "
            f"{found.total / cluster.memory_bytes:.0%} of {cluster.memory_bytes / GB:.4g} GB "
            f"({config.output.cluster})"
        )
    return (
        f"memory    {found.total / GB:.3g} GB{start} for {device} of the fullest stage, by the planner's "
        f"formulas{without}: {judged}\n"
        f"          GB in a step: {parts}"
    )


def _pipeline(run: ResolvedRun) -> str:
    stages = "; ".join(f"{rank}: {_words(run.layers_of(rank))}" for rank in range(run.mesh.pp))
    count, slices = len(run.placement), len(run.slices)
    found = (
        f"pipeline  {run.config.pipeline.kind}: {count} stages on {run.mesh.pp} ranks, "
        f"{run.micro_batches} micro-batches, {slices} slice(s)\n"
        f"          layers of the ranks: {stages}"
    )
    # At least a forward and a backward of every stage; to make more than that takes long too.
    if 2 * count * run.micro_batches * slices > MOST_ACTIONS:
        return found
    if sum(map(len, run.schedule.actions)) > MOST_ACTIONS:
        return found
    timeline = simulate(run.schedule, Costs())
    bubble = max(timeline.bubble(rank) for rank in range(run.mesh.pp)) / timeline.makespan
    return f"{found}\n          {bubble:.1%} of a step is bubble where all stages take alike"


def _words(runs: Sequence[range]) -> str:
    """Of layers, as 0-3 and 8-11; runs that follow each other are one."""
    numbers = sorted(itertools.chain(*runs))
    groups = itertools.groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
    ends = [[number for _, number in group] for _, group in groups]
    return " and ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)
