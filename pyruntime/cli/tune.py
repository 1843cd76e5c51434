"""`python -m pyruntime tune`: measures which tier is fastest for a model's linears on this machine."""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyruntime.choices import DeviceName, Dtype
from pyruntime.cli.arguments import check_at_least, parse, writing
from pyruntime.cli.environment import check_started, started_rank, started_ranks
from pyruntime.cli.train import device_of, threads
from pyruntime.text import columns
from pyruntime.train import config_file, validate
from pyruntime.train.config import RunConfig, Train, mesh_of
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.tuning import cache
from pyruntime.tuning.cache import Cache, CacheError, Choice, Choices, Place

if TYPE_CHECKING:
    from pyruntime.comm import Runtime
    from pyruntime.llama.config import LlamaConfig
    from pyruntime.tuning.linears import RankLinear
    from pyruntime.tuning.measure import Measured

DESCRIPTION = """Times the tiers of every linear of a model, forward and backward, beside the GEMM and the
collective alone, on the ranks that torchrun started. Where there is a choice it tries several numbers of
chunks and tiles. It stores the fastest in a file that tier="auto" reads: torchrun --nproc-per-node P -m
pyruntime tune --model NAME | --config FILE. The file is tuning.json in the user's cache folder, or the one
that the environment variable PYRUNTIME_TUNING names."""
DEFAULT_SEQ_LEN = 2048


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    model: str = ""
    """Name of a Llama, in any spelling (llama-3-8b, 3m), or a Hugging Face folder; or give --config."""
    config: str = ""
    """TOML file or preset of the trainer with model, sizes and type to tune for; or give --model."""
    micro_batch_size: int = 0
    """Sequences of a forward pass; 0: the configuration's, or 1."""
    seq_len: int = 0
    """Tokens of a sequence; 0: the configuration's, or 2048."""
    tp: int = 0
    """Ranks of a tensor-parallel group, a divisor of those started; 0: the configuration's, or all."""
    dtype: Literal[""] | Dtype = ""
    """Type of weights and activations; empty: the configuration's, or bf16."""
    device: DeviceName = "auto"
    """Device of the operands."""
    rounds: int = 15
    """Rounds of each measurement, at least 3."""
    budget: float = 120.0
    """Seconds for all measurements. If they do not suffice there are fewer rounds, at least 3, and the last
    linears are left out."""
    variants: bool = False
    """Whether to time the GEMM alone on GPUs with tiles that the kernel library lacks too, compiled at run
    time through cupy. Compiling takes minutes, which --budget does not count."""
    json: str = ""
    """File to write all figures to; empty: none."""


@dataclasses.dataclass(frozen=True)
class TunedModel:
    shape: LlamaConfig
    tp: int
    rows: int
    """Tokens of a forward pass, over the ranks of a tensor-parallel group."""
    dtype: str
    threads: int
    """CPU threads of a rank."""


def main(argv: list[str]) -> None:
    options = parse(TuneOptions, argv, "tune", DESCRIPTION)
    check(options)
    check_started()
    ranks = started_ranks()
    if ranks == 1:
        raise ConfigError(
            "tune measures how GEMMs and transfers overlap, and one rank sends nothing; start it with "
            "torchrun --nproc-per-node P -m pyruntime tune, where P is the number of tensor-parallel ranks."
        )
    job = job_of(options, ranks)
    path = cache.default_path()
    old = known(path) if started_rank() == 0 else {}
    run(options, job, path, old)


def check(options: TuneOptions) -> None:
    if bool(options.model) == bool(options.config):
        raise ConfigError("tune needs either --model NAME or --config FILE.")
    check_at_least(options, 0, "micro_batch_size", "seq_len", "tp")
    check_at_least(options, 3, "rounds")
    validate.check_seconds("--budget", options.budget)
    check_variants(options, options.device)


def check_variants(options: TuneOptions, device: str) -> None:
    if options.variants and device == "cpu":
        raise ConfigError(
            "--variants times GPU kernels, and the operands are on the CPU; leave --variants out."
        )


