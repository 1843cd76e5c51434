"""Checks that the other options suit work that moves away from slow ranks, or that ranks share unequally."""

from __future__ import annotations

from pyruntime.train.config import Grid, RunConfig, meets_every_step, mesh_of, micro_batches
from pyruntime.train.errors import require


def check_rebalance(config: RunConfig, world_size: int) -> None:
    parallel, asked = config.parallel, "parallel.rebalance=on"
    _check_micro_batches(config)
    if parallel.rebalance == "off":
        return
    require(
        parallel.pp > 1 or parallel.dp > 1 or mesh_of(config, world_size).tp > 1,
        f"{asked} moves layers between the stages of a pipeline, micro-batches between data-parallel ranks, "
        "or parts of layers between tensor-parallel ranks, and there is one of each; set parallel.pp, dp or "
        "tp, or leave out parallel.rebalance.",
    )
    require(
        parallel.pp > 1 or parallel.dp == 1 or micro_batches(config) > 1,
        f"{asked} moves micro-batches between data-parallel ranks, and train.batch_size="
        f"{config.train.batch_size} gives each only one; lower train.micro_batch_size.",
    )
    require(
        config.checkpoint.every_steps > 0,
        f"{asked} moves work when a checkpoint is saved, and checkpoint.every_steps=0 saves none before "
        "the end; set checkpoint.every_steps.",
    )
    require(
        config.train.slow_every != 0,
        f"{asked} needs to know which rank is slow, and train.slow_every=0 never looks; leave one of them "
        "out.",
    )
    if parallel.pp == 1 and parallel.dp == 1:
        _check_unequal_parts(config, asked)
        return
    if parallel.pp == 1:
        _check_unequal(config, asked)
        return
    _check_every_step(config, asked)
    compression = config.data_parallel.compression
    require(
        compression == "none",
        f"{asked} with data_parallel.compression={compression}: compression residuals stay on "
        "the rank that held the layer; leave one of them out.",
    )


def check_tp_speeds(config: RunConfig) -> None:
    """Checks what else a run with parallel.tp_speeds does. The speeds themselves are checked with the model's
    shape."""
    if speeds := config.parallel.tp_speeds:
        _check_unequal_parts(config, f"parallel.tp_speeds={list(speeds)}")


def _check_unequal_parts(config: RunConfig, asked: str) -> None:
    """Refuses what knows only equal parts of tensor-parallel ranks."""
    tp, members = config.parallel.tp, config.data_parallel.members
    for name, is_asked in (
        (f"parallel.tp={tp}", isinstance(tp, Grid)),
        ("optimizer.name=muon", config.optimizer.name == "muon"),
        (f"data_parallel.members={members}", bool(members)),
    ):
        require(
            not is_asked,
            f"{name} needs equal parts of tensor-parallel ranks, which {asked} does not give; leave one of "
            "them out.",
        )


def _check_micro_batches(config: RunConfig) -> None:
    counts, train, parallel = config.train.micro_batches, config.train, config.parallel
    if not counts:
        return
    asked, total = f"train.micro_batches={list(counts)}", micro_batches(config) * parallel.dp
    require(
        len(counts) == parallel.dp and min(counts) >= 1 and sum(counts) == total,
        f"{asked} must be {parallel.dp} numbers of at least 1, one for each data-parallel rank, with a "
        f"sum of {total}: train.batch_size={train.batch_size} in micro-batches of {train.micro_batch_size}.",
    )
    require(
        parallel.pp == 1,
        f"{asked} with parallel.pp={parallel.pp}: the ranks of a pipeline take equal numbers; set "
        "pipeline.layers for ranks of unequal speed.",
    )
    _check_unequal(config, asked)


def _check_unequal(config: RunConfig, asked: str) -> None:
    """Refuses what data-parallel ranks exchange in every micro-batch, since some take fewer."""
    _check_every_step(config, asked)
    require(
        config.parallel.zero < 3,
        f"{asked} with parallel.zero=3, which a z in parallel.tp means too: ranks gather weights in every "
        "micro-batch, so all must take equally many; set parallel.zero to 2.",
    )


def _check_every_step(config: RunConfig, asked: str) -> None:
    method = config.data_parallel.method
    require(
        meets_every_step(config),
        f"{asked} with data_parallel.method={method}: replicas that synchronize rarely do equal work; leave "
        "one of them out.",
    )
