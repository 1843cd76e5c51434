"""What is done on the CPU alone, and what GPUs of several hosts cannot do yet."""

from __future__ import annotations

from pyruntime.train.config import RunConfig, changed
from pyruntime.train.errors import ConfigError, require

ON_CPUS_ALONE = (
    "optimizer.rounding optimizer.name data_parallel.method data_parallel.compression parallel.rebalance "
    "data_parallel.weight_wire parallel.tp_wire pipeline.wire context.wire"
)
"""Options whose usual value is the only one on GPUs."""


def check_on_gpus(config: RunConfig) -> None:
    """Raises ConfigError for what GPUs do not do, on however many hosts."""
    for name, value, usual in changed(config, ON_CPUS_ALONE):
        raise ConfigError(
            f"{name}={value} is done on the CPU alone; use {usual} on GPUs, or train.device=cpu."
        )


def check_between_hosts(config: RunConfig) -> None:
    """Raises ConfigError for what GPUs of several hosts cannot do yet."""
    for name, size in (("cp", config.parallel.cp), ("pp", config.parallel.pp)):
        require(
            size == 1,
            f"parallel.{name}={size}: GPUs of several hosts have no way yet for its messages; start all "
            "ranks on one host, or use parallel.tp and parallel.dp alone.",
        )
