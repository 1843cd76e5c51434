"""`python -m pyruntime report RUN_DIR`: writes one HTML page about a run."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from pathlib import Path
from typing import Annotated

import tyro

from pyruntime.cli.arguments import parse, writing
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import read_config
from pyruntime.overlap.files import RankLedger, read
from pyruntime.overlap.page import DATE, Prediction, page, ranks_in_words
from pyruntime.overlap.trace import chrome_trace
from pyruntime.plan.cluster import find_cluster
from pyruntime.text import short_repr
from pyruntime.train import config_file, metrics, resolved, samples
from pyruntime.train.config import MeshSizes, RunConfig, mesh_of, with_pieces
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.planned import estimate, planned, predicted
from pyruntime.train.resolved import resolve, settled
from pyruntime.train.validate.watching import why_not_predicted

DESCRIPTION = """Writes RUN_DIR/report.html: the exposed share of a step and curves. For a run with
--train.ledger true also why it is exposed, where a step's time went, which bytes were hidden behind which
operators, and the timeline of the last step. The page needs no network. RUN_DIR/trace.json has that timeline
for chrome://tracing and Perfetto."""
PAGE, TRACE = "report.html", "trace.json"


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Folder of a run, as train names it."""
    cluster: str = ""
    """Cluster to predict the step for: a TOML file of `plan --measure`, or a known name. Empty: the run's
    output.cluster; if it has none, only memory is predicted."""


def main(argv: list[str]) -> None:
    options = parse(ReportOptions, argv, "report", DESCRIPTION)
    run_dir = Path(options.run_dir)
    if options.cluster:
        with refusing("--cluster: "):
            find_cluster(options.cluster)
    with refusing(kinds=(OSError,)):
        if not (run_dir / metrics.FILE_NAME).is_file():
            raise ConfigError(f"{run_dir} is not a run folder: it has no {metrics.FILE_NAME}.")
    steps = metrics.read(run_dir / metrics.FILE_NAME)
    with refusing(kinds=(ValueError, OSError)):
        ledgers = read(run_dir)
        mesh = _mesh(run_dir, ledgers)
        plan = _plan(run_dir, steps, mesh, options.cluster)
        facts = _facts(run_dir, steps, mesh)
        said = samples.read(run_dir)
        if not ledgers:
            facts["ledger"] = "none; --train.ledger true keeps one"
    with writing(str(run_dir / PAGE)):
        text = page(run_dir.resolve().name, facts, steps, ledgers, plan, said)
        (run_dir / PAGE).write_text(text, encoding="utf-8")
        if ledgers:
            (run_dir / TRACE).write_text(json.dumps(chrome_trace(ledgers), allow_nan=False), encoding="utf-8")
    beside = f", {run_dir / TRACE}" if ledgers else " (it kept no ledger: --train.ledger true)"
    print(f"{run_dir / PAGE}{beside}")


def _plan(run_dir: Path, steps: list[dict], mesh: dict[str, int], cluster: str) -> Prediction:
    """Returns predicted memory of the fullest rank and seconds of a step, beside the measured ones."""
    if not (run_dir / "model" / "config.json").is_file():
        return Prediction(words="The planner's estimate needs the model that a run writes at its end.")
    config = with_pieces(config_file.load(run_dir / "config.toml"))
    cluster = cluster or config.output.cluster
    if config.train.dtype != "bf16":
        return Prediction(words="The planner's estimates are for bf16 runs only.")
    if not mesh and config.parallel.tp is None:
        return Prediction(
            words=f"The number of ranks of this run is only in its {resolved.FILE_NAME}, which is missing."
        )
    shape = LlamaConfig.from_hf(read_config(run_dir / "model"))
    run = resolve(
        settled(config, shape), shape, math.prod(mesh.values()) if mesh else mesh_of(config, 1).ranks
    )
    job, planned_mesh = planned(run, find_cluster(cluster or "dgx-h100"))
    fullest = estimate(run, find_cluster(cluster) if cluster else None)
    words = "A step is predicted with --cluster FILE, which `plan --measure FILE` writes."
    if cluster:
        why = why_not_predicted(config)
        words = why and f"No step is predicted: {why}."
    seconds = None if words else predicted(job, planned_mesh)
    return Prediction(
        words=words,
        # Only parts of a step, so without the memory while the model is made.
        memory=dataclasses.asdict(dataclasses.replace(fullest, start=0.0)),
        measured_memory=max(_measured(steps, "memory_bytes"), default=None),
        step=dataclasses.asdict(seconds) if seconds else None,
        measured_step=statistics.median(times) if (times := _measured(steps, "step_time_s")) else None,
    )


def _measured(steps: list[dict], name: str) -> list[float]:
    """Returns a figure of all steps that have a finite one."""
    return [line[name] for line in steps if line.get(name) is not None and math.isfinite(line[name])]


def _mesh(run_dir: Path, ledgers: list[RankLedger]) -> dict[str, int]:
    """Returns the ranks of every axis; empty if the run has not written them. Raises ValueError."""
    if ledgers:
        return {axis: 1 + max(each.coordinate[axis] for each in ledgers) for axis in ledgers[0].coordinate}
    path = run_dir / resolved.FILE_NAME
    if not path.is_file():
        return {}
    try:
        mesh = json.loads(path.read_text(encoding="utf-8"))["mesh"]
        sizes = {axis: size for axis, size in mesh.items() if (axis, size) != ("ep", None)}
        if not all(type(size) is int and 0 < size < 2**31 for size in sizes.values()):
            raise ValueError("sizes are whole numbers from 1")
        return MeshSizes(**sizes).axes
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} does not hold the mesh of a run: {short_repr(str(error))}.") from error


def _facts(run_dir: Path, steps: list[dict], mesh: dict[str, int]) -> dict[str, str]:
    """Returns date, model, ranks and the command that repeats the run, as far as the folder has them."""
    ended = (run_dir / metrics.FILE_NAME).stat().st_mtime
    facts = {"last step": time.strftime(DATE, time.localtime(ended)), "steps": f"{len(steps)}"}
    ranks = math.prod(mesh.values())
    if mesh:
        facts["ranks"] = ranks_in_words(ranks, mesh)
    if (run_dir / "config.toml").is_file():
        config = with_pieces(config_file.load(run_dir / "config.toml"))
        facts["model"] = _model(run_dir, config)
        if config.pipeline.skip:
            facts["skipped"] = (
                f"every micro-batch skipped {config.pipeline.skip} of {config.parallel.pp} pipeline stages"
            )
        facts["steps"] += f" of {config.train.batch_size} sequences of {config.train.seq_len} tokens"
        start = f"torchrun --nproc-per-node {ranks}" if ranks > 1 else "python"
        facts["repeat"] = (
            f"{start} -m pyruntime train --config {run_dir / 'config.toml'} --output.run_dir NEW"
        )
    return facts


def _model(run_dir: Path, config: RunConfig) -> str:
    parts = [config.model.init_from or config.model.preset, config.train.dtype]
    if (run_dir / "model" / "config.json").is_file():
        count = LlamaConfig.from_hf(read_config(run_dir / "model")).parameter_count()
        parts.insert(1, f"{count / 1e6:,.1f} million parameters")
    return ", ".join(parts)
