"""Says what is wrong with a configuration before anything is started: pure, without torch."""

from __future__ import annotations

import inspect
import math
import os
import typing
from collections.abc import Callable
from typing import Any

from pyruntime.elastic.address import split_address
from pyruntime.outer.methods import METHODS, Method, refuse_unless_waiting
from pyruntime.text import short_repr
from pyruntime.train.checkpoint_folder import AUTO
from pyruntime.train.config import (
    DataParallel,
    Grid,
    Optimizer,
    Pipeline,
    RunConfig,
    meets_every_step,
    replicas,
    tp_axes,
    with_pieces,
    with_steps,
)
from pyruntime.train.data.order import BLOCK
from pyruntime.train.errors import ConfigError, refusing

SHORTEST_S, LONGEST_S = 1e-3, 1e6
SEEDS = 2**63
OF_METHODS = ("members", "tau", "outer_lr", "outer_momentum", "penalty", "clip", "pull", "delay", "fragments")
"""Of the [data_parallel] section, what only replicas have that do not meet in every step."""
LARGEST = 2**31 - 1
"""Of all numbers of steps, sequences, tokens of a sequence, ranks."""
RANGES: tuple[tuple[Callable[[float], bool], str, tuple[str, ...]], ...] = (
    (
        lambda x: x >= 1,
        "be at least 1",
        (
            "train.steps",
            "train.batch_size",
            "train.micro_batch_size",
            "train.seq_len",
            "train.val_sequences",
            "parallel.tp",
            "parallel.pp",
            "parallel.cp",
            "parallel.dp",
            "data_parallel.compression_rank",
            "pipeline.virtual",
            "checkpoint.keep",
            "output.log_every",
        ),
    ),
    (
        lambda x: x >= 0,
        "not be negative",
        (
            "train.tokens",
            "train.val_every",
            "train.threads",
            "optimizer.warmup_steps",
            "data_parallel.compression_plan_every",
            "checkpoint.every_steps",
            "output.sample_tokens",
        ),
    ),
    (lambda x: 0 < x < math.inf, "be a positive finite number", ("optimizer.lr", "optimizer.eps")),
    (
        lambda x: 0 <= x < math.inf,
        "be a finite number of at least 0",
        (
            "optimizer.weight_decay",
            "optimizer.clip_grad_norm",
            "train.z_loss",
            "output.temperature",
            "checkpoint.keep_every_h",
        ),
    ),
    (
        lambda x: 0 <= x < 1,
        "be at least 0 and below 1",
        ("optimizer.beta1", "optimizer.beta2", "optimizer.momentum"),
    ),
    (
        lambda x: 0 <= x <= 1,
        "be between 0 and 1",
        ("optimizer.min_lr_fraction", "optimizer.warmup_fraction", "optimizer.decay_fraction"),
    ),
    (lambda x: x == 0 or 1 < x < math.inf, "be 0, or finite and above 1", ("optimizer.spike_factor",)),
    (lambda x: 0 < x <= 1, "be above 0 and at most 1", ("data_parallel.compression_density",)),
    (lambda x: 1 <= x <= 8, "be between 1 and 8", ("data_parallel.compression_bits",)),
)
"""What numbers must be, each by itself: a test, the words for it, and whose it is."""