def job_of(options: TuneOptions, ranks: int) -> TunedModel:
    """Returns the model, from a configuration or by its name, and its sizes. Raises ConfigError."""
    from pyruntime.train.data.tokenizer import open_tokenizer
    from pyruntime.train.shape import llama_config

    if options.config:
        config = config_file.load(config_file.find(options.config), ranks)
    else:
        seq_len = options.seq_len or DEFAULT_SEQ_LEN
        config = RunConfig(train=Train(micro_batch_size=1, seq_len=seq_len, dtype="bf16"))
    parallel, train = config.parallel, config.train
    tp = options.tp or mesh_of(config, ranks).tp
    if tp < 2 or ranks % tp:
        raise ConfigError(
            f"tp={tp} does not fit the {ranks} started ranks; tp must be at least 2 and divide them."
        )
    seq_len = options.seq_len or train.seq_len
    if options.config:
        vocabulary = open_tokenizer(
            config.data.tokenizer, config.model.init_from, config.data.paths
        ).vocab_size
        shape = llama_config(config.model, vocabulary, seq_len, tp)
    else:
        shape = named(options.model, tp)
    return TunedModel(
        shape=shape,
        tp=tp,
        rows=(options.micro_batch_size or train.micro_batch_size) * seq_len // parallel.cp,
        dtype=options.dtype or train.dtype,
        threads=threads(train.threads, ranks),
    )


def named(name: str, tp: int) -> LlamaConfig:
    """Returns the shape of a known Llama. Raises ConfigError."""
    from pyruntime.cli.plan_facts import find_model
    from pyruntime.llama.config import LlamaConfig
    from pyruntime.llama.hf import read_config
    from pyruntime.llama.presets import preset

    with refusing("--model: "):
        found = find_model(name)
        if not found.preset and not found.folder:
            raise ValueError(f"{name} is not a Llama with a preset of the trainer.")
        shape = LlamaConfig.from_hf(read_config(found.folder)) if found.folder else preset(found.preset)
        shape.check_tp(tp)
    return shape


def known(path: Path) -> Cache:
    """Returns the file's contents. Raises ConfigError now if it must not be overwritten in the end."""
    try:
        return cache.read(path)
    except CacheError as error:
        if error.old:
            return {}
        raise ConfigError(f"{error}; move it away, or name another file in {cache.VARIABLE}.") from error


