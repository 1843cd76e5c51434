"""Checks a configuration before anything is started: pure, without torch."""

from __future__ import annotations

import functools
import math
import os
import typing
from collections.abc import Callable

from pyruntime.text import short_repr
from pyruntime.train.checkpoint_folder import AUTO
from pyruntime.train.config import (
    Grid,
    Optimizer,
    RunConfig,
    meets_every_step,
    mesh_of,
    with_pieces,
    with_steps,
)
from pyruntime.train.data.order import BLOCK
from pyruntime.train.data.tokenizer import check_named
from pyruntime.train.errors import require
from pyruntime.train.validate.adapter_options import check_lora
from pyruntime.train.validate.model_folder import check_model_folder
from pyruntime.train.validate.preference_options import check_dpo
from pyruntime.train.validate.rebalance import check_rebalance, check_tp_speeds
from pyruntime.train.validate.replicas import check_compression, check_data_parallel, check_weight_wire
from pyruntime.train.validate.routed_stages import check_speeds
from pyruntime.train.validate.sequences import check_context, check_pipeline, check_slices, check_tp_wire
from pyruntime.train.validate.skipped_stages import check_skip
from pyruntime.train.validate.watching import check_watching

SHORTEST_S, LONGEST_S = 1e-3, 1e6
SEEDS = 2**63
MOST_DECAY = 0.999999
LARGEST = 2**31 - 1
"""Largest number of steps, sequences, tokens of a sequence, and ranks."""
RANGES: tuple[tuple[Callable[[float], bool], str, str], ...] = (
    (
        lambda x: x >= 1,
        "be at least 1",
        "train.steps train.batch_size train.micro_batch_size train.seq_len train.val_sequences "
        "parallel.tp parallel.pp parallel.cp parallel.dp parallel.ep data_parallel.compression_rank "
        "pipeline.virtual checkpoint.keep output.log_every",
    ),
    (
        lambda x: x >= 0,
        "not be negative",
        "train.tokens train.val_every train.patience train.threads optimizer.warmup_steps lora.rank "
        "pipeline.skip data_parallel.compression_plan_every checkpoint.every_steps output.sample_tokens",
    ),
    (
        lambda x: 1e-12 <= x <= 10,
        "be between 1e-12 and 10, as a step moves each weight by about so much",
        "optimizer.lr",
    ),
    (
        lambda x: 1e-30 <= x <= 1,
        "be between 1e-30, which fp32 still tells from 0, and 1",
        "optimizer.eps",
    ),
    (lambda x: 1e6 <= x <= 1e20, "be between 1e6 and 1e20 FLOP/s", "train.peak_flops"),
    (
        lambda x: 0 <= x <= 1000,
        "be between 0 and 1000, in shares of the weight per unit of lr",
        "optimizer.weight_decay",
    ),
    (
        lambda x: x == 0 or 1e-9 <= x <= 1e9,
        "be 0 for none, or between 1e-9 and 1e9, as fp32 holds the gradients that it scales",
        "optimizer.clip_grad_norm",
    ),
    (
        lambda x: 0 <= x <= 1,
        "be between 0 and 1, as a weight beside that of the loss",
        "train.z_loss train.balance_loss train.router_z_loss",
    ),
    (lambda x: 0 <= x <= 1, "be between 0 and 1, where scores lie", "train.router_bias_rate"),
    (lambda x: 0 <= x <= 1e6, "be between 0 and 1e6 hours", "checkpoint.keep_every_h"),
    (
        lambda x: 0 <= x <= MOST_DECAY,
        f"be at least 0 and at most {MOST_DECAY}, which fp32 tells from 1",
        "optimizer.beta1 optimizer.beta2 optimizer.momentum",
    ),
    (
        lambda x: 0 <= x <= 1,
        "be between 0 and 1",
        "optimizer.min_lr_fraction optimizer.warmup_fraction optimizer.decay_fraction",
    ),
    (lambda x: x == 0 or 1 < x <= 1e6, "be 0, or above 1 and at most 1e6", "optimizer.spike_factor"),
    (lambda x: 1e-6 <= x <= 1e6, "be between 1e-6 and 1e6", "lora.alpha"),
    (lambda x: x == 0 or 1e-4 <= x <= 100, "be 0 for none, or between 1e-4 and 100", "dpo.beta"),
    (lambda x: x == 0 or x >= 5, "be 0 or at least 5", "train.slow_every"),
    (lambda x: 1e-6 <= x <= 1, "be between 1e-6 and 1", "data_parallel.compression_density"),
    (lambda x: 1 <= x <= 8, "be between 1 and 8", "data_parallel.compression_bits"),
)
"""Ranges of single numbers: a test, its words in an error, and the options."""


