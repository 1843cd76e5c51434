"""Checks how sequences are cut: over context-parallel ranks, over time in pipelines, and in causal slices."""

from __future__ import annotations

import os

from pyruntime.choices import HALVED_LAYOUTS, RING_VARIANTS
from pyruntime.train.config import Grid, MeshSizes, PipelineParallel, RunConfig, mesh_of
from pyruntime.train.errors import require


def check_context(config: RunConfig) -> None:
    cp, context, seq_len = config.parallel.cp, config.context, config.train.seq_len
    parts = 2 * cp if context.layout in HALVED_LAYOUTS and cp > 1 else cp
    require(
        seq_len % parts == 0,
        f"train.seq_len={seq_len} does not divide into the {parts} parts of the {context.layout} layout over "
        f"parallel.cp={cp}; use {-(-seq_len // parts) * parts}.",
    )
    if context.wire != "same":
        require(cp > 1, f"context.wire={context.wire} without context-parallel ranks; set parallel.cp.")
        require(
            context.variant in RING_VARIANTS,
            f"context.wire={context.wire} applies to the ring, and context.variant={context.variant}; leave "
            "one of them out.",
        )


def check_pipeline(config: RunConfig) -> None:
    pp, pipeline = config.parallel.pp, config.pipeline
    require(
        pipeline.slices >= 1 or (pipeline.slices == 0 and bool(pipeline.costs)),
        f"pipeline.slices must be at least 1, or 0 with pipeline.costs, found {pipeline.slices}.",
    )
    require(
        not pipeline.costs or os.path.isfile(pipeline.costs),
        f"pipeline.costs: {pipeline.costs} is not a file; `python -m pyruntime profile --json` writes one.",
    )
    tokens = pipeline.slice_tokens
    require(
        not tokens
        or (len(tokens) == pipeline.slices and min(tokens) >= 1 and sum(tokens) == config.train.seq_len),
        f"pipeline.slice_tokens={list(tokens)} must be pipeline.slices={pipeline.slices} numbers of at least "
        f"1 with a sum of train.seq_len={config.train.seq_len}.",
    )
    for name in ("costs", "virtual", "slices", "layers", "skip", "speeds", "wire"):
        value = getattr(pipeline, name)
        shown = list(value) if isinstance(value, tuple) else value
        without = pp > 1 or value == getattr(PipelineParallel, name)
        require(without, f"pipeline.{name}={shown} without a pipeline; set parallel.pp.")
    tokens_of_rank = config.train.seq_len // config.parallel.cp
    require(
        pipeline.slices <= tokens_of_rank,
        f"pipeline.slices={pipeline.slices} is more than a rank's {tokens_of_rank} tokens of a sequence; use "
        "fewer.",
    )
    if pipeline.slices != 1 and config.parallel.cp > 1:
        _check_pipeline_slices_of_context(config)


def _check_pipeline_slices_of_context(config: RunConfig) -> None:
    """Requires that every slice has as many tokens of each context-parallel rank."""
    pipeline, cp, layout = config.pipeline, config.parallel.cp, config.context.layout
    require(
        pipeline.slices > 0,
        f"pipeline.slices=0 takes the slices of pipeline.costs, which cut whole sequences, but "
        f"parallel.cp={cp}; set pipeline.slices to their number.",
    )
    require(
        all(tokens % cp == 0 for tokens in pipeline.slice_tokens),
        f"pipeline.slice_tokens={list(pipeline.slice_tokens)} are shared by parallel.cp={cp} ranks; use "
        f"multiples of {cp}.",
    )
    halves = layout == "zigzag" and pipeline.slices == 2 and len(set(pipeline.slice_tokens)) <= 1
    require(
        layout == "striped" or halves,
        f"pipeline.slices={pipeline.slices} with parallel.cp={cp}: context.layout={layout} cuts sequences "
        f"into {'2 equal' if layout == 'zigzag' else 'no'} slices that follow each other on every rank; use "
        "context.layout=striped.",
    )


def why_no_slices(config: RunConfig, mesh: MeshSizes) -> str:
    """Says which option forbids causal slices on a mesh; empty: none."""
    if mesh.tp == mesh.experts_over == 1:
        return "parallel.tp=1, where no rows are sent but those of experts over parallel.ep"
    if isinstance(config.parallel.tp, Grid):
        return f"parallel.tp={config.parallel.tp}, whose y cuts features"
    if config.parallel.zero == 3 and config.parallel.dp * config.parallel.cp > 1:
        return "parallel.zero=3, which gathers weights for one layer at a time"
    if config.pipeline.slices != 1:
        return f"pipeline.slices={config.pipeline.slices}, which also cuts sequences"
    return ""


def check_slices(config: RunConfig, world_size: int) -> None:
    parallel, mesh = config.parallel, mesh_of(config, world_size)
    why = why_no_slices(config, mesh) if parallel.tp_slices not in ("auto", 1) else ""
    require(
        not why,
        f"parallel.tp_slices={parallel.tp_slices} cannot be combined with {why}; leave one of them out.",
    )
    if parallel.cp > 1 and parallel.tp_slices != "auto" and parallel.tp_slices > 1:
        _check_slices_of_context(config, parallel.tp_slices, mesh.tp)


def _check_slices_of_context(config: RunConfig, slices: int, tp: int) -> None:
    """Requires that every slice has as many tokens of each context-parallel rank."""
    cp, layout, seq_len = config.parallel.cp, config.context.layout, config.train.seq_len
    most = {"striped": slices, "zigzag": 2, "contiguous": 1, "placed": 1}[layout]
    require(
        slices <= most,
        f"parallel.tp_slices={slices} with parallel.cp={cp}: context.layout={layout} cuts sequences into at "
        f"most {most}; use context.layout=striped, or parallel.tp_slices={most}.",
    )
    unit = 2 * cp * tp if layout == "zigzag" else 1
    require(
        seq_len % unit == 0,
        f"train.seq_len={seq_len} does not divide into 2 slices of the zigzag layout over parallel.cp={cp} "
        f"times {tp} tensor-parallel ranks; use {-(-seq_len // unit) * unit}, or context.layout=striped.",
    )


def check_tp_wire(config: RunConfig, world_size: int) -> None:
    """Requires several tensor-parallel ranks for rows rounded for gathering."""
    wire = config.parallel.tp_wire
    if wire == "same":
        return
    tp = mesh_of(config, world_size).tp
    require(
        tp > 1,
        f"parallel.tp_wire={wire} needs several tensor-parallel ranks, and there is one; set parallel.tp, or "
        "leave out parallel.tp_wire.",
    )
