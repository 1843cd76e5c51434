"""Causal grouped-query attention as one op: C++ on CPU (csrc/cpu/layers), a composite of ATen ops elsewhere.

Differentiable, traceable by `torch.compile(fullgraph=True)`, and bitwise the same whatever the number of
threads. Inputs are float32, bfloat16, float16 or float64; scores, softmax and sums are float32 (float64 for
float64). Bad arguments raise ValueError (shapes) or TypeError (dtypes) with what was found and what is
needed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + causal mask) v, where query i sees keys 0 .. i.

    q [B, H, S, D], k and v [B, Hkv, S, D], where Hkv divides H and H / Hkv query heads in a row share a key
    head; of any strides, fastest where D is contiguous. scale is 1 / sqrt(D) unless given.
    -> (out [B, S, H * D], as an output projection reads it; lse [B, H, S], the log-sum-exp of a query's
    scaled scores in float32 (float64 for float64), which carries no gradient).

    The backward keeps q, k, v, out and lse, nothing of size S * S, and computes the scores again. On a CPU
    that multiplies bfloat16, bfloat16 probabilities and score gradients are rounded to bfloat16 before they
    are multiplied, as flash attention does it. The composite of other devices holds all scores while it runs,
    B * H * S * S elements.
    """
    return torch.ops.pyruntime.causal_attention(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)


# ---- fake kernels ----


def _like_heads(x: Tensor) -> Tensor:
    batch, heads, seq, dim = x.shape
    return x.new_empty(batch, seq, heads, dim).transpose(1, 2)


@torch.library.register_fake("pyruntime::causal_attention")
def _(q, k, v, scale):
    batch, heads, seq, dim = q.shape
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(batch, seq, heads * dim), q.new_empty(batch, heads, seq, dtype=statistics)


@torch.library.register_fake("pyruntime::causal_attention_backward")
def _(grad_out, q, k, v, out, lse, scale):
    return _like_heads(q), _like_heads(k), _like_heads(v)
