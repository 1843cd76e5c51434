"""Checks that the other options suit layers that move between stages."""

from __future__ import annotations

from pyruntime.train.config import RunConfig, meets_every_step
from pyruntime.train.errors import require


def check_rebalance(config: RunConfig) -> None:
    if config.parallel.rebalance == "off":
        return
    asked, data_parallel = "parallel.rebalance=on", config.data_parallel
    require(
        config.parallel.pp > 1,
        f"{asked} moves layers between the stages of a pipeline, and parallel.pp=1; set parallel.pp, or "
        "leave out parallel.rebalance.",
    )
    require(
        config.checkpoint.every_steps > 0,
        f"{asked} moves layers when a checkpoint is saved, and checkpoint.every_steps=0 saves none before "
        "the end; set checkpoint.every_steps.",
    )
    require(
        config.train.slow_every != 0,
        f"{asked} needs to know which rank is slow, and train.slow_every=0 never looks; leave one of them "
        "out.",
    )
    require(
        meets_every_step(config),
        f"{asked} with data_parallel.method={data_parallel.method}: replicas that synchronize rarely would "
        "wait for each other when layers move; leave one of them out.",
    )
    require(
        data_parallel.compression == "none",
        f"{asked} with data_parallel.compression={data_parallel.compression}: compression residuals stay on "
        "the rank that held the layer; leave one of them out.",
    )
