"""Outer steps: replicas train alone for a round of steps, and meet beside the steps of the next one."""

from typing import TYPE_CHECKING

from pyruntime.lazy import names_of
from pyruntime.outer.methods import (
    METHODS,
    Method,
    co2,
    diloco,
    gap_penalty,
    local_sgd,
    overlapped_local_sgd,
    slowmo,
    streaming_diloco,
)

if TYPE_CHECKING:
    from pyruntime.outer.optimizer import OuterOptimizer

__all__ = [
    "METHODS",
    "Method",
    "OuterOptimizer",
    "co2",
    "diloco",
    "gap_penalty",
    "local_sgd",
    "overlapped_local_sgd",
    "slowmo",
    "streaming_diloco",
]

__getattr__ = names_of(__name__, {"OuterOptimizer": "pyruntime.outer.optimizer"})
