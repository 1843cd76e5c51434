"""Tensor-parallel layers for torch models: linears, embedding, norm, loss, and the two that work on whole
models, `parallelize`, `verify` and `explain`."""

from pyruntime.nn.clip import clip_grad_norm_, grad_norm
from pyruntime.nn.cross_entropy import vocab_parallel_cross_entropy
from pyruntime.nn.embedding import VocabParallelEmbedding
from pyruntime.nn.explain import LayerReport, Report, explain
from pyruntime.nn.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.norm import RMSNorm
from pyruntime.nn.parallelize import parallelize
from pyruntime.nn.parameters import Layout, Part, TensorGroup, shard_bounds
from pyruntime.nn.plans import PLANS, Plan
from pyruntime.nn.verify import VerificationError, verify

__all__ = [
    "PLANS",
    "ColumnParallelLinear",
    "LayerReport",
    "Layout",
    "MergedColumnParallelLinear",
    "ParallelModule",
    "Part",
    "Plan",
    "RMSNorm",
    "Report",
    "RowParallelLinear",
    "TensorGroup",
    "VerificationError",
    "VocabParallelEmbedding",
    "clip_grad_norm_",
    "explain",
    "grad_norm",
    "parallelize",
    "shard_bounds",
    "verify",
    "vocab_parallel_cross_entropy",
]
