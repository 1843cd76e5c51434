"""Data parallelism: gradients leave as they are written, weights return as they are read, states are
sharded."""

from pyruntime.data_parallel.adamw import ShardedAdamW
from pyruntime.data_parallel.compression import Compression
from pyruntime.data_parallel.muon import Muon
from pyruntime.data_parallel.optimizer import NonFiniteGradient, ShardedOptimizer, StepReport
from pyruntime.data_parallel.shard import Sharded, shard

__all__ = [
    "Compression",
    "Muon",
    "NonFiniteGradient",
    "Sharded",
    "ShardedAdamW",
    "ShardedOptimizer",
    "StepReport",
    "shard",
]