def check(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError, one sentence that names the key, for the first thing in `config` that cannot work.

    `world_size` is the number of ranks that were started. The model's sizes are checked where it is made, in
    `pyruntime.train.model_of_run`.
    """
    _check_values(config)
    config = with_pieces(config)
    _check_ranges(config)
    _check_train(config)
    _check_data(config)
    _check_files(config)
    check_watching(config)
    check_context(config)
    check_pipeline(config)
    check_skip(config)
    check_speeds(config)
    check_rebalance(config, world_size)
    check_data_parallel(config)
    _check_ranks(config, world_size)
    _check_two_axes(config)
    check_compression(config)
    check_weight_wire(config)
    check_lora(config)
    check_dpo(config)
    _check_rings(config, world_size)
    check_slices(config, world_size)
    check_tp_wire(config, world_size)
    check_tp_speeds(config)


@functools.cache
def _hints() -> dict[str, dict[str, typing.Any]]:
    """The types of each section's keys."""
    return {name: typing.get_type_hints(type(values)) for name, values in vars(RunConfig()).items()}


def _check_values(config: RunConfig) -> None:
    """Checks values that are impossible for a field of that type."""
    for section, values in vars(config).items():
        hints = _hints()[section]
        for key, value in vars(values).items():
            name, choices = f"{section}.{key}", typing.get_args(hints[key])
            if typing.get_origin(hints[key]) is typing.Literal:
                words = ", ".join(map(str, choices))
                require(value in choices, f"{name} must be one of {words}, found {value}.")
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, Grid):
                    each = max(vars(each).values())
                if isinstance(each, str):
                    _check_text(name, each)
                elif isinstance(each, int) and key != "seed":
                    bits = 63 if name == "train.tokens" else 31
                    require(abs(each) < 2**bits, f"{name} must be below 2**{bits}, found {short_repr(each)}.")


def _check_text(name: str, text: str) -> None:
    readable = text.encode(errors="replace").decode()
    require(readable == text, f"{name} must be text in UTF-8, found {readable!r}.")
    require("\0" not in text, f"{name} must not hold a zero character, found {text!r}.")


def _check_ranges(config: RunConfig) -> None:
    for test, words, names in RANGES:
        for name in names.split():
            section, field = name.split(".")
            value = getattr(getattr(config, section), field)
            of_grid = isinstance(value, Grid)  # with_pieces() checked its numbers
            require(value is None or of_grid or test(value), f"{name} must {words}, found {value}.")
    check_seed("train.seed", config.train.seed)
    check_seconds("comm.deadline_s", config.comm.deadline_s)


