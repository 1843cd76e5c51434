"""`python -m pyruntime report RUN_DIR`: one page about a run, for a browser."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Annotated

import tyro

from pyruntime.cli.arguments import parse, writing
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import read_config
from pyruntime.overlap.files import RankLedger, read
from pyruntime.overlap.page import Prediction, page
from pyruntime.overlap.trace import chrome_trace
from pyruntime.plan.cluster import find_cluster
from pyruntime.train import config_file, metrics
from pyruntime.train.config import mesh_of, with_pieces
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.planned import estimate, planned, predicted
from pyruntime.train.resolved import resolve, settled
from pyruntime.train.validate.watching import why_not_predicted

DESCRIPTION = """Writes RUN_DIR/report.html: curves, and of a run with --train.ledger true where a step's time
went, which bytes were hidden behind which operators, and the timeline of the last step. It needs no network.
Beside it RUN_DIR/trace.json has that timeline for chrome://tracing and Perfetto."""
PAGE, TRACE = "report.html", "trace.json"


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Folder of a run, as train names it."""
    cluster: str = ""
    """TOML file of `plan --measure`, or the name of a known cluster, to predict the step by; empty: the run's
    output.cluster, and where it has none memory alone is predicted."""


def main(argv: list[str]) -> None:
    options = parse(ReportOptions, argv, "report", DESCRIPTION)
    run_dir = Path(options.run_dir)
    if options.cluster:
        with refusing("--cluster: "):
            find_cluster(options.cluster)
    with refusing(kinds=(OSError,)):
        if not (run_dir / metrics.FILE_NAME).is_file():
            raise ConfigError(f"{run_dir} is no run folder: it has no {metrics.FILE_NAME}.")
    steps = metrics.read(run_dir / metrics.FILE_NAME)
    with refusing(kinds=(ValueError, OSError)):
        ledgers = read(run_dir)
        plan = _plan(run_dir, steps, ledgers, options.cluster)
    with writing(str(run_dir / PAGE)):
        text = page(run_dir.resolve().name, _facts(steps, ledgers), steps, ledgers, plan)
        (run_dir / PAGE).write_text(text, encoding="utf-8")
        if ledgers:
            (run_dir / TRACE).write_text(json.dumps(chrome_trace(ledgers), allow_nan=False), encoding="utf-8")
    beside = f", {run_dir / TRACE}" if ledgers else " (it kept no ledger: --train.ledger true)"
    print(f"{run_dir / PAGE}{beside}")


def _plan(run_dir: Path, steps: list[dict], ledgers: list[RankLedger], cluster: str) -> Prediction:
    """The planner's memory of the fullest rank and seconds of a step, beside what the run measured."""
    if not (run_dir / "model" / "config.json").is_file():
        return Prediction(words="The planner's estimate needs the model that a run leaves at its end.")
    config = with_pieces(config_file.load(run_dir / "config.toml"))
    cluster = cluster or config.output.cluster
    if config.train.dtype != "bf16":
        return Prediction(words="The planner's estimates are of bf16.")
    if not ledgers and config.parallel.tp is None:
        return Prediction(words="How many ranks this run had is in its ledger only (--train.ledger true).")
    shape = LlamaConfig.from_hf(read_config(run_dir / "model"))
    run = resolve(settled(config, shape), shape, len(ledgers) or mesh_of(config, 1).ranks)
    job, mesh = planned(run, find_cluster(cluster or "dgx-h100"))
    fullest = estimate(run, find_cluster(cluster) if cluster else None)
    words = "A step is predicted with --cluster FILE, which `plan --measure FILE` writes."
    if cluster:
        why = why_not_predicted(config)
        words = why and f"No step is predicted: {why}."
    seconds = None if words else predicted(job, mesh)
    return Prediction(
        words=words,
        # Parts of a step; what is there while the model is made is not one of them.
        memory=dataclasses.asdict(dataclasses.replace(fullest, start=0.0)),
        measured_memory=max(_measured(steps, "memory_bytes"), default=None),
        step=dataclasses.asdict(seconds) if seconds else None,
        measured_step=statistics.median(times) if (times := _measured(steps, "step_time_s")) else None,
    )


def _measured(steps: list[dict], name: str) -> list[float]:
    """A figure of all steps that have it."""
    return [line[name] for line in steps if line.get(name) is not None and math.isfinite(line[name])]


def _facts(steps: list[dict], ledgers: list[RankLedger]) -> str:
    ranks = f"{len(ledgers)} ranks" if len(ledgers) > 1 else "1 rank"
    mesh = {axis: 1 + max(ledger.coordinate[axis] for ledger in ledgers) for axis in _axes(ledgers)}
    spread = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    parts = [f"{len(steps)} steps"]
    if ledgers:
        parts.append(f"{ranks}{spread and ': ' + spread}")
    return "; ".join(parts)


def _axes(ledgers: list[RankLedger]) -> tuple[str, ...]:
    return tuple(ledgers[0].coordinate) if ledgers else ()
