"""Checks that the other options suit micro-batches that are routed by the speeds of pipeline ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pyruntime.train.config import RunConfig, meets_every_step
from pyruntime.train.errors import require

if TYPE_CHECKING:
    from pyruntime.llama.config import LlamaConfig


def check_speeds(config: RunConfig) -> None:
    """Raises ConfigError for pipeline.speeds that do not fit the mesh, and for options that do not go with
    them. `check_pipeline` requires a pipeline."""
    speeds, parallel = config.pipeline.speeds, config.parallel
    if not speeds:
        return
    asked, pp, dp = f"pipeline.speeds={list(speeds)}", parallel.pp, parallel.dp
    require(
        dp > 1,
        f"{asked} routes micro-batches among data-parallel ranks, and there is one; set parallel.dp, or "
        "pipeline.layers for stages of unequal speed.",
    )
    require(
        len(speeds) == pp * dp and all(0 < speed < math.inf for speed in speeds),
        f"{asked} must be {pp * dp} positive numbers: parallel.dp={dp} for the first of parallel.pp={pp} "
        "stages, then as many for the second.",
    )
    method, members = config.data_parallel.method, config.data_parallel.members
    for name, is_asked, why in (
        (f"pipeline.kind={config.pipeline.kind}", config.pipeline.kind != "1f1b", "only 1f1b routes"),
        (
            f"pipeline.skip={config.pipeline.skip}",
            config.pipeline.skip > 0,
            "paths are chosen by the one or by the other",
        ),
        (
            f"train.micro_batches={list(config.train.micro_batches)}",
            bool(config.train.micro_batches),
            "speeds say how many each rank takes",
        ),
        (
            "parallel.rebalance=on",
            parallel.rebalance == "on",
            "it takes equal numbers of micro-batches for given",
        ),
        (
            "parallel.zero=3, which a z in parallel.tp means too",
            parallel.zero == 3,
            "ranks gather weights in every micro-batch, so all must take equally many",
        ),
        (
            f"data_parallel.method={method}",
            not meets_every_step(config),
            "replicas that synchronize rarely have weights of their own",
        ),
        (
            f"data_parallel.members={members}",
            bool(members),
            "a replica that comes or goes is a job of its own",
        ),
    ):
        require(not is_asked, f"{asked} does not go with {name}: {why}; leave one of them out.")


def check_speeds_of_shape(config: RunConfig, shape: LlamaConfig) -> None:
    """Raises ConfigError for a model whose micro-batches cannot be routed."""
    require(
        not config.pipeline.speeds or shape.mixture is None,
        f"pipeline.speeds={list(config.pipeline.speeds)} with experts: data-parallel ranks count the tokens "
        "of each micro-batch together; leave out pipeline.speeds.",
    )