def run(options: TuneOptions, job: TunedModel, path: Path, old: Cache) -> None:
    """Measures on all ranks; rank 0 prints and writes."""
    import torch

    from pyruntime.comm import Runtime, transport_of
    from pyruntime.tuning.apply import device_name, library
    from pyruntime.tuning.linears import linears_of

    torch.set_num_threads(job.threads)
    placed = device_of("--device", options.device)
    # Groups of tp neighbours work at the same time, as in training.
    with Runtime.start(tp=job.tp, dp=started_ranks() // job.tp, device=placed) as runtime:
        device = runtime.device.type
        check_variants(options, device)
        linears = linears_of(job.shape, runtime.tp, job.rows)
        found, left_out = measure_all(options, job, runtime, linears)
        gemms = measure_gemms(job, runtime, linears)
        told = tell_variants(options, job, runtime, linears) if options.variants else []
        place = Place(
            device_name(device, job.threads),
            job.tp,
            transport_of(runtime.tp).split(",")[0],
            library(),
        )
        if started_rank() != 0:
            return
        print(
            f"{place.device}\n{job.tp} ranks over {place.transport}, {job.rows} rows, {job.dtype}, ", end=""
        )
        print(f"{library()}\n\n{table(found)}")
        for sentence in notes(found, left_out, options.budget) + told:
            print(sentence)
        if gemms:
            print(f"\n{gemm_table(gemms)}")
        if options.json:
            write_figures(options, place, found)
        with writing(f"the tuning file {path}"):
            cache.write(path, cache.merged(old, place, choices(found) | gemms))
        count = sum(len(one.keys) for one in found) + len(gemms)
        print(f'\n{count} choices are in {path}; tier="auto" takes them in groups like this one.')


def measure_all(
    options: TuneOptions, job: TunedModel, runtime: Runtime, linears: list[RankLinear]
) -> tuple[list[Measured], list[str]]:
    """Returns the measurements, and the names of those that the budget left out. The rest of the budget is
    divided evenly each time, so a quick measurement leaves more to the others."""
    from pyruntime.train.model_of_run import DTYPES
    from pyruntime.tuning.measure import Problem, largest, measure

    started, found, left_out = time.perf_counter(), [], []
    passes = [(linear, when) for linear in linears for when in ("forward", "backward")]
    problem = None
    for number, (linear, when) in enumerate(passes):
        left = options.budget - largest(time.perf_counter() - started)
        if left <= 0:
            left_out.append(f"{linear.name} {when}")
            continue
        if problem is None or problem.linear is not linear:
            problem = Problem(linear, runtime.tp, DTYPES[job.dtype], runtime.device)
        found.append(measure(problem, when, options.rounds, left / (len(passes) - number)))
    return found, left_out


def measure_gemms(job: TunedModel, runtime: Runtime, linears: list[RankLinear]) -> Choices:
    """Returns the faster GEMM of each product of each linear on the slowest rank; empty without a choice."""
    from pyruntime.comm.core import _C
    from pyruntime.tuning import gemms
    from pyruntime.tuning.measure import LEAST_ROUNDS, largest

    if runtime.device.type != "cpu" or job.dtype != "bf16" or not _C.has_own_gemm():
        return {}
    date, found = datetime.datetime.now(datetime.UTC).date().isoformat(), {}
    for rows, k, n in dict.fromkeys((linear.rows, linear.k, linear.n) for linear in linears):
        for product, seconds in gemms.measure(rows, k, n, LEAST_ROUNDS).items():
            slowest = {name: largest(value) for name, value in seconds.items()}
            key = cache.Key(gemms.op_of(product), rows, n, k, "bfloat16", "cpu")
            if gemms.is_of_gemm(key):  # leaves out the form that adds to its output
                found[key] = Choice(gemms.faster(slowest), slowest, LEAST_ROUNDS, date)
    return found


def gemm_table(found: Choices) -> str:
    """Returns a line for each product, times in ms."""
    rows = [
        [key.op, str(key.rows), str(key.n), str(key.k)]
        + [f"{one.seconds[name] * 1e3:.3f}" for name in ("ours", "library")]
        + [one.tier]
        for key, one in found.items()
    ]
    return columns(["product", "rows", "n", "k", "ours ms", "library", "choice"], rows, left=(0,))


def tell_variants(
    options: TuneOptions, job: TunedModel, runtime: Runtime, linears: list[RankLinear]
) -> list[str]:
    """Returns a sentence for each GEMM: whether tiles that are not built in would be faster."""
    from pyruntime.train.model_of_run import DTYPES
    from pyruntime.tuning.measure import Problem
    from pyruntime.tuning.tile_variants import time_variants

    problems = (Problem(linear, runtime.tp, DTYPES[job.dtype], runtime.device) for linear in linears)
    passes = ((problem, when) for problem in problems for when in ("forward", "backward"))
    return [time_variants(*each, options.rounds).sentence() for each in passes]


def choices(found: list[Measured]) -> Choices:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {key: Choice.of(one.best, one.tiers, one.rounds, date) for one in found for key in one.keys}


def table(found: list[Measured]) -> str:
    """Returns a line for each pass of each linear, times in ms. Chunk counts and tiles, which differ from
    line to line, stand behind the choice."""
    tiers = list(dict.fromkeys(name for one in found for name in one.tiers if ":" not in name))
    head = ["linear", "pass", "rows", "n", "k", "T_g ms", "T_c", *tiers, "R", "E", "choice"]
    tried = [
        ", ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in one.tiers.items() if ":" in name)
        for one in found
    ]
    if any(tried):
        head.append("also tried")
    rows = []
    for one, others in zip(found, tried, strict=True):
        linear = one.linear
        times = [one.gemm, one.collective, *(one.tiers.get(name) for name in tiers)]
        rows.append(
            [linear.name, one.when, str(linear.rows), str(linear.n), str(linear.k)]
            + ["-" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in times]
            + [f"{one.bound_ratio:.3f}", f"{one.efficiency:.2f}", one.best]
            + ([others] if any(tried) else [])
        )
    return columns(head, rows, left=(0, 1))


def notes(found: list[Measured], left_out: list[str], budget: float) -> list[str]:
    """Returns sentences on how it was measured and what was not."""
    rounds = sorted({one.rounds for one in found})
    counted = str(rounds[0]) if len(set(rounds)) == 1 else f"{rounds[0]} to {rounds[-1]}"
    said = [f"\nMedians of {counted} interleaved rounds, of the slowest rank; random data."]
    refused = {name: why for one in found for name, why in one.refused.items()}
    said += [f"{name} was not measured: {why}" for name, why in refused.items()]
    if left_out:
        said.append(f"Not measured, as the budget of {budget:g} s was used up: {', '.join(left_out)}.")
    return said


def write_figures(options: TuneOptions, place: Place, found: list[Measured]) -> None:
    document: dict[str, Any] = {
        "options": dataclasses.asdict(options),
        "place": dataclasses.asdict(place),
        "results": [
            dataclasses.asdict(one) | {"best": one.best, "R": one.bound_ratio, "E": one.efficiency}
            for one in found
        ],
    }
    with writing(f"--json: {options.json}"):
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
