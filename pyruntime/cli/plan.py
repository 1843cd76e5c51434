"""`python -m pyruntime plan`: which mesh fits, which is fastest, and how much communication stays exposed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pyruntime.choices import Offloading, OptimizerName, Overlap, Rounding
from pyruntime.cli.arguments import check_at_least, parse, writing
from pyruntime.cli.plan_facts import Asked, find_model, toml
from pyruntime.plan import findings
from pyruntime.plan.breakdown import explain
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.holmes import Across, search_across
from pyruntime.plan.mesh import Job, sequences
from pyruntime.plan.search import Candidate, Result, SearchSpace, each_shape, search
from pyruntime.plan.step import Predictor
from pyruntime.text import columns
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.planned import rules_of

DESCRIPTION = """Searches all legal meshes of a cluster's GPUs for a model. It drops those that would need
more than 80 percent of a GPU's memory in the trainer, predicts a step of the others, and shows the fastest
that the trainer runs, with their exposed communication. Below stand faster meshes that the trainer does not
run yet, and why. No GPU is needed and nothing is started. A star marks meshes that no other beats in both
time and memory."""

OTHERS = 3
"""Most lines for faster meshes that the trainer does not run."""
SUFFIXES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    model: str = "llama3-8b"
    """Name of a known model, in any spelling (llama-3-70b, gpt-145.6b), or a Hugging Face folder or its
    config.json."""
    gpus: int = 8
    """Number of GPUs, in whole nodes."""
    cluster: str = "dgx-h100"
    """Name of a known cluster, or a TOML file that describes one."""
    tokens_per_step: str = "4M"
    """Tokens of an optimizer step; K, M and G are powers of 1024."""
    seq: int = 8192
    """Tokens of a sequence."""
    tokens: float = 1e12
    """Tokens of the whole training, for its cost in GPU hours."""
    overlap: Overlap = "fused"
    """How transfers are hidden."""
    rounding: Rounding = "nearest"
    """Rounding of bf16 weights; stochastic saves 4 bytes a parameter."""
    optimizer: OptimizerName = "adamw"
    """Optimizer of the layers' matrices; muon stores one moment and spends operations to orthogonalize it."""
    offload: Offloading = "none"
    """Optimizer states outside the memory of the GPUs; their copies are not in the seconds of a step."""
    top: int = 10
    """Meshes to show."""
    variants: bool = False
    """Whether to show meshes of the same sizes again with other schedules or ZeRO stages."""
    risky: bool = False
    """Whether to show meshes that need 80 to 100 percent of the memory."""
    only_runnable: bool = False
    """Whether to leave out faster meshes that the trainer cannot run yet."""
    axonn: bool = True
    """Whether to search AxoNN's 4D meshes."""
    co2: bool = True
    """Whether to search CO2, which averages parameters once in tau steps."""
    recompute: bool = True
    """Whether to search activation checkpointing."""
    explain: int = 0
    """Line of the table whose mesh is explained part by part; 0: none."""
    json: str = ""
    """File to write the shown meshes and the Pareto front to; empty: none."""
    plot: str = ""
    """PNG file to draw all meshes into, time against memory; empty: none."""
    config: str = ""
    """TOML file to write for the trainer, with the mesh of --explain or else the first; empty: none."""
    join: str = ""
    """Second cluster: each gives half of --gpus, and a pipeline runs across both, with layers divided by
    their speed. Empty: none."""
    join_bandwidth: float = 1.25e9
    """Bytes/s from one rank to a rank of the other cluster."""
    measure: str = ""
    """TOML file for measurements of this machine (under torchrun also links); replaces the search."""


def main(argv: list[str]) -> None:
    options = parse(PlanOptions, argv, "plan", DESCRIPTION)
    if options.measure:
        from pyruntime.cli import plan_measure  # imports torch

        plan_measure.main(options.measure)
        return
    check_at_least(options, 1, "top", "gpus", "seq")
    if options.explain < 0:
        raise ConfigError(f"--explain must be at least 0, found {options.explain}.")
    if not options.tokens > 0:
        raise ConfigError(f"--tokens must be above 0, found {options.tokens}.")
    if options.config and not options.config.endswith(".toml"):
        raise ConfigError(
            f"--config is the file that plan writes, NAME.toml, found {options.config!r}; to plan for a "
            "model, name it with --model."
        )
    if options.join:
        _join(options)
        return
    started = time.perf_counter()
    choice = SearchSpace(axonn=options.axonn, co2=options.co2, recompute=options.recompute)
    with refusing():
        job = job_of(options)
        rules = rules_of(job.cluster)
        result = search(job, choice, overlap=options.overlap, rules=rules, risky=options.risky)
    if not result.candidates:
        raise ConfigError(findings.nothing_fits(result))
    seconds = time.perf_counter() - started
    asked = Asked(job)
    shown = _shown(options, result, asked)
    print(findings.heading(result, seconds))
    print()
    print(findings.table(result, shown, asked.refusal, options.tokens))
    print("\n" + findings.verdict(result, shown, asked.refusal))
    print(f"\nGPU hours are for {options.tokens:.3g} tokens. --explain N explains line N.")
    if options.explain > len(shown):
        raise ConfigError(
            f"--explain {options.explain}: the table has {len(shown)} lines; use 1 to {len(shown)}."
        )
    if options.explain:
        predictor = Predictor(job, options.overlap, sums_whole=rules.sums_whole, head_rows=rules.head_rows)
        print("\n" + explain(predictor, shown[options.explain - 1], asked.refusal))
    _write(options, result, shown, asked)


