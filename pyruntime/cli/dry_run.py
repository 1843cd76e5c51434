"""Writes the report of `train --dry_run RANKS`: the planned run, without starting ranks or making weights."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pyruntime.llama.config import LlamaConfig
from pyruntime.pipeline import Costs, simulate
from pyruntime.pipeline.routing import costs_of_replicas
from pyruntime.plan.cluster import Cluster, find_cluster
from pyruntime.plan.memory import SAFE, Memory, verdict
from pyruntime.text import columns
from pyruntime.train.config import RunConfig, warmup_steps
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.planned import estimate
from pyruntime.train.resolved import ResolvedRun, check
from pyruntime.train.watching.heading import adapters_in_words, routed_in_words, skipped_in_words

GB = 1e9
MOST_ACTIONS = 20_000
"""Actions of the largest schedule that is simulated for its bubble; a larger one would take seconds."""
COMPUTED_AGAIN = {
    "none": "",
    "selective": ", norms and SwiGLU computed again in the backward pass",
    "full": ", layers computed again in the backward pass",
}


def held(run: ResolvedRun) -> Memory:
    """Returns the bytes of the fullest rank of a run, on the cluster that output.cluster names."""
    return estimate(run, _cluster(run.config))


def _cluster(config: RunConfig) -> Cluster | None:
    with refusing("output.cluster: "):
        return find_cluster(config.output.cluster) if config.output.cluster else None


def report(config: RunConfig, ranks: int) -> tuple[str, str]:
    """Returns mesh, shapes, memory and schedule as text, and why the run does not fit the memory of the
    cluster of output.cluster (empty: it fits, or none is named). Raises ConfigError, as the run would."""
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
    """Yields changes that reduce a run's memory: each alone, cheapest in time first, then added up."""
    train, parallel = run.config.train, run.config.parallel
    changes: dict[str, dict[str, Any]] = {"train": {}, "parallel": {}, "optimizer": {}}
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
    optimizer = run.config.optimizer
    if optimizer.offload == "none" and optimizer.name == "adamw" and run.meets_every_step:
        steps.append(("optimizer", "offload", "states"))
    if run.micro_batches > 1 and parallel.pp == 1:  # with one micro-batch no gradient sums are stored
        steps.append(("train", "batch_size", train.batch_size // run.micro_batches))
    for section, key, value in steps:
        yield {section: {key: value}}
    for section, key, value in steps:
        if key == "batch_size":
            value = parallel.dp * changes["train"].get("micro_batch_size", train.micro_batch_size)
        changes[section][key] = value
        yield {name: dict(keys) for name, keys in changes.items() if keys}


def _remedy(run: ResolvedRun, cluster: Cluster) -> str:
    """Returns a sentence with the first change that makes the run fit."""
    for changes in _levers(run):
        other = run.config
        for section, keys in changes.items():
            other = dataclasses.replace(
                other, **{section: dataclasses.replace(getattr(other, section), **keys)}
            )
        try:
            memory = held(check(other, run.mesh.ranks))
        except ConfigError:
            continue  # the trainer refuses this combination
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
    axes |= {"ep": mesh.ep} if mesh.ep else {}
    sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
    cut = f" by speed ({run.cuts})" if str(run.cuts) else ""
    cut += f" at zero {parallel.zero}" if parallel.dp * parallel.cp > 1 else ""
    if mesh.dp_replicate > 1:
        cut += f" in {mesh.dp_replicate} replicas"
    if not run.meets_every_step:
        cut += f" that meet by {config.data_parallel.method}"
    again = COMPUTED_AGAIN[train.activation_checkpointing]
    falls = f"{optimizer.schedule} to {optimizer.lr * optimizer.min_lr_fraction:.3g}"
    every = config.checkpoint.every_steps
    saved = f"after every {every} steps and at the end" if every else "at the end"
    validated = f"after every {train.val_every} steps and at the end" if train.val_every else "at the end"
    adapters = [f"lora      {adapters_in_words(run)}"] if config.lora.rank else []
    if config.dpo.beta:
        adapters.append(f"dpo       beta {config.dpo.beta:g}; the reference is a file, no second model")
    return "\n".join(
        [
            f"model     {shape.parameter_count() / 1e6:,.1f} M parameters in {train.dtype}: "
            f"{shape.num_hidden_layers} layers of {shape.hidden_size} features, {shape.num_attention_heads} "
            f"heads{_keys(shape)}{_window(shape)}, "
            f"{_feed_forward(shape)}, "
            f"vocabulary {shape.vocab_size}",
            *adapters,
            f"mesh      {sizes}{cut} on {mesh.ranks} rank(s), device {train.device}",
            f"step      steps of {run.tokens_per_step:,} tokens, {train.batch_size} sequences of "
            f"{train.seq_len}: on a rank {run.micro_batches} micro-batch(es) of "
            f"{train.micro_batch_size}{again}",
            f"schedule  {train.steps:,} steps by {optimizer.name}; learning rate up to {optimizer.lr:.3g} "
            f"over {warmup_steps(optimizer, train.steps):,} steps, then {falls}; validated {validated}; "
            f"saved {saved}",
        ]
    )


def _keys(shape: LlamaConfig) -> str:
    if shape.latent is None:
        return f" and {shape.num_key_value_heads} of keys and values"
    return f" of {shape.latent.features} latent features"


def _window(shape: LlamaConfig) -> str:
    if shape.sliding_window is None:
        return ""
    count = shape.windowed_layers
    layers = "all" if count == shape.num_hidden_layers else f"{count} of them"
    return f", {layers} with a window of {shape.sliding_window} tokens"


def _feed_forward(shape: LlamaConfig) -> str:
    mixture = shape.mixture
    if mixture is None:
        return f"feed-forward {shape.intermediate_size}"
    shared = f" and a shared one of {mixture.shared_width}" if mixture.shared_width else ""
    dense = f" after {mixture.dense_layers} with feed-forward {shape.intermediate_size}"
    dense = dense if mixture.dense_layers else ""
    return (
        f"{mixture.experts} experts of {mixture.width}{shared}{dense}, of which "
        f"a token uses {mixture.per_token} ({shape.active_parameter_count() / 1e6:,.1f} M parameters)"
    )


def _shapes(run: ResolvedRun) -> str:
    """Returns the shapes of one rank's weights before ZeRO cuts them, and of its activations for a
    micro-batch. Where a size does not divide, the largest rank's is shown."""
    train, shape, cp = run.config.train, run.shape, run.mesh.cp
    x, y = run.mesh.tp, run.mesh.tp_y
    tokens = train.micro_batch_size * train.seq_len // cp
    hidden, head_dim = shape.hidden_size // y, shape.head_dim
    kv_heads = max(run.cuts.groups_of(shape, x))
    heads = kv_heads * shape.num_attention_heads // shape.num_key_value_heads
    vocab = max(run.cuts.vocabulary, default=math.ceil(shape.vocab_size / x))
    sequences, seq = train.micro_batch_size, train.seq_len // cp
    rows = [
        *_heads(shape, x, kv_heads, hidden, tokens),
        ["attention", "", f"[{sequences}, {seq}, {heads} and {kv_heads}, {head_dim}]"],
        ["its output", f"[{hidden}, {heads * shape.value_dim}]", f"[{math.ceil(tokens / x)}, {hidden}]"],
        *_network(run, hidden, tokens),
        ["embedding, head", f"[{vocab}, {hidden}]", f"[{tokens}, {vocab}]"],
    ]
    return columns(["shapes on a rank", "weight", "result for a micro-batch"], rows, left=(0, 1, 2))


def _heads(shape: LlamaConfig, x: int, kv_heads: int, hidden: int, tokens: int) -> list[list[str]]:
    """Returns the rows about the linears of queries, keys and values. kv_heads: of this rank."""
    if shape.latent is None:
        of_group = shape.num_attention_heads // shape.num_key_value_heads + 2
        qkv = kv_heads * of_group * shape.head_dim
        return [["queries, keys, values", f"[{qkv}, {hidden}]", f"[{tokens}, {qkv}]"]]
    queries, keys, (features, _) = shape.latent.shapes(hidden, shape.num_attention_heads)
    return [
        ["latent features", f"[{features}, {hidden}]", f"[{math.ceil(tokens / x)}, {features}]"],
        *(
            [name, f"[{out // x}, {into}]", f"[{tokens}, {out // x}]"]
            for name, (out, into) in (("queries", queries), ("keys and values", keys))
        ),
    ]


def _network(run: ResolvedRun, hidden: int, tokens: int) -> list[list[str]]:
    """Returns the rows about feed-forward networks and experts. Of an expert's rows the mean is shown."""
    shape, x, ep = run.shape, run.mesh.tp, run.mesh.experts_over
    own, rows, mixture = math.ceil(tokens / x), [], shape.mixture
    networks = [("", shape.intermediate_size)] if shape.has_dense_layers else []
    if mixture is not None and mixture.shared_width:
        networks.append((" of the shared expert", mixture.shared_width))
    for name, width in networks:
        ffn = max(run.cuts.features, default=width // x)
        rows.append([f"gate and up{name}", f"[{2 * ffn}, {hidden}]", f"[{tokens}, {2 * ffn}]"])
        rows.append([f"down{name}", f"[{hidden}, {ffn}]", f"[{own}, {hidden}]"])
    if mixture is not None:
        held, width = math.ceil(mixture.experts / ep), mixture.width
        routed = math.ceil(tokens * mixture.per_token / x)
        rows.append(["router", f"[{mixture.experts}, {hidden}]", f"[{own}, {mixture.experts}]"])
        rows.append(["experts' gate and up", f"[{held}, {2 * width}, {hidden}]", f"[{routed}, {2 * width}]"])
        rows.append(["experts' down", f"[{held}, {hidden}, {width}]", f"[{own}, {hidden}]"])
    return rows


def _memory(run: ResolvedRun, found: Memory, cluster: Cluster | None) -> str:
    config = run.config
    parts = ", ".join(
        f"{name} {value / GB:.3g}" for name, value in vars(found).items() if value and name != "start"
    )
    device = "a GPU" if config.train.device == "cuda" else "a rank on CPUs"
    start = f" ({found.start / GB:.3g} while the model is made)" if found.start > found.step else ""
    uncounted = not run.meets_every_step and config.data_parallel.method != "co2"
    without = f"; the states of {config.data_parallel.method} are not counted" if uncounted else ""
    if run.speeds:
        without += "; micro-batches that pipeline.speeds stores beyond those of 1f1b are not counted"
    if cluster is None:
        judged = f"plan for {found.total / SAFE / GB:.3g} GB, to leave {1 - SAFE:.0%} free"
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
        f"{run.micro_batches} micro-batches, {slices} slice(s){skipped_in_words(run)}{routed_in_words(run)}\n"
        f"          layers of the ranks: {stages}"
    )
    # A lower bound of the actions, because making a larger schedule also takes long.
    columns = run.mesh.dp if run.speeds else 1
    if 2 * count * columns * run.micro_batches * slices > MOST_ACTIONS:
        return found
    if sum(map(len, run.schedule.actions)) > MOST_ACTIONS:
        return found
    by_costs = run.config.pipeline.skip > 0 or bool(run.speeds)
    costs = run.stage_costs if by_costs else Costs()
    timeline = simulate(run.schedule, costs_of_replicas(costs, run.speeds) if run.speeds else costs)
    bubble = max(timeline.bubble(rank) for rank in range(run.schedule.ranks)) / timeline.makespan
    assumed = "all stages take equally long"
    if by_costs:
        assumed = "GEMMs of layers and head are all that takes time"
    return f"{found}\n          {bubble:.1%} of a step is bubble if {assumed}"


def _words(runs: Sequence[range]) -> str:
    """Returns layer numbers as "0-3 and 8-11"; adjacent runs are joined."""
    numbers = sorted(itertools.chain(*runs))
    groups = itertools.groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
    ends = [[number for _, number in group] for _, group in groups]
    return " and ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)
