"""What is done on the CPU alone, and what GPUs of several hosts cannot do yet."""

from __future__ import annotations

from pyruntime.train.config import RunConfig
from pyruntime.train.errors import require


def check_on_gpus(config: RunConfig) -> None:
    """Raises ConfigError for what GPUs do not do, on however many hosts."""
    data_parallel = config.data_parallel
    for name, value, known in (
        ("optimizer.rounding", config.optimizer.rounding, "nearest"),
        ("optimizer.name", config.optimizer.name, "adamw"),
        ("data_parallel.method", data_parallel.method, "every_step"),
        ("data_parallel.compression", data_parallel.compression, "none"),
        ("data_parallel.weight_wire", data_parallel.weight_wire, "same"),
        ("parallel.tp_wire", config.parallel.tp_wire, "same"),
        ("pipeline.wire", config.pipeline.wire, "same"),
        ("context.wire", config.context.wire, "same"),
        ("parallel.rebalance", config.parallel.rebalance, "off"),
    ):
        require(
            value == known,
            f"{name}={value} is done on the CPU alone; use {known} on GPUs, or train.device=cpu.",
        )


def check_between_hosts(config: RunConfig) -> None:
    """Raises ConfigError for what GPUs of several hosts cannot do yet."""
    for name, size in (("cp", config.parallel.cp), ("pp", config.parallel.pp)):
        require(
            size == 1,
            f"parallel.{name}={size}: GPUs of several hosts have no way yet for its messages; start all "
            "ranks on one host, or use parallel.tp and parallel.dp alone.",
        )
