"""Checks the options of a model with experts, normalised heads, or a window of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyruntime.train.config import Grid, RunConfig
from pyruntime.train.errors import require

if TYPE_CHECKING:
    from pyruntime.llama.config import LlamaConfig


def check_shape(config: RunConfig, shape: LlamaConfig) -> None:
    """Raises ConfigError for options that a model of that shape does not support."""
    window, costs = shape.sliding_window, config.pipeline.costs
    require(
        window is None or window >= config.train.seq_len or not costs,
        f"pipeline.costs={costs} was measured without a window of attention, and this model has one of "
        f"{window} tokens; set pipeline.layers.",
    )
    if shape.mixture is not None or shape.qk_norm:
        _check_cuts(config, "experts" if shape.mixture else "normalised heads")
    if shape.mixture is None:
        return
    experts = f"a model with {shape.mixture.experts} experts"
    parallel, counts = config.parallel, config.train.micro_batches
    for name, is_asked, instead in (
        (f"train.micro_batches={list(counts)}", bool(counts), "leave it out"),
        (
            "parallel.rebalance=on without a pipeline",
            parallel.rebalance == "on" and parallel.pp == 1,
            "leave it out",
        ),
        ("optimizer.name=muon", config.optimizer.name == "muon", "use adamw"),
        ("train.check_types=true", config.train.check_types, "leave it out"),
        (f"parallel.tp_wire={config.parallel.tp_wire}", config.parallel.tp_wire != "same", "leave it out"),
        (f"pipeline.costs={config.pipeline.costs}", bool(config.pipeline.costs), "set pipeline.layers"),
    ):
        require(not is_asked, f"{name} does not support {experts} yet; {instead}.")
    slices, train = config.pipeline.slices, config.train
    for name, weight in (("balance_loss", train.balance_loss), ("router_z_loss", train.router_z_loss)):
        require(
            slices == 1 or weight == 0,
            f"train.{name}={weight:g} counts the tokens of whole sequences, and pipeline.slices={slices} "
            f"cuts them in {experts}; set train.{name}=0, or leave out pipeline.slices.",
        )


def _check_cuts(config: RunConfig, what: str) -> None:
    parallel = config.parallel
    require(
        not isinstance(parallel.tp, Grid),
        f"parallel.tp={parallel.tp} cuts features over y, which a model with {what} does not support; use "
        "one number.",
    )
    require(
        parallel.tp_slices in ("auto", 1),
        f"parallel.tp_slices={parallel.tp_slices} does not support a model with {what}; leave it out.",
    )
