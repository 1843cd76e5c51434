"""Tensor-parallel layers for torch models: linears, embedding, norm, loss.

`parallelize`, `verify` and `explain` work on complete models. They are in `pyruntime.any_model`, which is
built on this package, and can be imported from here too."""

from typing import TYPE_CHECKING

from pyruntime.lazy import names_of
from pyruntime.nn.chunked_head import linear_cross_entropy
from pyruntime.nn.clip import clip_grad_norm_, grad_norm
from pyruntime.nn.cross_entropy import vocab_parallel_cross_entropy
from pyruntime.nn.embedding import VocabParallelEmbedding
from pyruntime.nn.layout import Layout
from pyruntime.nn.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.norm import RMSNorm
from pyruntime.nn.parallel_experts import ParallelExperts
from pyruntime.nn.parameters import Part, TensorGroup, shard_bounds
from pyruntime.nn.router import Router, RouterLosses, SigmoidRouter

if TYPE_CHECKING:
    from pyruntime.any_model.explain import LayerReport, Report, explain
    from pyruntime.any_model.parallelize import parallelize
    from pyruntime.any_model.plans import PLANS, Plan
    from pyruntime.any_model.verify import VerificationError, verify

__all__ = [
    "PLANS",
    "ColumnParallelLinear",
    "LayerReport",
    "Layout",
    "MergedColumnParallelLinear",
    "ParallelExperts",
    "ParallelModule",
    "Part",
    "Plan",
    "RMSNorm",
    "Report",
    "Router",
    "RouterLosses",
    "RowParallelLinear",
    "SigmoidRouter",
    "TensorGroup",
    "VerificationError",
    "VocabParallelEmbedding",
    "clip_grad_norm_",
    "explain",
    "grad_norm",
    "linear_cross_entropy",
    "parallelize",
    "shard_bounds",
    "verify",
    "vocab_parallel_cross_entropy",
]

# pyruntime.any_model imports this package, so its names are imported when they are first used.
_ABOVE = [name for name in __all__ if name not in globals()]
__getattr__ = names_of(__name__, dict.fromkeys(_ABOVE, "pyruntime.any_model"))