def _check_train(config: RunConfig) -> None:
    train, optimizer, dp = config.train, config.optimizer, config.parallel.dp
    _check_optimizer(config)
    require(
        optimizer.lr * optimizer.weight_decay < 1,
        f"optimizer.weight_decay={optimizer.weight_decay} times optimizer.lr={optimizer.lr} must be below 1: "
        "a step takes away that share of a weight.",
    )
    require(
        optimizer.rounding == "nearest" or train.dtype == "bf16",
        f"optimizer.rounding=stochastic needs bf16 weights, and train.dtype={train.dtype}; leave out "
        "optimizer.rounding.",
    )
    for asked, is_asked in (
        (f"train.patience={train.patience}", train.patience > 0),
        ("checkpoint.keep_best=true", config.checkpoint.keep_best),
    ):
        require(
            not is_asked or train.val_every > 0,
            f"{asked} needs validations during the run, and train.val_every=0 gives one at its end; set "
            "train.val_every.",
        )
    ranks = f" times parallel.dp={dp}" if dp > 1 else ""
    unit = train.micro_batch_size * dp
    require(
        train.batch_size % unit == 0,
        f"train.micro_batch_size={train.micro_batch_size}{ranks} does not divide "
        f"train.batch_size={train.batch_size}; use a train.batch_size of "
        f"{-(-train.batch_size // unit) * unit}, or another multiple.",
    )
    require(
        optimizer.warmup_steps is None or optimizer.warmup_fraction is None,
        f"optimizer.warmup_steps={optimizer.warmup_steps} and optimizer.warmup_fraction="
        f"{optimizer.warmup_fraction} both set the warm-up; leave one of them out.",
    )
    require(
        with_steps(config).train.steps <= LARGEST,
        f"train.tokens={train.tokens} needs more than 2**31 steps; use fewer.",
    )


def _check_data(config: RunConfig) -> None:
    data = config.data
    fraction, weights = data.val_fraction, data.weights
    require(
        0 < fraction <= 0.5 or (fraction == 0 and bool(data.val_paths)),
        f"data.val_fraction must be above 0 and at most 0.5, found {fraction}.",
    )
    require(
        not weights or len(weights) == len(data.paths),
        f"data.weights has {len(weights)} and data.paths {len(data.paths)} entries; give one weight for each "
        "path.",
    )
    total = sum(weights)
    require(
        all(0 < weight < math.inf for weight in weights) and total < math.inf,
        f"data.weights must be positive finite numbers, found {list(weights)}.",
    )
    require(
        not weights or min(weights) * BLOCK >= total / 2,
        f"data.weights has {min(weights, default=0):g} of {total:g}, less than one sample in {2 * BLOCK}; "
        "use a larger weight, or leave that source out.",
    )
    require(bool(data.field), "data.field must be the name of a key or a column, found ''.")


def _check_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    match optimizer.name:
        case "adamw":
            require(
                optimizer.momentum == Optimizer.momentum,
                f"optimizer.momentum={optimizer.momentum} applies only to Muon; set optimizer.name=muon, or "
                "leave out optimizer.momentum.",
            )
        case "muon":
            require(
                optimizer.rounding == "nearest",
                f"optimizer.rounding={optimizer.rounding} with optimizer.name=muon, which keeps fp32 master "
                "weights; leave out optimizer.rounding.",
            )
        case _:
            typing.assert_never(optimizer.name)
    match optimizer.offload:
        case "none":
            require(
                not optimizer.offload_dir,
                f"optimizer.offload_dir={optimizer.offload_dir} has no use without optimizer.offload=states; "
                "set that, or leave out optimizer.offload_dir.",
            )
        case "states":
            for other, is_asked in (
                ("optimizer.name=muon reads whole momenta", optimizer.name == "muon"),
                (
                    f"data_parallel.method={config.data_parallel.method} reads all master weights at once",
                    not meets_every_step(config),
                ),
                (
                    "data_parallel.members reads all master weights at once",
                    bool(config.data_parallel.members),
                ),
            ):
                require(not is_asked, f"optimizer.offload=states: {other}; leave out one of the two.")
        case _:
            typing.assert_never(optimizer.offload)


def _check_two_axes(config: RunConfig) -> None:
    """Refuses options that do not support tensor parallelism over two axes."""
    tp = config.parallel.tp
    if not isinstance(tp, Grid):
        return
    for name, is_asked in (
        ("optimizer.name=muon", config.optimizer.name == "muon"),
        ("train.check_types=true", config.train.check_types),
    ):
        require(
            not is_asked,
            f"{name} supports one axis of tensor parallelism, and parallel.tp={tp}; leave out y or {name}.",
        )