def check(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError, one sentence that names the key, for the first thing in `config` that cannot work.

    `world_size` is the number of ranks that were started. The model's sizes are checked where it is made, in
    `pyruntime.train.model`.
    """
    _check_values(config)
    config = with_pieces(config)
    _check_ranges(config)
    _check_train(config)
    _check_data(config)
    _check_files(config)
    _check_context(config)
    _check_pipeline(config)
    _check_data_parallel(config)
    _check_ranks(config, world_size)
    _check_two_axes(config)
    _check_compression(config)
    _check_rings(config, world_size)
    _check_slices(config, world_size)


def _check_values(config: RunConfig) -> None:
    """What no field can be, whatever it means."""
    for section, values in vars(config).items():
        hints = typing.get_type_hints(type(values))
        for key, value in vars(values).items():
            name, choices = f"{section}.{key}", typing.get_args(hints[key])
            if typing.get_origin(hints[key]) is typing.Literal:
                words = ", ".join(map(str, choices))
                _require(value in choices, f"{name} must be one of {words}, found {value}.")
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, Grid):
                    each = max(vars(each).values())
                if isinstance(each, str):
                    _check_text(name, each)
                elif isinstance(each, int) and key != "seed":
                    bits = 63 if name == "train.tokens" else 31
                    _require(
                        abs(each) < 2**bits, f"{name} must be below 2**{bits}, found {short_repr(each)}."
                    )


def _check_text(name: str, text: str) -> None:
    readable = text.encode(errors="replace").decode()
    _require(readable == text, f"{name} must be text in UTF-8, found {readable!r}.")
    _require("\0" not in text, f"{name} must not hold a zero character, found {text!r}.")


def _check_ranges(config: RunConfig) -> None:
    for test, words, names in RANGES:
        for name in names:
            section, field = name.split(".")
            value = getattr(getattr(config, section), field)
            of_grid = isinstance(value, Grid)  # with_pieces() has looked at its numbers
            _require(value is None or of_grid or test(value), f"{name} must {words}, found {value}.")
    check_seed("train.seed", config.train.seed)
    check_seconds("comm.deadline_s", config.comm.deadline_s)


def _check_train(config: RunConfig) -> None:
    train, optimizer, dp = config.train, config.optimizer, config.parallel.dp
    _require(
        train.device != "cuda" or optimizer.rounding == "nearest",
        f"optimizer.rounding={optimizer.rounding} is done on the CPU alone; use nearest with "
        "train.device=cuda.",
    )
    _check_muon(config)
    _require(
        optimizer.rounding == "nearest" or train.dtype == "bf16",
        f"optimizer.rounding=stochastic is of bf16 weights, and train.dtype={train.dtype}; leave it out.",
    )
    ranks = f" times parallel.dp={dp}" if dp > 1 else ""
    _require(
        train.batch_size % (train.micro_batch_size * dp) == 0,
        f"train.micro_batch_size={train.micro_batch_size}{ranks} does not divide "
        f"train.batch_size={train.batch_size}.",
    )
    _require(
        optimizer.warmup_steps is None or optimizer.warmup_fraction is None,
        f"optimizer.warmup_steps={optimizer.warmup_steps} and optimizer.warmup_fraction="
        f"{optimizer.warmup_fraction} both say how long the warm-up is; leave one of them out.",
    )
    _require(
        with_steps(config).train.steps <= LARGEST,
        f"train.tokens={train.tokens} are more than 2**31 steps; use fewer.",
    )


def _check_data(config: RunConfig) -> None:
    data = config.data
    fraction, weights = data.val_fraction, data.weights
    _require(
        0 < fraction <= 0.5 or (fraction == 0 and bool(data.val_paths)),
        f"data.val_fraction must be above 0 and at most 0.5, found {fraction}.",
    )
    _require(
        not weights or len(weights) == len(data.paths),
        f"data.weights are {len(weights)} and data.paths {len(data.paths)}; give one for each.",
    )
    total = sum(weights)
    _require(
        all(0 < weight < math.inf for weight in weights) and total < math.inf,
        f"data.weights must be positive finite numbers, found {list(weights)}.",
    )
    _require(
        not weights or min(weights) * BLOCK >= total / 2,
        f"data.weights hold {min(weights, default=0):g} of {total:g}, less than one sample of {2 * BLOCK}; "
        "use a larger weight, or leave that source out.",
    )
    _require(bool(data.field), "data.field must be the name of a key or a column, found ''.")


def _check_muon(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.name == "adamw":
        _require(
            optimizer.momentum == Optimizer.momentum,
            f"optimizer.momentum={optimizer.momentum} is Muon's; set optimizer.name=muon, or leave it out.",
        )
        return
    _require(
        optimizer.rounding == "nearest",
        f"optimizer.rounding={optimizer.rounding} with optimizer.name=muon, which keeps fp32 master weights; "
        "leave it out.",
    )
    _require(
        config.train.device != "cuda",
        "optimizer.name=muon is done on the CPU alone; use adamw with train.device=cuda.",
    )


def _check_two_axes(config: RunConfig) -> None:
    """What does not know of tensor parallelism over two axes."""
    tp = config.parallel.tp
    if not isinstance(tp, Grid):
        return
    for name, is_asked in (
        ("optimizer.name=muon", config.optimizer.name == "muon"),
        ("train.check_types=true", config.train.check_types),
    ):
        _require(
            not is_asked,
            f"{name} knows of one axis of tensor parallelism, and parallel.tp={tp}; leave y or it out.",
        )


def _check_files(config: RunConfig) -> None:
    data = config.data
    for key, path in [("paths", path) for path in data.paths] + [
        ("val_paths", path) for path in data.val_paths
    ]:
        _require(os.path.exists(path), f"data.{key}: {path} does not exist.")
        _require(
            os.path.isfile(path) or os.path.isdir(path),
            f"data.{key}: {path} is neither a file nor a folder.",
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
    for name, folder in (("output.run_dir", config.output.run_dir), ("data.cache", config.data.cache)):
        _require(
            not os.path.exists(folder) or os.path.isdir(folder),
            f"{name}: {folder} exists and is not a folder.",
        )


def _check_ranks(config: RunConfig, world_size: int) -> None:
    parallel = config.parallel
    tp, dp, cp, pp = parallel.tp, parallel.dp, parallel.cp, parallel.pp
    zero, replicate = parallel.zero, parallel.dp_replicate
    _require(
        replicate >= 1 and dp % replicate == 0,
        f"parallel.dp_replicate={replicate} does not divide parallel.dp={dp}.",
    )
    _require(
        zero > 0 or replicate == 1 or not meets_every_step(config),
        f"parallel.dp_replicate={replicate} with parallel.zero=0, which cuts nothing: leave it at 1.",
    )
    others = [f"parallel.{name}={size}" for name, size in (("pp", pp), ("dp", dp), ("cp", cp)) if size > 1]
    if tp is None:
        _require(
            world_size % (pp * dp * cp) == 0,
            f"{' times '.join(others)} but {world_size} rank(s) were started; start a multiple of "
            f"{pp * dp * cp}.",
        )
        return
    needed = math.prod(tp_axes(parallel, world_size)) * pp * dp * cp
    axes = " times ".join([f"parallel.tp={tp}", *others])
    _require(
        needed == world_size,
        f"{axes} but {world_size} rank(s) were started, and every rank belongs to a group of each axis; "
        f"start torchrun with --nproc-per-node {needed}, or leave parallel.tp out.",
    )


def outer_method(config: RunConfig) -> Method:
    """How replicas meet that do not in every step. Raises ConfigError for what the method does not have."""
    asked = config.data_parallel
    given = {
        "tau": asked.tau,
        "lr": asked.outer_lr,
        "momentum": asked.outer_momentum,
        "clip": asked.clip,
        "pull": asked.pull,
        "delay": asked.delay,
        "fragments": asked.fragments,
    }
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not asked.penalty:
        settings["penalty"] = None
    make = METHODS[asked.method]
    for name in settings:
        key = {"lr": "outer_lr", "momentum": "outer_momentum"}.get(name, name)
        _require(
            name in inspect.signature(make).parameters,
            f"data_parallel.{key} is not a setting of data_parallel.method={asked.method}; leave it out.",
        )
    with refusing("[data_parallel]: "):
        return make(**settings)


def _check_data_parallel(config: RunConfig) -> None:
    """Of replicas that do not meet in every step."""
    asked, parallel = config.data_parallel, config.parallel
    if meets_every_step(config):
        for name in OF_METHODS:
            value = getattr(asked, name)
            _require(
                value == getattr(DataParallel, name),
                f"data_parallel.{name}={value} without a data_parallel.method that meets less often than in "
                "every step; set one.",
            )
        return
    chosen = outer_method(config)
    method = f"data_parallel.method={asked.method}"
    if asked.members:
        _check_members(config, chosen)
    _require(
        replicas(config) > 1 or bool(asked.members),
        f"{method} is of several replicas, and parallel.dp={parallel.dp}; set it to their number.",
    )
    _require(
        parallel.zero < 3,
        f"{method} with parallel.zero=3, which keeps no whole weights for the outer step; use 0, 1 or 2.",
    )
    _require(
        asked.compression == "none",
        f"{method} with data_parallel.compression={asked.compression}, which is of gradients that are summed "
        "in every step; leave one of them out.",
    )
    asked_of_steps = config.optimizer
    _require(
        asked_of_steps.on_bad_step == "stop" and not asked_of_steps.spike_factor,
        f"{method} with optimizer.on_bad_step=skip or optimizer.spike_factor, which take the figures of all "
        "replicas in every step; leave them out.",
    )
    _require(
        config.train.device != "cuda",
        f"{method} is of ranks on the CPU, and train.device=cuda; use cpu, or "
        "data_parallel.method=every_step.",
    )


def _check_members(config: RunConfig, method: Method) -> None:
    """Of replicas that come and go."""
    address, tau = config.data_parallel.members, method.tau
    with refusing("data_parallel.members: "):
        split_address(address)
        refuse_unless_waiting(method)
    _require(
        config.parallel.dp_replicate == 1,
        f"data_parallel.members={address} joins replicas that are jobs of their own, and "
        f"parallel.dp_replicate={config.parallel.dp_replicate} makes some in it; leave one of them out.",
    )
    assert isinstance(tau, int)  # a method that waits has no other
    for name, steps in (
        ("train.steps", with_steps(config).train.steps),
        ("checkpoint.every_steps", config.checkpoint.every_steps),
    ):
        _require(
            steps % tau == 0,
            f"{name}={steps} ends in the midst of a round of data_parallel.tau={tau} steps, and with "
            f"data_parallel.members rounds are whole; use {-(-steps // tau) * tau}.",
        )


def _check_compression(config: RunConfig) -> None:
    """What compressed gradients do not go together with."""
    parallel, chosen = config.parallel, config.data_parallel
    asked = f"data_parallel.compression={chosen.compression}"
    if chosen.compression == "none":
        for name in ("error_feedback", "compression_plan_every"):
            value = getattr(chosen, name)
            _require(
                value == getattr(DataParallel, name),
                f"data_parallel.{name}={value} without data_parallel.compression; set that, or leave it out.",
            )
        return
    _require(
        parallel.dp * parallel.cp > 1,
        f"{asked} is of gradients that data-parallel ranks exchange, and there is one such rank; set "
        "parallel.dp, or leave it out.",
    )
    _require(
        parallel.zero < 3,
        f"{asked} with parallel.zero=3, where weights travel as they are, twice as much as gradients; use 0, "
        "1 or 2.",
    )
    _require(
        parallel.dp_replicate == 1,
        f"{asked} is over one axis, and parallel.dp_replicate={parallel.dp_replicate} makes two; leave one "
        "of them out.",
    )
    _require(
        config.train.device != "cuda",
        f"{asked} is done on the CPU alone; leave it out with train.device=cuda.",
    )
    _require(
        config.optimizer.on_bad_step == "stop",
        f"{asked} with optimizer.on_bad_step=skip: when a step is known to be bad, what compression keeps "
        "has it already; leave one of them out.",
    )
    _require(
        chosen.error_feedback or chosen.compression == "quantize",
        f"{asked} with data_parallel.error_feedback=false would never send most of a gradient; leave it on, "
        "or use quantize.",
    )


def _check_rings(config: RunConfig, world_size: int) -> None:
    tp, _ = tp_axes(config.parallel, world_size)
    for order in config.comm.rings:
        ranks = [int(rank) if rank.isdecimal() else -1 for rank in order.split("-")]
        _require(
            sorted(ranks) == list(range(tp)),
            f"comm.rings holds {order!r}, which does not name each of the {tp} tensor-parallel ranks once; "
            f"write it as {'-'.join(map(str, range(tp)))!r}, or leave it out.",
        )


def _check_pipeline(config: RunConfig) -> None:
    pp, pipeline = config.parallel.pp, config.pipeline
    _require(
        pipeline.slices >= 1 or (pipeline.slices == 0 and bool(pipeline.costs)),
        f"pipeline.slices must be at least 1, or 0 with pipeline.costs, found {pipeline.slices}.",
    )
    _require(
        not pipeline.costs or os.path.isfile(pipeline.costs),
        f"pipeline.costs: {pipeline.costs} is not a file; `python -m pyruntime profile --json` writes one.",
    )
    tokens = pipeline.slice_tokens
    _require(
        not tokens
        or (len(tokens) == pipeline.slices and min(tokens) >= 1 and sum(tokens) == config.train.seq_len),
        f"pipeline.slice_tokens={list(tokens)} must be pipeline.slices={pipeline.slices} numbers of at least "
        f"1 that add up to train.seq_len={config.train.seq_len}.",
    )
    for name in ("costs", "virtual", "slices", "layers"):
        value = getattr(pipeline, name)
        shown = list(value) if name == "layers" else value
        without = pp > 1 or value == getattr(Pipeline, name)
        _require(without, f"pipeline.{name}={shown} without a pipeline; set parallel.pp.")
    tokens_of_rank = config.train.seq_len // config.parallel.cp
    _require(
        pipeline.slices <= tokens_of_rank,
        f"pipeline.slices={pipeline.slices} of the {tokens_of_rank} tokens of a sequence that a rank has; "
        "use fewer.",
    )
    if pipeline.slices != 1 and config.parallel.cp > 1:
        _check_pipeline_slices_of_context(config)


def _check_pipeline_slices_of_context(config: RunConfig) -> None:
    """Every slice has tokens of all context-parallel ranks, as many of each."""
    pipeline, cp, layout = config.pipeline, config.parallel.cp, config.context.layout
    _require(
        pipeline.slices > 0,
        f"pipeline.slices=0 takes the slices of pipeline.costs, which are of whole sequences, and "
        f"parallel.cp={cp}; say how many slices.",
    )
    _require(
        all(tokens % cp == 0 for tokens in pipeline.slice_tokens),
        f"pipeline.slice_tokens={list(pipeline.slice_tokens)} are shared by parallel.cp={cp} ranks; use "
        f"multiples of {cp}.",
    )
    halves = layout == "zigzag" and pipeline.slices == 2 and len(set(pipeline.slice_tokens)) <= 1
    _require(
        layout == "striped" or halves,
        f"pipeline.slices={pipeline.slices} with parallel.cp={cp}: context.layout={layout} cuts sequences "
        f"into {'2 equal' if layout == 'zigzag' else 'no'} slices that follow each other on every rank; use "
        "context.layout=striped.",
    )


def why_no_slices(config: RunConfig, tp: int) -> str:
    """What slices inside a tensor-parallel group of so many ranks do not go together with; empty: nothing."""
    if tp == 1:
        return "parallel.tp=1, where no rows travel"
    if isinstance(config.parallel.tp, Grid):
        return f"parallel.tp={config.parallel.tp}, whose y cuts features; leave y out"
    if config.parallel.zero == 3 and config.parallel.dp * config.parallel.cp > 1:
        return "parallel.zero=3, which gathers weights for one layer at a time; use 0, 1 or 2"
    if config.pipeline.slices != 1:
        return f"pipeline.slices={config.pipeline.slices}, which cuts sequences too"
    return ""


def _check_slices(config: RunConfig, world_size: int) -> None:
    parallel = config.parallel
    tp, _ = tp_axes(parallel, world_size)
    why = why_no_slices(config, tp) if parallel.slices not in ("auto", 1) else ""
    _require(
        not why, f"parallel.slices={parallel.slices} does not go together with {why}; leave one of them out."
    )
    if parallel.cp > 1 and parallel.slices != "auto" and parallel.slices > 1:
        _check_slices_of_context(config, parallel.slices, tp)


def _check_slices_of_context(config: RunConfig, slices: int, tp: int) -> None:
    """Every slice has tokens of all context-parallel ranks, as many of each."""
    cp, layout, seq_len = config.parallel.cp, config.context.layout, config.train.seq_len
    most = {"striped": slices, "zigzag": 2, "contiguous": 1}[layout]
    _require(
        slices <= most,
        f"parallel.slices={slices} with parallel.cp={cp}: context.layout={layout} cuts sequences into at "
        f"most {most}; use context.layout=striped, or parallel.slices={most}.",
    )
    unit = 2 * cp * tp if layout == "zigzag" else 1
    _require(
        seq_len % unit == 0,
        f"train.seq_len={seq_len} does not divide into 2 slices of the zigzag layout over parallel.cp={cp} "
        f"times {tp} tensor-parallel ranks; use {-(-seq_len // unit) * unit}, or context.layout=striped.",
    )


def _check_context(config: RunConfig) -> None:
    cp, context, seq_len = config.parallel.cp, config.context, config.train.seq_len
    parts = 2 * cp if context.layout == "zigzag" and cp > 1 else cp
    _require(
        seq_len % parts == 0,
        f"train.seq_len={seq_len} does not divide into the {parts} parts of the {context.layout} layout over "
        f"parallel.cp={cp}; use {-(-seq_len // parts) * parts}.",
    )


def check_seed(key: str, value: int) -> None:
    """Raises ConfigError where `value`, the option `key`, is no seed that torch takes."""
    _require(0 <= value < SEEDS, f"{key} must be at least 0 and below 2**63, found {short_repr(value)}.")


def check_seconds(key: str, value: float) -> None:
    """Raises ConfigError where `value`, the option `key`, is no deadline in seconds."""
    _require(
        SHORTEST_S <= value <= LONGEST_S,
        f"{key} must be at least {SHORTEST_S} and at most {LONGEST_S:.0f} seconds, found {value}.",
    )


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)
