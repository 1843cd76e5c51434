"""`python -m pyruntime tune`: which tier is the fastest for a model's linears, measured on this machine."""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyruntime.cli.arguments import parse
from pyruntime.cli.environment import check_started, started_rank, started_ranks
from pyruntime.cli.train import threads
from pyruntime.train import config_file, validate
from pyruntime.train.config import RunConfig, Train
from pyruntime.train.errors import ConfigError
from pyruntime.tuning import cache
from pyruntime.tuning.cache import Cache, CacheError, Choice, Choices, Place

if TYPE_CHECKING:
    import torch

    from pyruntime.comm import Runtime
    from pyruntime.llama.config import LlamaConfig
    from pyruntime.tuning.linears import Linear
    from pyruntime.tuning.measure import Measured

PROGRAM = "python -m pyruntime tune"
DESCRIPTION = """Times the tiers of every linear of a model, forward and backward, with several numbers of
chunks and tiles where there is a choice, on the ranks that torchrun started, beside the product and the
collective alone, and keeps the fastest in a file, from which tier="auto"
starts: torchrun --nproc-per-node P -m pyruntime tune --model NAME | --config FILE. The file is tuning.json in
the user's cache folder, or what the environment variable PYRUNTIME_TUNING names."""
DEFAULT_SEQ_LEN = 2048


@dataclasses.dataclass(frozen=True)
class Options:
    model: str = ""
    """Name of a Llama, however spelled (llama-3-8b, 3m); or name --config."""
    config: str = ""
    """TOML file or preset of the trainer, whose model, sizes and type are tuned for; or name --model."""
    micro_batch_size: int = 0
    """Sequences of a forward pass; 0: the configuration's, or 1."""
    seq_len: int = 0
    """Tokens of a sequence; 0: the configuration's, or 2048."""
    tp: int = 0
    """Ranks of a tensor-parallel group, which divide those started; 0: the configuration's, or all."""
    dtype: Literal["", "bf16", "fp32"] = ""
    """Type of weights and activations; empty: the configuration's, or bf16."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where operands lie; auto: on GPUs where torch sees one for each rank of this host."""
    rounds: int = 15
    """Rounds of each measurement, at least 3."""
    budget: float = 120.0
    """Seconds for all measurements; where they do not suffice there are fewer rounds, at least 3, and what
    comes last is left out."""
    variants: bool = False
    """On GPUs also time the product alone by tiles that the library of kernels does not have, compiled at run
    time through cupy: minutes of compiling, which the budget does not count."""
    json: str = ""
    """File to write all figures to; empty: none."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is tuned for."""

    shape: LlamaConfig
    tp: int
    rows: int
    """Tokens of a forward pass, over the ranks of a tensor-parallel group."""
    dtype: str
    threads: int
    """CPU threads of a rank."""


def main(argv: list[str]) -> None:
    options = parse(Options, argv, PROGRAM, DESCRIPTION)
    check(options)
    check_started()
    ranks = started_ranks()
    if ranks == 1:
        raise ConfigError(
            "tune measures how products and transfers overlap, and one rank has nobody to transfer to; start "
            "it with torchrun --nproc-per-node P -m pyruntime tune, P being the tensor-parallel ranks."
        )
    job = job_of(options, ranks)
    path = cache.default_path()
    old = known(path) if started_rank() == 0 else {}
    run(options, job, path, old)


def check(options: Options) -> None:
    if bool(options.model) == bool(options.config):
        raise ConfigError("tune needs --model NAME or --config FILE, one of them.")
    for name in ("micro_batch_size", "seq_len", "tp"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name} must not be negative, found {getattr(options, name)}.")
    if options.rounds < 3:
        raise ConfigError(f"--rounds must be at least 3, found {options.rounds}.")
    validate.check_seconds("--budget", options.budget)
    check_variants(options, options.device)


def check_variants(options: Options, device: str) -> None:
    if options.variants and device == "cpu":
        raise ConfigError(
            "--variants times tiles of kernels for GPUs, and operands lie on the CPU; leave it out."
        )