def _check_files(config: RunConfig) -> None:
    data = config.data
    for key, path in [("paths", path) for path in data.paths] + [
        ("val_paths", path) for path in data.val_paths
    ]:
        kinds = "name files or folders of text, or folders that `python -m pyruntime tokenize` wrote"
        require(os.path.exists(path), f"data.{key}: {path} does not exist; {kinds}.")
        require(
            os.path.isfile(path) or os.path.isdir(path),
            f"data.{key}: {path} is neither a file nor a folder; {kinds}.",
        )
    if config.data.tokenizer:
        check_named("data.tokenizer", config.data.tokenizer)
    if config.model.init_from:
        check_model_folder("model.init_from:", config.model.init_from)
    resume = config.checkpoint.resume
    auto = resume == AUTO
    require(
        not auto or bool(config.output.run_dir),
        "checkpoint.resume=auto resumes the run in output.run_dir, which is not set; name a folder, the same "
        "at every start.",
    )
    require(
        not resume or auto or os.path.isdir(resume),
        f"checkpoint.resume: the folder {resume} does not exist; name a run folder, one of its "
        "checkpoints/step-N, or auto.",
    )
    for name, folder in (
        ("output.run_dir", config.output.run_dir),
        ("data.cache", config.data.cache),
        ("optimizer.offload_dir", config.optimizer.offload_dir),
    ):
        require(
            not os.path.exists(folder) or os.path.isdir(folder),
            f"{name}: {folder} exists and is not a folder; name another.",
        )


def _check_ranks(config: RunConfig, world_size: int) -> None:
    parallel = config.parallel
    tp, dp, cp, pp = parallel.tp, parallel.dp, parallel.cp, parallel.pp
    zero, replicate = parallel.zero, parallel.dp_replicate
    require(
        replicate >= 1 and dp % replicate == 0,
        f"parallel.dp_replicate={replicate} does not divide parallel.dp={dp}; use 1, {dp}, or a divisor.",
    )
    require(
        zero > 0 or replicate == 1 or not meets_every_step(config),
        f"parallel.dp_replicate={replicate} with parallel.zero=0, which cuts nothing; leave out "
        "parallel.dp_replicate.",
    )
    others = [f"parallel.{name}={size}" for name, size in (("pp", pp), ("dp", dp), ("cp", cp)) if size > 1]
    if tp is None:
        require(
            world_size % (pp * dp * cp) == 0,
            f"{' times '.join(others)} but {world_size} rank(s) were started; start a multiple of "
            f"{pp * dp * cp}.",
        )
        return
    needed = mesh_of(config, world_size).ranks
    axes = " times ".join([f"parallel.tp={tp}", *others])
    require(
        needed == world_size,
        f"{axes} but {world_size} rank(s) were started, and every rank belongs to a group of each axis; "
        f"start torchrun with --nproc-per-node {needed}, or leave out parallel.tp.",
    )


def _check_rings(config: RunConfig, world_size: int) -> None:
    tp = mesh_of(config, world_size).tp
    for order in config.comm.rings:
        ranks = [int(rank) if rank.isdecimal() else -1 for rank in order.split("-")]
        require(
            sorted(ranks) == list(range(tp)),
            f"comm.rings holds {order!r}, which does not name each of the {tp} tensor-parallel ranks once; "
            f"write it as {'-'.join(map(str, range(tp)))!r}, or leave out comm.rings.",
        )


def check_seed(key: str, value: int) -> None:
    """Raises ConfigError if `value` of option `key` is no seed that torch takes."""
    require(0 <= value < SEEDS, f"{key} must be at least 0 and below 2**63, found {short_repr(value)}.")


def check_seconds(key: str, value: float) -> None:
    """Raises ConfigError if `value` of option `key` is no deadline in seconds."""
    require(
        SHORTEST_S <= value <= LONGEST_S,
        f"{key} must be at least {SHORTEST_S} and at most {LONGEST_S:.0f} seconds, found {value}.",
    )