def job_of(options: PlanOptions) -> Job:
    tokens = parse_tokens(options.tokens_per_step)
    model, cluster = find_model(options.model), find_cluster(options.cluster)
    batch = sequences(tokens, options.seq)
    rounding, optimizer = options.rounding, options.optimizer
    if optimizer == "muon" and rounding != "nearest":
        raise ValueError(
            f"--rounding {rounding} works only with --optimizer adamw, found muon; leave --rounding out."
        )
    if optimizer == "muon" and options.offload != "none":
        raise ValueError(
            f"--offload {options.offload} works only with --optimizer adamw, found muon; leave --offload out."
        )
    return Job(
        model,
        cluster,
        options.gpus,
        batch,
        options.seq,
        rounding=rounding,
        optimizer=optimizer,
        offload=options.offload,
    )


def parse_tokens(text: str) -> int:
    """Reads 4M as 4 * 2^20. Raises ValueError unless it is a whole number above 0 (K, M, G allowed)."""
    plain = text.strip().lower()
    digits = plain.rstrip("kmg")
    suffix = plain[len(digits) :]
    try:
        tokens = float(digits) * SUFFIXES[suffix]
    except (ValueError, KeyError):
        tokens = 0.0
    if not 1 <= tokens < 2**60 or tokens != int(tokens):
        raise ValueError(
            f"--tokens_per_step {text} is no number of tokens; write it as 4194304, 4096K or 4M (4 * 2^20)."
        )
    return int(tokens)


def _shown(options: PlanOptions, result: Result, asked: Asked) -> list[Candidate]:
    """Returns the meshes that the trainer runs, fastest first, then faster ones that it does not run."""

    def runs(candidate: Candidate) -> bool:
        return asked.refusal(candidate.mesh) is None

    def first(wanted: Callable[[Candidate], bool], most: int) -> list[Candidate]:
        kept: Iterable[Candidate] = filter(wanted, result.candidates)
        if not options.variants:
            kept = each_shape(result.candidates, wanted)
        return list(itertools.islice(kept, most))

    shown = first(runs, options.top)
    if options.only_runnable:
        if not shown:
            raise ConfigError(
                "The trainer runs none of the meshes that fit; see them without --only_runnable True."
            )
        return shown
    ahead = shown[0].total if shown else math.inf
    most = min(options.top, OTHERS) if shown else options.top
    return shown + first(lambda each: each.total < ahead and not runs(each), most)


def _write(options: PlanOptions, result: Result, shown: list[Candidate], asked: Asked) -> None:
    if options.json:
        _save(options.json, findings.document(result, shown, asked.refusal, options.tokens) + "\n")
    if options.plot:
        from pyruntime.plan.plot import png  # imports matplotlib

        with writing(f"{options.plot}:"):
            png(result, shown, options.plot)
    if options.config:
        _save(options.config, _config(options, result, shown, asked))


def _config(options: PlanOptions, result: Result, shown: list[Candidate], asked: Asked) -> str:
    chosen = shown[options.explain - 1 if options.explain else 0]
    why = asked.refusal(chosen.mesh)
    if why is not None and options.explain:
        raise ConfigError(f"--config: the trainer does not run line {options.explain}: {why}")
    if why is not None:
        raise ConfigError("--config: the trainer runs none of the meshes that fit.")
    job = result.job
    head = (
        f"{chosen.mesh.text()}: predicted {chosen.total:.3f} s a step and "
        f"{chosen.memory.total / findings.GB:.1f} GB a rank on {job.gpus} x {job.cluster.gpu}.\n"
        f"python -m pyruntime train --config THIS --dry_run {job.gpus} checks it without starting anything."
    )
    return toml(job, chosen.mesh, head, options.cluster)


def _save(path: str, text: str) -> None:
    with writing(f"{path}:"):
        Path(path).write_text(text, encoding="utf-8")


def _join(options: PlanOptions) -> None:
    """Prints the fastest meshes over both clusters; with --config writes the first for the trainer."""
    if not options.join_bandwidth > 0:
        raise ConfigError(f"--join_bandwidth must be above 0, found {options.join_bandwidth}.")
    with refusing():
        job = job_of(options)
        clusters = [job.cluster, find_cluster(options.join)]
        found = search_across(job, clusters, options.join_bandwidth, options.overlap, rules_of(job.cluster))
    if not found:
        raise ConfigError(
            f"No pipeline of {job.gpus} GPUs over {job.cluster.name} and {options.join} fits "
            f"{job.model.name}; take more GPUs."
        )
    own = job.gpus // 2
    print(f"{job.model.name}: {own} GPUs of {clusters[0].name}, then {own} of {clusters[1].name}\n")
    print(_table_across(job, found[: options.top]))
    best = found[0]
    mesh = dataclasses.replace(best.mesh, layers=best.layers)
    of_both = dataclasses.replace(clusters[0], gpus_per_node=min(own, clusters[0].gpus_per_node), rings=())
    why = Asked(dataclasses.replace(job, cluster=of_both)).refusal(mesh)
    print(f"\nThe trainer does not run the first: {why}" if why else "\nThe trainer runs the first.")
    if options.config:
        if why:
            raise ConfigError(f"--config: the trainer does not run the first: {why}")
        head = f"{best.mesh.text()}: predicted {best.total:.3f} s a step, with {options.join}."
        _save(options.config, toml(job, mesh, head))


def _table_across(job: Job, found: list[Across]) -> str:
    rows = [
        [
            str(number),
            each.mesh.text(),
            f"{each.total:.3f}",
            f"{job.tokens / each.total / job.gpus:,.0f}",
            " ".join(map(str, each.layers)),
        ]
        for number, each in enumerate(found, 1)
    ]
    return columns(["", "mesh", "step s", "tok/s/GPU", "layers of the stages"], rows, left=(1, 4))
