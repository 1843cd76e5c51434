"""Overlaps communication with computation in distributed PyTorch training.

`all_gather_matmul` and `matmul_reduce_scatter` are the two primitives. `pyruntime.nn` has the modules built
on them, `pyruntime.parallelize` puts those into any model, and `python -m pyruntime train` trains a compact
Llama.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyruntime import starting
from pyruntime.lazy import names_of

if TYPE_CHECKING:
    from pyruntime.any_model.explain import explain
    from pyruntime.any_model.parallelize import parallelize
    from pyruntime.any_model.verify import verify
    from pyruntime.comm import CommError, CommTimeout, PeerLost, Runtime, keep_freed_memory
    from pyruntime.context import ring_attention
    from pyruntime.data_parallel.meta import on_meta
    from pyruntime.data_parallel.shard import shard
    from pyruntime.ops import (
        all_gather,
        all_gather_matmul,
        all_reduce,
        matmul_all_reduce,
        matmul_reduce_scatter,
        reduce_scatter,
        replicate_grad,
        replicated_matmul,
    )
    from pyruntime.overlap.record import ledger
    from pyruntime.replicas.outer_optimizer import OuterOptimizer

__version__ = "0.1.0"  # pyproject.toml reads it here

__all__ = [
    "CommError",
    "CommTimeout",
    "OuterOptimizer",
    "PeerLost",
    "Runtime",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "explain",
    "keep_freed_memory",
    "ledger",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "on_meta",
    "parallelize",
    "reduce_scatter",
    "replicate_grad",
    "replicated_matmul",
    "ring_attention",
    "shard",
    "verify",
]

# Imported on first use: `pyruntime.plan` and the schedules of `pyruntime.pipeline` need no torch.
_COMM = ("CommError", "CommTimeout", "PeerLost", "Runtime", "keep_freed_memory")
_PLACES = {
    **{name: "pyruntime.ops" for name in __all__},
    **{name: "pyruntime.comm" for name in _COMM},
    "OuterOptimizer": "pyruntime.replicas",
    "explain": "pyruntime.any_model",
    "ledger": "pyruntime.overlap.record",
    "on_meta": "pyruntime.data_parallel.meta",
    "parallelize": "pyruntime.any_model",
    "ring_attention": "pyruntime.context",
    "shard": "pyruntime.data_parallel",
    "verify": "pyruntime.any_model",
}
__getattr__ = names_of(__name__, _PLACES, ("comm", "context", "data_parallel", "nn", "ops", "replicas"))

if starting.is_program():
    starting.catch_signals()
if find_spec("torch") is not None:
    import pyruntime.comm  # noqa: F401  (registers the operators, and symmetric memory for tensors on the CPU)
