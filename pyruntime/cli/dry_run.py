"""What `train --dry_run RANKS` prints: the run as it would be, without ranks and without weights."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from pyruntime.llama.config import LlamaConfig
from pyruntime.pipeline import Costs, simulate
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.measured import PROCESS_BYTES
from pyruntime.plan.memory import SAFE, Memory, memory_of_rank, parameters_of_rank
from pyruntime.plan.pipelines import last_stage_rank
from pyruntime.text import columns
from pyruntime.train import dry_run
from pyruntime.train.config import (
    RunConfig,
    meets_every_step,
    micro_batches,
    replicas,
    tokens_per_step,
    tp_axes,
    warmup_steps,
    with_pieces,
    with_steps,
)
from pyruntime.train.pipelined import layers_of_stages, resolved, schedule_of
from pyruntime.train.planned import planned, trainer_rules

GB = 1e9
MOST_ACTIONS = 20_000
"""Of a pipeline's schedule that is simulated to tell its bubble; a larger one takes seconds."""
COMPUTED_AGAIN = {
    "none": "",
    "selective": ", norms and SwiGLU computed again in the backward pass",
    "full": ", layers computed again in the backward pass",
}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes that the fullest rank of a run holds."""

    memory: Memory
    """In a step."""
    start: float
    """While the model is made."""

    @property
    def total(self) -> float:
        return max(self.memory.total, self.start)


def estimate(config: RunConfig, shape: LlamaConfig, ranks: int) -> Estimate:
    """By the planner's formulas; of CPU ranks unless train.device is cuda. What replicas that seldom meet
    keep is counted for CO2 alone."""
    config = _settled(config, shape)
    job, mesh = planned(config, shape, ranks, Cluster.of_ranks(ranks))
    rules = trainer_rules(config)
    process = job.cluster.process_bytes if config.train.device == "cuda" else PROCESS_BYTES
    held = _layers_of_ranks(config, shape) if mesh.pp > 1 else [shape.num_hidden_layers]
    of_ranks = [memory_of_rank(job, mesh, rank, rules, process, layers) for rank, layers in enumerate(held)]
    # Weights stand whole while the model is made, and beside them what ZeRO 3 leaves a rank of them.
    last, cut = last_stage_rank(mesh), mesh.tp * mesh.x * mesh.y
    parameters = max(
        sum(parameters_of_rank(job.model, cut, layers, rank == 0, rank == last))
        for rank, layers in enumerate(held)
    )
    shards = mesh.z * (mesh.shard if mesh.zero == 3 else 1)
    start = rules.weight * parameters * (1 + 1 / shards if shards > 1 else 1) + process
    return Estimate(max(of_ranks, key=lambda each: each.total), start)


def report(config: RunConfig, ranks: int) -> str:
    """Mesh, shapes, memory and schedule, for people. Raises ConfigError, as the run would."""
    shape = dry_run.check(config, ranks)
    config = _settled(config, shape)
    parts = [
        _heading(config, shape, ranks),
        _shapes(config, shape, ranks),
        _memory(config, estimate(config, shape, ranks)),
    ]
    if config.parallel.pp > 1:
        parts.append(_pipeline(config, shape))
    return "\n\n".join([*parts, "Nothing was started."])


def _settled(config: RunConfig, shape: LlamaConfig) -> RunConfig:
    """With what stands for something else written out: tokens as steps, z as ZeRO 3, a file of costs."""
    return resolved(with_steps(with_pieces(config)), shape)


def _heading(config: RunConfig, shape: LlamaConfig, ranks: int) -> str:
    train, parallel, optimizer = config.train, config.parallel, config.optimizer
    tp, tp_y = tp_axes(parallel, ranks)
    axes = {"tp": tp, **({"tp_y": tp_y} if tp_y > 1 else {})}
    axes |= {"cp": parallel.cp, "pp": parallel.pp, "dp": parallel.dp}
    sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
    cut = f" at zero {parallel.zero}" if parallel.dp * parallel.cp > 1 else ""
    if replicas(config) > 1:
        cut += f" in {replicas(config)} replicas"
    if not meets_every_step(config):
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
            f"mesh      {sizes}{cut} on {ranks} rank(s), device {train.device}",
            f"step      steps of {tokens_per_step(config):,} tokens, {train.batch_size} sequences of "
            f"{train.seq_len}: on a rank {micro_batches(config)} micro-batch(es) of "
            f"{train.micro_batch_size}{again}",
            f"schedule  {train.steps:,} steps by {optimizer.name}; learning rate up to {optimizer.lr:.3g} "
            f"over {warmup_steps(optimizer, train.steps):,} steps, then {falls}; validated {validated}; "
            f"saved {saved}",
        ]
    )


def _shapes(config: RunConfig, shape: LlamaConfig, ranks: int) -> str:
    """Of what one rank holds of a layer's weights before ZeRO cuts them, and of activations of a micro-batch;
    of what does not divide, the largest."""
    train, cp = config.train, config.parallel.cp
    x, y = tp_axes(config.parallel, ranks)
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


def _memory(config: RunConfig, found: Estimate) -> str:
    parts = ", ".join(f"{name} {value / GB:.3g}" for name, value in vars(found.memory).items() if value)
    device = "a GPU" if config.train.device == "cuda" else "a rank on CPUs"
    start = f" ({found.start / GB:.3g} while the model is made)" if found.start > found.memory.total else ""
    uncounted = not meets_every_step(config) and config.data_parallel.method != "co2"
    without = f"; what {config.data_parallel.method} keeps besides is not counted" if uncounted else ""
    return (
        f"memory    {found.total / GB:.3g} GB{start} for {device} of the fullest stage, by the planner's "
        f"formulas{without}: it wants {found.total / SAFE / GB:.3g} GB, {1 - SAFE:.0%} of it unused\n"
        f"          GB in a step: {parts}"
    )


def _layers_of_ranks(config: RunConfig, shape: LlamaConfig) -> list[int]:
    """Layers that each rank of the pipeline holds."""
    runs, schedule = layers_of_stages(config, shape), schedule_of(config)
    return [sum(len(runs[stage]) for stage in schedule.stages_of(rank)) for rank in range(schedule.ranks)]


def _pipeline(config: RunConfig, shape: LlamaConfig) -> str:
    runs, schedule = layers_of_stages(config, shape), schedule_of(config)
    stages = "; ".join(
        f"{rank}: {_words([runs[stage] for stage in schedule.stages_of(rank)])}"
        for rank in range(schedule.ranks)
    )
    found = (
        f"pipeline  {schedule.kind}: {schedule.stages} stages on {schedule.ranks} ranks, "
        f"{schedule.micro_batches} micro-batches, {schedule.slices} slice(s)\n"
        f"          layers of the ranks: {stages}"
    )
    if sum(map(len, schedule.actions)) > MOST_ACTIONS:
        return found
    timeline = simulate(schedule, Costs())
    bubble = max(timeline.bubble(rank) for rank in range(schedule.ranks)) / timeline.makespan
    return f"{found}\n          {bubble:.1%} of a step is bubble where all stages take alike"


def _words(runs: Sequence[range]) -> str:
    """Of layers, as 0-3 and 8-11; runs that follow each other are one."""
    numbers = sorted(itertools.chain(*runs))
    groups = itertools.groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
    ends = [[number for _, number in group] for _, group in groups]
    return " and ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)