def job_of(options: Options, ranks: int) -> Job:
    """The model, from a configuration or by its name, and its sizes. Raises ConfigError."""
    from pyruntime.train.shape import llama_config
    from pyruntime.train.tokenizer import open_tokenizer

    if options.config:
        config = config_file.load(config_file.find(options.config))
    else:
        seq_len = options.seq_len or DEFAULT_SEQ_LEN
        config = RunConfig(train=Train(micro_batch_size=1, seq_len=seq_len, dtype="bf16"))
    parallel, train = config.parallel, config.train
    tp = options.tp or parallel.tp or ranks // (parallel.pp * parallel.cp * parallel.dp)
    if tp < 2 or ranks % tp:
        raise ConfigError(
            f"tp={tp} and {ranks} ranks were started; start tp of them or a multiple, and let tp be at least "
            "2."
        )
    seq_len = options.seq_len or train.seq_len
    if options.config:
        vocabulary = open_tokenizer(config.data.tokenizer, config.model.init_from).vocab_size
        shape = llama_config(config.model, vocabulary, seq_len, tp)
    else:
        shape = named(options.model, tp)
    return Job(
        shape=shape,
        tp=tp,
        rows=(options.micro_batch_size or train.micro_batch_size) * seq_len // parallel.cp,
        dtype=options.dtype or train.dtype,
        threads=threads(train.threads, ranks),
    )


def named(name: str, tp: int) -> LlamaConfig:
    """The shape of a known Llama. Raises ConfigError."""
    from pyruntime.llama.presets import preset
    from pyruntime.plan.models import find_model

    try:
        found = find_model(name).preset
        if not found:
            raise ValueError(f"{name} is no Llama that the trainer has a preset of.")
        shape = preset(found)
        shape.check_tp(tp)
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from error
    return shape


def known(path: Path) -> Cache:
    """What the file holds already. Raises ConfigError where it must not be written over: nobody measures for
    minutes only to hear that."""
    try:
        return cache.read(path)
    except CacheError as error:
        if error.old:
            return {}
        raise ConfigError(f"{error}; move it away, or name another file in {cache.VARIABLE}.") from error


def run(options: Options, job: Job, path: Path, old: Cache) -> None:
    """Measures on all ranks; the first prints and writes."""
    import torch

    from pyruntime.comm import transport_of
    from pyruntime.tuning.linears import linears_of
    from pyruntime.tuning.place import device_name, library

    torch.set_num_threads(job.threads)
    with start(options.device, job.tp) as runtime:
        device = torch.device(runtime.mesh.device_type)
        first = started_rank() == 0
        check_variants(options, device.type)
        linears = linears_of(job.shape, runtime.tp, job.rows)
        found, left_out = measure_all(options, job, runtime, linears)
        told = tell_variants(options, job, runtime, linears) if options.variants else []
        place = Place(
            device_name(device.type, job.threads),
            job.tp,
            transport_of(runtime.tp).split(",")[0],
            library(),
        )
        if not first:
            return
        print(
            f"{place.device}\n{job.tp} ranks over {place.transport}, {job.rows} rows, {job.dtype}, ", end=""
        )
        print(f"{library()}\n\n{table(found)}")
        for sentence in notes(found, left_out, options.budget) + told:
            print(sentence)
        if options.json:
            write_figures(options, place, found)
        store(path, cache.merged(old, place, choices(found)))
        count = sum(len(one.keys) for one in found)
        print(f'\n{count} choices are in {path}; tier="auto" starts from them in groups like this one.')


