"""Says what is wrong with a configuration before anything is started: pure, without torch."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import get_args

from pyruntime.shown import shown
from pyruntime.train.checkpoint_folder import AUTO
from pyruntime.train.config import (
    ContextLayout,
    ContextVariant,
    Device,
    PipelineKind,
    RunConfig,
    Tier,
    warmup_steps,
)
from pyruntime.train.errors import ConfigError

SHORTEST_S, LONGEST_S = 1e-3, 1e6
SEEDS = 2**63
LARGEST = 2**31 - 1
"""Of all numbers of steps, sequences, tokens, ranks."""


def check(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError, one sentence that names the key, for the first thing in `config` that cannot work.

    `world_size` is the number of ranks that were started. The model's sizes are checked where it is made, in
    `pyruntime.train.shape`.
    """
    _check_values(config)
    _check_train(config)
    _check_optimizer(config)
    _check_files(config)
    _check_output(config)
    _check_ranks(config, world_size)


def _check_values(config: RunConfig) -> None:
    """What no field can be, whatever it means."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for field in dataclasses.fields(values):
            value, name = getattr(values, field.name), f"{section.name}.{field.name}"
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, str):
                    _check_text(name, each)
                elif isinstance(each, int) and field.name != "seed":
                    _require(abs(each) <= LARGEST, f"{name} must be below 2**31, found {shown(each)}.")


def _check_text(name: str, text: str) -> None:
    readable = text.encode(errors="replace").decode()
    _require(readable == text, f"{name} must be text in UTF-8, found {readable!r}.")
    _require("\0" not in text, f"{name} must not hold a zero character, found {text!r}.")


def _check_train(config: RunConfig) -> None:
    train = config.train
    for name in ("steps", "batch_size", "micro_batch_size", "seq_len", "val_sequences"):
        value = getattr(train, name)
        _require(value >= 1, f"train.{name} must be at least 1, found {value}.")
    for name in ("val_every", "threads"):
        value = getattr(train, name)
        _require(value >= 0, f"train.{name} must not be negative, found {value}.")
    check_seed("train.seed", train.seed)
    devices = get_args(Device)
    _require(
        train.device in devices, f"train.device must be one of {', '.join(devices)}, found {train.device}."
    )
    _require(
        train.device != "cuda" or config.optimizer.rounding == "nearest",
        f"optimizer.rounding={config.optimizer.rounding} is done on the CPU alone; use nearest with "
        "train.device=cuda.",
    )
    dp = config.parallel.dp
    _require(dp >= 1, f"parallel.dp must be at least 1, found {dp}.")
    ranks = f" times parallel.dp={dp}" if dp > 1 else ""
    _require(
        train.batch_size % (train.micro_batch_size * dp) == 0,
        f"train.micro_batch_size={train.micro_batch_size}{ranks} does not divide "
        f"train.batch_size={train.batch_size}.",
    )
    fraction = config.data.val_fraction
    _require(0 < fraction <= 0.5, f"data.val_fraction must be above 0 and at most 0.5, found {fraction}.")


def _check_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    _require(
        optimizer.rounding in ("nearest", "stochastic"),
        f"optimizer.rounding must be nearest or stochastic, found {optimizer.rounding}.",
    )
    _require(
        optimizer.rounding == "nearest" or config.train.dtype == "bf16",
        f"optimizer.rounding=stochastic is of bf16 weights, and train.dtype={config.train.dtype}; leave it "
        "out.",
    )
    for name in ("lr", "eps"):
        value = getattr(optimizer, name)
        _require(
            math.isfinite(value) and value > 0,
            f"optimizer.{name} must be a positive finite number, found {value}.",
        )
    for name in ("weight_decay", "clip_grad_norm"):
        value = getattr(optimizer, name)
        _require(
            math.isfinite(value) and value >= 0,
            f"optimizer.{name} must be a finite number of at least 0, found {value}.",
        )
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        _require(0 <= value < 1, f"optimizer.{name} must be at least 0 and below 1, found {value}.")
    fraction = optimizer.min_lr_fraction
    _require(0 <= fraction <= 1, f"optimizer.min_lr_fraction must be between 0 and 1, found {fraction}.")
    steps = config.train.steps
    warmup = warmup_steps(optimizer, steps)
    _require(
        0 <= warmup <= steps,
        f"optimizer.warmup_steps must be between 0 and train.steps={steps}, found {warmup}; leave it out for "
        "a tenth of the steps, at most 20.",
    )


def _check_files(config: RunConfig) -> None:
    for path in config.data.paths:
        _require(os.path.exists(path), f"data.paths: {path} does not exist.")
        _require(
            os.path.isfile(path) or os.path.isdir(path),
            f"data.paths: {path} is neither a file nor a folder.",
        )
    tokenizer = config.data.tokenizer
    _require(
        tokenizer in ("", "bytes") or os.path.isfile(tokenizer),
        f'data.tokenizer: {tokenizer} is not a file; give "bytes" or the path of a tokenizer.json.',
    )
    folder = config.model.init_from
    if folder:
        _require(
            os.path.isfile(os.path.join(folder, "config.json")),
            f"model.init_from: {folder} holds no config.json; give the folder of a Hugging Face Llama "
            "checkpoint.",
        )
    resume = config.checkpoint.resume
    auto = resume == AUTO
    _require(
        not auto or bool(config.output.run_dir),
        "checkpoint.resume=auto goes on with the run in output.run_dir, which is not set; name a folder, the "
        "same at every start.",
    )
    _require(
        not resume or auto or os.path.isdir(resume),
        f"checkpoint.resume: the folder {resume} does not exist.",
    )


def _check_output(config: RunConfig) -> None:
    output, checkpoint = config.output, config.checkpoint
    _require(
        checkpoint.every_steps >= 0,
        f"checkpoint.every_steps must not be negative, found {checkpoint.every_steps}.",
    )
    _require(checkpoint.keep >= 1, f"checkpoint.keep must be at least 1, found {checkpoint.keep}.")
    _require(output.log_every >= 1, f"output.log_every must be at least 1, found {output.log_every}.")
    _require(
        output.sample_tokens >= 0,
        f"output.sample_tokens must not be negative, found {output.sample_tokens}.",
    )
    _require(
        math.isfinite(output.temperature) and output.temperature >= 0,
        f"output.temperature must be a finite number of at least 0, found {output.temperature}.",
    )
    for name, folder in (("output.run_dir", output.run_dir), ("data.cache", config.data.cache)):
        _require(
            not os.path.exists(folder) or os.path.isdir(folder),
            f"{name}: {folder} exists and is not a folder.",
        )


def _check_ranks(config: RunConfig, world_size: int) -> None:
    tiers = get_args(Tier)
    _require(
        config.comm.tier in tiers,
        f"comm.tier must be one of {', '.join(tiers)}, found {config.comm.tier}.",
    )
    check_seconds("comm.deadline_s", config.comm.deadline_s)
    tp, dp, replicate = config.parallel.tp, config.parallel.dp, config.parallel.dp_replicate
    cp, pp = config.parallel.cp, config.parallel.pp
    zero = config.parallel.zero
    _require(zero in (0, 1, 2, 3), f"parallel.zero must be 0, 1, 2 or 3, found {zero}.")
    _require(
        replicate >= 1 and dp % replicate == 0,
        f"parallel.dp_replicate={replicate} does not divide parallel.dp={dp}.",
    )
    _require(
        zero > 0 or replicate == 1,
        f"parallel.dp_replicate={replicate} with parallel.zero=0, which cuts nothing: leave it at 1.",
    )
    _require(tp is None or tp >= 1, f"parallel.tp must be at least 1, found {tp}.")
    _check_context(config)
    _check_pipeline(config)
    others = [f"parallel.{name}={size}" for name, size in (("pp", pp), ("dp", dp), ("cp", cp)) if size > 1]
    if tp is None:
        _require(
            world_size % (pp * dp * cp) == 0,
            f"{' times '.join(others)} but {world_size} rank(s) were started; start a multiple of "
            f"{pp * dp * cp}.",
        )
        return
    needed = tp * pp * dp * cp
    axes = " times ".join([f"parallel.tp={tp}", *others])
    _require(
        needed == world_size,
        f"{axes} but {world_size} rank(s) were started, and every rank belongs to a group of each axis; "
        f"start torchrun with --nproc-per-node {needed}, or leave parallel.tp out.",
    )


def _check_pipeline(config: RunConfig) -> None:
    pp, pipeline = config.parallel.pp, config.pipeline
    _require(pp >= 1, f"parallel.pp must be at least 1, found {pp}.")
    kinds = get_args(PipelineKind)
    _require(
        pipeline.kind in kinds, f"pipeline.kind must be one of {', '.join(kinds)}, found {pipeline.kind}."
    )
    _require(
        pipeline.slices >= 1 or (pipeline.slices == 0 and bool(pipeline.costs)),
        f"pipeline.slices must be at least 1, or 0 with pipeline.costs, found {pipeline.slices}.",
    )
    _require(
        not pipeline.costs or os.path.isfile(pipeline.costs),
        f"pipeline.costs: {pipeline.costs} is not a file; `python -m pyruntime profile --json` writes one.",
    )
    _require(
        pp > 1 or not pipeline.costs,
        f"pipeline.costs={pipeline.costs} without a pipeline; set parallel.pp.",
    )
    tokens = pipeline.slice_tokens
    _require(
        not tokens
        or (len(tokens) == pipeline.slices and min(tokens) >= 1 and sum(tokens) == config.train.seq_len),
        f"pipeline.slice_tokens={list(tokens)} must be pipeline.slices={pipeline.slices} numbers of at least "
        f"1 that add up to train.seq_len={config.train.seq_len}.",
    )
    _require(pipeline.virtual >= 1, f"pipeline.virtual must be at least 1, found {pipeline.virtual}.")
    for name in ("virtual", "slices"):
        value = getattr(pipeline, name)
        _require(pp > 1 or value == 1, f"pipeline.{name}={value} without a pipeline; set parallel.pp.")
    _require(
        pp > 1 or not pipeline.layers,
        f"pipeline.layers={list(pipeline.layers)} without a pipeline; set parallel.pp.",
    )
    _require(
        pp == 1 or config.parallel.zero < 3,
        "parallel.zero=3 gathers weights for every micro-batch of a pipeline anew; use 0, 1 or 2.",
    )
    _require(
        pipeline.slices == 1 or config.parallel.cp == 1,
        f"pipeline.slices={pipeline.slices} and parallel.cp={config.parallel.cp} both cut sequences; use "
        "one of them.",
    )
    _require(
        pipeline.slices <= config.train.seq_len,
        f"pipeline.slices={pipeline.slices} of train.seq_len={config.train.seq_len} tokens; use fewer.",
    )


def _check_context(config: RunConfig) -> None:
    cp, context, seq_len = config.parallel.cp, config.context, config.train.seq_len
    _require(cp >= 1, f"parallel.cp must be at least 1, found {cp}.")
    for name, choices in (("layout", get_args(ContextLayout)), ("variant", get_args(ContextVariant))):
        found = getattr(context, name)
        _require(found in choices, f"context.{name} must be one of {', '.join(choices)}, found {found}.")
    parts = 2 * cp if context.layout == "zigzag" and cp > 1 else cp
    _require(
        seq_len % parts == 0,
        f"train.seq_len={seq_len} does not divide into the {parts} parts of the {context.layout} layout over "
        f"parallel.cp={cp}; use {-(-seq_len // parts) * parts}.",
    )


def check_seed(key: str, value: int) -> None:
    """Raises ConfigError where `value`, the option `key`, is no seed that torch takes."""
    _require(0 <= value < SEEDS, f"{key} must be at least 0 and below 2**63, found {shown(value)}.")


def check_seconds(key: str, value: float) -> None:
    """Raises ConfigError where `value`, the option `key`, is no deadline in seconds."""
    _require(
        SHORTEST_S <= value <= LONGEST_S,
        f"{key} must be at least {SHORTEST_S} and at most {LONGEST_S:.0f} seconds, found {value}.",
    )


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)
