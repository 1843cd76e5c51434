"""The operators: two fused primitives, their all-reduce sibling, plain collectives, and layer kernels."""

from pyruntime.ops import fake as _fake  # noqa: F401  (registers the fake kernels)
from pyruntime.ops import gemm_tables as _gemm_tables  # noqa: F401  (loads this processor's table)
from pyruntime.ops.collectives import all_gather, all_gather_stats, all_reduce, reduce_scatter, replicate_grad
from pyruntime.ops.experts import experts
from pyruntime.ops.primitives import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    replicated_matmul,
    tier_of,
)

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_gather_stats",
    "all_reduce",
    "experts",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "replicate_grad",
    "replicated_matmul",
    "tier_of",
]
