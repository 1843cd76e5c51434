"""Checks the options of direct preference optimization (DPO)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyruntime.train.config import RunConfig, meets_every_step
from pyruntime.train.errors import require

if TYPE_CHECKING:
    from pyruntime.llama.config import LlamaConfig


def check_dpo(config: RunConfig) -> None:
    """Raises ConfigError for DPO with options that do not support it."""
    dpo, train, parallel, data = config.dpo, config.train, config.parallel, config.data_parallel
    require(
        not dpo.reference or dpo.beta > 0,
        f"dpo.reference={dpo.reference} without dpo.beta; set that, or leave out dpo.reference.",
    )
    if not dpo.beta:
        return
    asked = f"dpo.beta={dpo.beta:g}"
    for name, is_asked in (
        ("data.document_masks=false", not config.data.document_masks),
        (f"train.z_loss={train.z_loss:g}", train.z_loss > 0),
        ("train.check_types=true", train.check_types),
        (f"pipeline.slices={config.pipeline.slices}", config.pipeline.slices != 1),
        ("parallel.rebalance=on", parallel.rebalance == "on"),
        (f"data_parallel.method={data.method}", not meets_every_step(config)),
        (f"data_parallel.members={data.members}", bool(data.members)),
    ):
        require(
            not is_asked,
            f"{name} does not support preference tuning, and {asked} asks for it; leave one of them out.",
        )
    folder = os.path.dirname(dpo.reference) or "."
    require(
        os.path.isdir(folder),
        f"dpo.reference: the folder {folder} does not exist; make it, or name a file in another.",
    )
    require(
        not os.path.exists(dpo.reference) or os.path.isfile(dpo.reference),
        f"dpo.reference: {dpo.reference} is not a file; name one.",
    )


def check_dpo_of(config: RunConfig, shape: LlamaConfig) -> None:
    """Raises ConfigError for preference tuning of a model that does not support it."""
    require(
        not config.dpo.beta or shape.mixture is None,
        f"dpo.beta={config.dpo.beta:g} does not support a model with experts, whose routers have losses of "
        "their own; leave it out.",
    )
