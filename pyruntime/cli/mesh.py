"""`python -m pyruntime mesh`: which ranks of a run exchange data, over what transport, how many bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyruntime.cli import train
from pyruntime.cli.arguments import take_count
from pyruntime.cli.environment import started_ranks
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.traffic import bytes_of_step
from pyruntime.text import columns
from pyruntime.train.config import RunConfig, mesh_of
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.planned import planned
from pyruntime.train.resolved import check

DESCRIPTION = """Shows which ranks of a run exchange data: the groups of every axis, the transport between
them, and the bytes that a rank receives in a step by the planner's formulas. Takes the options of train
(--config FILE.toml or a preset, --section.key value), and --ranks N and --ranks_per_host N; the default is
the product of the axes, all on one host. Nothing is started."""
SHOWN = 4
"""Groups of an axis that are written out at most."""
BYTES = {"bf16": 2, "fp32": 4}


def main(argv: list[str]) -> None:
    ranks, argv = take_count(argv, "ranks")
    per_host, argv = take_count(argv, "ranks_per_host")
    config, _ = train.read(argv, ranks, "mesh", DESCRIPTION, others=("ranks", "ranks_per_host"))
    if ranks is None:
        least = mesh_of(config, 1).ranks
        ranks = least if config.parallel.tp is not None else max(least, started_ranks())
    print(report(config, ranks, min(per_host or ranks, ranks)))


def report(config: RunConfig, ranks: int, per_host: int) -> str:
    """Returns the table. Raises ConfigError if the run would be refused or hosts had unequal ranks."""
    run = check(config, ranks)
    chosen = config.data_parallel
    if not run.meets_every_step or chosen.compression != "none":
        raise ConfigError(
            f"data_parallel.method={chosen.method}, data_parallel.compression={chosen.compression}: mesh "
            "counts the bytes of uncompressed gradients in every step; leave both options out, or read "
            "outer_bytes and dp_bytes in the metrics of a run."
        )
    for key, wire in (
        ("data_parallel.weight_wire", chosen.weight_wire),
        ("parallel.tp_wire", config.parallel.tp_wire),
        ("pipeline.wire", config.pipeline.wire),
        ("context.wire", config.context.wire),
    ):
        if wire != "same":
            raise ConfigError(
                f"{key}={wire}: mesh counts only bytes that are not rounded; leave the option out, or read "
                "them in the metrics of a run."
            )
    if str(run.cuts):
        raise ConfigError(
            f"parallel.tp_speeds={list(config.parallel.tp_speeds)}: mesh counts the bytes of equal parts; "
            "leave the option out, or read those of each rank in the metrics of a run."
        )
    if ranks % per_host:
        raise ConfigError(f"--ranks_per_host={per_host} does not divide {ranks} ranks; use a divisor.")
    on_device = config.train.device == "cuda"
    cluster = Cluster.of_ranks(per_host, core_bandwidth=0.0 if on_device else 1.0)
    job, mesh = planned(run, cluster)
    with refusing():
        found = bytes_of_step(job, mesh, BYTES[config.train.dtype])
    parallel = config.parallel
    tp, y, replicate = run.mesh.tp, run.mesh.tp_y, run.mesh.dp_replicate
    grid = torch.arange(ranks).view(parallel.pp, parallel.dp, parallel.cp, tp, y)
    data = grid.permute(0, 3, 4, 1, 2).reshape(parallel.pp, tp * y, replicate, -1)
    stages = f", {config.pipeline.kind}" if mesh.pp > 1 else ""
    heading = (
        f"{ranks} rank(s) on {ranks // per_host} host(s): tp={tp if y == 1 else parallel.tp} (sequence "
        f"parallel), cp={mesh.cp}, pp={mesh.pp}{stages}, dp={parallel.dp}, zero={parallel.zero}; "
        f"{run.micro_batches} micro-batch(es)"
    )
    both = " x cp" if mesh.cp > 1 else ""
    returning = "new weights" if parallel.zero else "their sums"
    gathered = f"; {returning}, gathered" if parallel.zero < 3 else "; weights, gathered for every pass"
    rows_of = {"cp": grid.movedim(2, -1), "pp": grid.movedim(0, -1), "tp": grid.movedim(3, -1)}
    axes: list[tuple[str, torch.Tensor, str, float]] = [
        ("tp", rows_of["tp"].reshape(-1, tp), "rows of activations and their gradients", found["tp"]),
        ("ep", grid.reshape(-1, mesh.ep or 1), "rows of experts and their gradients", found.get("ep", 0.0)),
        ("tp y", grid.reshape(-1, y), "sums over features of the stream", found.get("y", 0.0)),
        ("cp", rows_of["cp"].reshape(-1, mesh.cp), "keys, values, sums of gradients", found["cp"]),
        ("pp", rows_of["pp"].reshape(-1, mesh.pp), "the stream between stages", found["pp"]),
        (
            f"dp{both}",
            data.reshape(-1, data.shape[-1]),
            f"gradients, summed{gathered}",
            found["gradients"] + found["weights"],
        ),
        (
            "replicas",
            data.transpose(2, 3).reshape(-1, replicate),
            "sums of gradients",
            found["replicas"],
        ),
    ]
    rows = [
        [name, _groups(groups), _transport(groups, per_host, name, on_device), _size(nbytes), what]
        for name, groups, what, nbytes in axes
        if groups.shape[1] > 1
    ]
    if not rows:
        return f"{heading}\nNothing travels."
    return f"{heading}\n\n" + columns(["axis", "groups", "over", "bytes a step", "what"], rows, (0, 1, 2, 4))


def _groups(groups: torch.Tensor) -> str:
    written = ["-".join(map(str, _short(group.tolist()))) for group in groups[:SHOWN]]
    return " ".join([*written, f".. ({len(groups)})"] if len(groups) > SHOWN else written)


def _short(ranks: Sequence[int]) -> list[object]:
    return list(ranks) if len(ranks) <= 8 else [*ranks[:3], "..", ranks[-1]]


def _transport(groups: torch.Tensor, per_host: int, axis: str, on_device: bool) -> str:
    """Returns the transport that `pyruntime.comm.configure` chooses by default; cp and pp use pairs."""
    hosts = [set((group // per_host).tolist()) for group in groups]
    inside = "copy engines" if on_device else "shared memory"
    between = "nccl" if on_device else "gloo"
    if all(len(found) == 1 for found in hosts):
        return inside
    if groups.shape[1] > len(hosts[0]):
        among = (
            f"{between} between neighbours of 2 hosts"
            if axis in ("cp", "pp")
            else f"a {between} ring of hosts"
        )
        return f"{inside}, {among}"
    return f"{between}, neighbour to neighbour" if axis in ("cp", "pp") else f"a {between} ring of ranks"


def _size(nbytes: float) -> str:
    if not nbytes:
        return ""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.1f} {unit}"
    return f"{nbytes / 1e3:,.1f} kB"
