"""`python -m pyruntime train`: trains a Llama on text."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyruntime.cli.arguments import flag_name, parse, take_option
from pyruntime.cli.environment import check_started, started_rank, started_ranks
from pyruntime.train import checkpoint_folder, config_file, validate
from pyruntime.train.config import Model, RunConfig, mesh_of, ring_orders, with_pieces
from pyruntime.train.errors import ConfigError, TrainingError, refusing
from pyruntime.train.signals import StopRequest

DESCRIPTION = """Trains a Llama on text with tensor parallelism over all ranks that torchrun started:
torchrun --nproc-per-node N -m pyruntime train --config FILE.toml [--section.key value ...]. --config takes a
TOML file or the name of a preset ({presets}). Without it the preset is main, or with --checkpoint.resume the
run's own config.toml. Flags change single values; --model.init_from replaces the whole [model] section.
--dry_run RANKS checks the run for that many ranks, prints mesh, shapes, memory and schedule, and starts
nothing. --profile 10-12 is short for --train.profile 10-12."""


def main(argv: list[str], stop: StopRequest) -> None:
    ranks, argv = _dry_run(argv)
    config, name = read(argv, ranks)
    if ranks is not None:
        from pyruntime.cli import dry_run  # imports the model, which --help does not need

        text, refusal = dry_run.report(config, ranks)
        print(text)
        if refusal:
            raise ConfigError(refusal)
        return
    check_started()
    stop.says("before the first step; nothing was saved.")
    world_size = started_ranks()
    validate.check(config, world_size)
    run(config, name, world_size, stop)


def _dry_run(argv: list[str]) -> tuple[int | None, list[str]]:
    """Returns the ranks of --dry_run (or --dry-run), None if absent, and the other arguments."""
    value, rest = take_option(
        ["--dry_run" + each[9:] if each[:9] == "--dry-run" else each for each in argv], "dry_run"
    )
    if value is None:
        return None, argv
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"--dry_run needs a number of ranks, at least 1, found {value}.")
    return int(value), rest


def read(
    argv: list[str],
    ranks: int | None = None,
    command: str = "train",
    description: str = DESCRIPTION,
    others: Sequence[str] = ("dry_run",),
) -> tuple[RunConfig, str]:
    """Returns the configuration of a command line for `ranks` ranks (None: those started), and its name.
    `others` are flags that the caller already took out of `argv`. Raises ConfigError."""
    argv = [_spelled_out(argument) for argument in argv]
    asked, flags = take_option(argv, "config")
    resumed, _ = take_option(argv, "checkpoint.resume")
    if asked is None and resumed is not None and os.path.isdir(resumed):
        path, default = _of_run(Path(resumed))
    else:
        path = config_file.find(asked or "main")
        default = config_file.load(path, ranks or started_ranks())
    if "model.init_from" in map(flag_name, flags):  # the checkpoint's shape replaces the file's
        default = dataclasses.replace(default, model=Model())
    description = description.format(presets=", ".join(config_file.preset_names()))
    config = parse(RunConfig, flags, command, description, default=default, others=("config", *others))
    return with_pieces(config), path.stem


def _spelled_out(argument: str) -> str:
    name, equals, steps = argument.partition("=")
    return f"--train.profile{equals}{steps}" if name == "--profile" else argument


def _of_run(folder: Path) -> tuple[Path, RunConfig]:
    """Returns the path and configuration of a run, without its run_dir: the folder may have been moved."""
    path = checkpoint_folder.find(folder).parent.parent / "config.toml"
    config = config_file.load(path)
    return path, dataclasses.replace(config, output=dataclasses.replace(config.output, run_dir=""))


def run(config: RunConfig, name: str, world_size: int, stop: StopRequest) -> None:
    import torch

    from pyruntime.comm import Runtime, configure
    from pyruntime.train.device import Device, check_device
    from pyruntime.train.run import run as train

    if world_size > 1:
        _name_rank()
    torch.set_num_threads(threads(config.train.threads, world_size))
    device = device_of("train.device", config.train.device)
    mesh, deadline_s = vars(mesh_of(config, world_size)), config.comm.deadline_s
    with refusing():
        hosts = config.parallel.hosts
        runtime = Runtime.start(**mesh, device=device, hosts=hosts, deadline_s=deadline_s)
    with runtime:
        stop.is_of_a_job = True
        if runtime.links is not None:
            _name_rank()  # by its new number
        check_device(config, Device(runtime.device, runtime.why_device))
        if config.comm.rings:
            configure(runtime.tp, rings=ring_orders(config.comm))
        with failures_told_to_all(runtime.rank):
            train(config, name, runtime, stop)


@contextlib.contextmanager
def failures_told_to_all(rank: int) -> Iterator[None]:
    """Reports unexpected exceptions of the block to the other ranks, which end with them. Expected ones are
    not reported: the others raise them too. Adds the name of `rank` to the traceback."""
    from pyruntime.comm import CommError, post_failure
    from pyruntime.comm.groups import job_rank_name

    try:
        yield
    except (ConfigError, TrainingError, CommError):
        raise
    except Exception as error:
        post_failure(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        error.add_note(f"That was {job_rank_name(rank)}.")
        raise


def _name_rank() -> None:
    """Puts this rank's number before everything that it logs or Python warns of."""
    logging.basicConfig(format=f"pyruntime: rank {started_rank()}: %(message)s", force=True)
    logging.captureWarnings(True)


def device_of(key: str, asked: str) -> str:
    """Returns `asked`, the value of the option `key`. Raises ConfigError if that device is not there."""
    from pyruntime.comm.devices import Host, place

    with refusing(f"{key}: "):
        place(asked, Host.here())
    return asked


def threads(asked: int, world_size: int) -> int:
    """Returns the CPU threads of this rank: `asked`, else OMP_NUM_THREADS, else its share of the cores."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    said = os.environ.get("OMP_NUM_THREADS", "")
    return asked or (int(said) if said.isdigit() else 0) or max(1, len(os.sched_getaffinity(0)) // local)