def start(device: str, tp: int) -> Runtime:
    """Joins the ranks: groups of `tp` neighbours, the others side by side with them as in training."""
    from pyruntime.cli.train import device_of
    from pyruntime.comm import Runtime

    return Runtime.start(tp=tp, dp=started_ranks() // tp, device=device_of("--device", device))


def measure_all(
    options: Options, job: Job, runtime: Runtime, linears: list[Linear]
) -> tuple[list[Measured], list[str]]:
    """What was measured, and the names of what the budget left out. What is left of the budget is shared out
    evenly, so what is quick leaves more to the others."""
    from pyruntime.train.run import DTYPES
    from pyruntime.tuning.measure import Problem, largest, measure

    device = device_of_rank(runtime)
    started, found, left_out = time.perf_counter(), [], []
    passes = [(linear, when) for linear in linears for when in ("forward", "backward")]
    problem = None
    for number, (linear, when) in enumerate(passes):
        left = options.budget - largest(time.perf_counter() - started)
        if left <= 0:
            left_out.append(f"{linear.name} {when}")
            continue
        if problem is None or problem.linear is not linear:
            problem = Problem(linear, runtime.tp, DTYPES[job.dtype], device)
        found.append(measure(problem, when, options.rounds, left / (len(passes) - number)))
    return found, left_out


def tell_variants(options: Options, job: Job, runtime: Runtime, linears: list[Linear]) -> list[str]:
    """A sentence for each product: whether tiles that are not built in would be quicker."""
    from pyruntime.train.run import DTYPES
    from pyruntime.tuning.measure import Problem
    from pyruntime.tuning.tile_variants import time_variants

    device, told = device_of_rank(runtime), []
    for linear in linears:
        problem = Problem(linear, runtime.tp, DTYPES[job.dtype], device)
        for when in ("forward", "backward"):
            told.append(time_variants(problem, when, options.rounds).sentence())
    return told


def device_of_rank(runtime: Runtime) -> torch.device:
    """Where this rank's operands lie."""
    import torch

    device = torch.device(runtime.mesh.device_type)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def choices(found: list[Measured]) -> Choices:
    """For the file."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {key: Choice.of(one.way, one.tiers, one.rounds, date) for one in found for key in one.keys}


def store(path: Path, everything: Cache) -> None:
    try:
        cache.write(path, everything)
    except OSError as error:
        raise ConfigError(f"the tuning file {path} cannot be written: {error.strerror}.") from error


def table(found: list[Measured]) -> str:
    """A line for each pass of each linear, times in ms. What differs from line to line, numbers of chunks and
    tiles, stands behind the choice."""
    tiers = list(dict.fromkeys(name for one in found for name in one.tiers if ":" not in name))
    lines = [["linear", "pass", "rows", "n", "k", "T_g ms", "T_c", *tiers, "R", "E", "choice"]]
    tried = [
        ", ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in one.tiers.items() if ":" in name)
        for one in found
    ]
    if any(tried):
        lines[0].append("also tried")
    for one, others in zip(found, tried, strict=True):
        linear = one.linear
        times = [one.gemm, one.collective, *(one.tiers.get(name) for name in tiers)]
        lines.append(
            [linear.name, one.when, str(linear.rows), str(linear.n), str(linear.k)]
            + ["-" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in times]
            + [f"{one.bound_ratio:.3f}", f"{one.efficiency:.2f}", one.way]
            + ([others] if any(tried) else [])
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = (zip(line, widths, range(len(line)), strict=True) for line in lines)
    return "\n".join(
        "  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for cell, width, at in line).rstrip()
        for line in texts
    )


def notes(found: list[Measured], left_out: list[str], budget: float) -> list[str]:
    """How it was measured, and what was not."""
    rounds = sorted({one.rounds for one in found})
    counted = str(rounds[0]) if len(set(rounds)) == 1 else f"{rounds[0]} to {rounds[-1]}"
    said = [f"\nMedians of {counted} interleaved rounds, of the slowest rank; random data."]
    refused = {name: why for one in found for name, why in one.refused.items()}
    said += [f"{name} was not measured: {why}" for name, why in refused.items()]
    if left_out:
        said.append(f"Not measured, as the budget of {budget:g} s was used up: {', '.join(left_out)}.")
    return said


def write_figures(options: Options, place: Place, found: list[Measured]) -> None:
    document: dict[str, Any] = {
        "options": dataclasses.asdict(options),
        "place": dataclasses.asdict(place),
        "results": [
            dataclasses.asdict(one) | {"way": one.way, "R": one.bound_ratio, "E": one.efficiency}
            for one in found
        ],
    }
    try:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {options.json} cannot be written: {error.strerror}.") from error
