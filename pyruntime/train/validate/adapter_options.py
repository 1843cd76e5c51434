"""Checks the options of low-rank adapters."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyruntime.choices import LORA_TARGETS
from pyruntime.train.config import Grid, RunConfig, changed, meets_every_step
from pyruntime.train.errors import ConfigError, require

if TYPE_CHECKING:
    from pyruntime.llama.config import LlamaConfig

CONFIG = "adapter_config.json"
"""The file by which a folder with adapters is known."""


def check_lora(config: RunConfig) -> None:
    """Raises ConfigError for adapters that the other options do not support."""
    lora = config.lora
    if lora.rank == 0:
        for name, value, _ in changed(config, "lora.alpha lora.targets lora.rslora lora.init_from"):
            raise ConfigError(f"{name}={value} without lora.rank; set that, or leave out {name}.")
        return
    known = ", ".join(LORA_TARGETS)
    wrong = [name for name in lora.targets if name not in LORA_TARGETS]
    require(
        not wrong or "," not in wrong[0],
        f"lora.targets={''.join(wrong[:1])} is one name with a comma; separate names by spaces, as in "
        "--lora.targets q_proj v_proj.",
    )
    require(
        not wrong,
        f"lora.targets names {', '.join(wrong)}, which no layer has; use some of {known}, or leave it "
        "out for all of them.",
    )
    require(bool(lora.targets), f"lora.targets names no linear, so nothing would train; use some of {known}.")
    require(
        len(set(lora.targets)) == len(lora.targets),
        f"lora.targets={','.join(lora.targets)} names a linear twice; name each once.",
    )
    parallel, data, train = config.parallel, config.data_parallel, config.train
    asked = f"lora.rank={lora.rank}"
    for name, is_asked in (
        ("optimizer.name=muon", config.optimizer.name == "muon"),
        (f"parallel.tp={parallel.tp}", isinstance(parallel.tp, Grid)),
        (f"parallel.tp_slices={parallel.tp_slices}", parallel.tp_slices not in ("auto", 1)),
        ("parallel.rebalance=on", parallel.rebalance == "on"),
        (f"data_parallel.method={data.method}", not meets_every_step(config)),
        (f"data_parallel.compression={data.compression}", data.compression != "none"),
        (f"data_parallel.weight_wire={data.weight_wire}", data.weight_wire != "same"),
        ("train.check_types=true", train.check_types),
    ):
        require(
            not is_asked,
            f"{name} does not support low-rank adapters, and {asked} asks for them; leave one of them out.",
        )
    folder = os.path.join(lora.init_from, "adapter")  # of a run
    if not os.path.isfile(os.path.join(folder, CONFIG)):
        folder = "the folder of adapters in peft's format"
    require(
        not lora.init_from or os.path.isfile(os.path.join(lora.init_from, CONFIG)),
        f"lora.init_from: {lora.init_from} holds no {CONFIG}; give {folder}.",
    )


def check_lora_of(config: RunConfig, shape: LlamaConfig) -> None:
    """Raises ConfigError for adapters of a model that cannot have them."""
    if config.lora.rank == 0:
        return
    why = shape.why_no_adapters(config.lora.targets)
    require(not why, f"lora.targets: {why}.")
    require(
        not shape.merged_files,
        f"lora.rank={config.lora.rank} does not support a model whose files hold q, k and v in one tensor "
        "(Phi-3), which peft gives one adapter; leave it out, and all weights train.",
    )
