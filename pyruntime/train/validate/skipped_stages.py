"""Checks that the other options suit micro-batches that skip stages of the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyruntime.train.config import RunConfig
from pyruntime.train.errors import require

if TYPE_CHECKING:
    from pyruntime.llama.config import LlamaConfig


def check_skip(config: RunConfig) -> None:
    """Raises ConfigError for options that do not go with pipeline.skip; `placement_of` checks its number and
    the schedule."""
    asked = f"pipeline.skip={config.pipeline.skip}"
    for name, is_asked, why in (
        (
            "parallel.rebalance=on",
            config.parallel.rebalance == "on",
            "layers that move would change which of them a micro-batch skips",
        ),
        (
            f"dpo.beta={config.dpo.beta:g}",
            config.dpo.beta > 0,
            "the reference's log-probabilities are those of all layers",
        ),
    ):
        require(
            not (config.pipeline.skip and is_asked),
            f"{asked} does not go with {name}: {why}; leave one of them out.",
        )


def check_skip_of_shape(config: RunConfig, shape: LlamaConfig) -> None:
    """Raises ConfigError for a model whose stages cannot be skipped."""
    require(
        not config.pipeline.skip or shape.mixture is None,
        f"pipeline.skip={config.pipeline.skip} with experts: the losses of routers count the tokens of all "
        "micro-batches in every layer; leave out pipeline.skip.",
    )
