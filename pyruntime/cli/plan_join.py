"""`python -m pyruntime plan --join CLUSTER`: one pipeline across two clusters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.holmes import Across, search_across
from pyruntime.plan.mesh import Job
from pyruntime.plan.report import columns
from pyruntime.plan.trainer import toml
from pyruntime.train.errors import ConfigError

if TYPE_CHECKING:
    from pyruntime.cli.plan import Options


def main(options: Options) -> None:
    """Prints the fastest meshes over both clusters, and writes the first for the trainer where asked to."""
    from pyruntime.cli.plan import job_of, rules_of

    if not options.join_bandwidth > 0:
        raise ConfigError(f"--join_bandwidth must be above 0, found {options.join_bandwidth}.")
    try:
        job = job_of(options)
        clusters = [job.cluster, find_cluster(options.join)]
        found = search_across(job, clusters, options.join_bandwidth, options.overlap, rules_of(options))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not found:
        raise ConfigError(
            f"No pipeline of {job.gpus} GPUs over {job.cluster.name} and {options.join} fits "
            f"{job.model.name}; take "
            "more GPUs."
        )
    own = job.gpus // 2
    print(f"{job.model.name}: {own} GPUs of {clusters[0].name}, then {own} of {clusters[1].name}\n")
    print(_table(job, found[: options.top]))
    if options.config:
        best = found[0]
        head = f"{best.mesh.text()}: predicted {best.total:.3f} s a step, with {options.join}."
        try:
            Path(options.config).write_text(toml(job, best.mesh, head, best.layers), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}.") from error


def _table(job: Job, found: list[Across]) -> str:
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
