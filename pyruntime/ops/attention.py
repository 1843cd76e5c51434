"""Grouped-query attention as ops: C++ kernels on CPU (csrc/cpu/layers).

`causal_attention` takes whole sequences, only on CPU. `attention_block_` and `attention_block_backward_` are
one step of attention whose keys are spread over ranks; other devices run them as a composite of ATen ops. All
are traceable by `torch.compile(fullgraph=True)`, with the same bits for any number of threads; the first is
differentiable. Inputs are float32, bfloat16, float16 or float64; scores, softmax and sums are float32
(float64 for float64). Bad arguments raise ValueError (shapes, strides) or TypeError (dtypes); the message
says what was found and what is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of statistics, sums and optimizer states for x: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + causal mask) v, where query i sees keys 0 .. i.

    q [B, H, S, D], k and v [B, Hkv, S, D], with any strides, fastest if D is contiguous. Hkv divides H, and
    H / Hkv successive query heads share a key head. scale: 1 / sqrt(D) by default.
    Returns (out, lse): out [B, S, H * D], as an output projection reads it; lse [B, H, S], the log-sum-exp of
    each query's scaled scores, float32 (float64 for float64), without gradient.

    The backward keeps q, k, v, out and lse, nothing of size S * S, and computes the scores again. On a CPU
    with bfloat16 multiplication, probabilities and score gradients of bfloat16 inputs are rounded to bfloat16
    before they are multiplied, as in flash attention. Raises NotImplementedError on other devices: use
    torch's attention.
    """
    return torch.ops.pyruntime.causal_attention(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)


def nothing_seen(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns out [B, Sq, H, D] and lse [B, H, Sq] for queries [B, Sq, H, D] that have seen no keys, to start
    `attention_block_`."""
    batch, queries, heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=statistics_dtype(q), device=q.device)
    return out, torch.full((batch, heads, queries), float("-inf"), dtype=out.dtype, device=q.device)


def attention_block_(
    q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, out: Tensor, lse: Tensor, scale: float
) -> None:
    """Adds the attention over one block of keys to `out` and `lse`, the attention over earlier blocks.

    q [B, H, Sq, D], k and v [B, Hkv, Sk, D] as in `causal_attention`, but Sq and Sk are independent and may
    be 0. Query i of batch b sees keys begin[b, i] <= j < end[b, i], none if begin >= end; begin and end
    [B, Sq] int32 with any strides. out [B, H, Sq, D] and lse [B, H, Sq] are float32 (float64 for float64);
    out with any strides but the last, which is 1, as in a view of [B, Sq, H, D]; lse contiguous. With
    P = exp(scale q k^T) where a key is seen and 0 elsewhere, it writes

        lse' = log(exp(lse) + rowsum(P))        out' = exp(lse - lse') out + exp(-lse') P v

    computed as an online softmax, which does not overflow (Dao 2023, FlashAttention-2, arXiv:2307.08691,
    algorithm 1; Liu et al. 2023, Ring Attention, arXiv:2310.01889). A query that has seen no key has lse
    -inf and out 0; start with these (`nothing_seen`). Blocks may come in any order. The cost of a block is,
    except at its edges, proportional to the keys that its queries see.

    Not differentiable (raises RuntimeError if a gradient is required): `attention_block_backward_` is the
    backward. On other devices the composite keeps all scores while it runs, B * H * Sq * Sk elements;
    `pyruntime.context` takes flash attention there where it can (context/flash.py).
    """
    torch.ops.pyruntime.attention_block_(q, k, v, begin, end, scale, out, lse)


def attention_block_backward_(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: Tensor,
    end: Tensor,
    delta: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
) -> None:
    """Adds one block's part of the gradients of its queries, keys and values to `dq`, `dk` and `dv`.

    q, k, v, begin and end as in `attention_block_`; grad_out [B, H, Sq, D] has the dtype of q, any strides.
    lse [B, H, Sq] is the log-sum-exp over all blocks, and delta [B, H, Sq] = rowsum(grad_out * out) with the
    final out; both float32 (float64 for float64). dq [B, H, Sq, D], dk and dv [B, Hkv, Sk, D] have the dtype
    of lse for every dtype of q, and any strides but the last, which is 1. With P = exp(scale q k^T - lse)
    where a key is seen and 0 elsewhere (Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 2),

        dv += P^T grad_out      dS = P * (grad_out v^T - delta)      dq += scale dS k      dk += scale dS^T q

    summed over the query heads of a key head. Queries with lse -inf contribute nothing.
    """
    torch.ops.pyruntime.attention_block_backward_(
        grad_out, q, k, v, begin, end, delta, lse, scale, dq, dk, dv
    )


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *, begin: Tensor | None = None
) -> Tensor:
    """softmax(scale q k^T + causal mask) v, where query i sees keys 0 .. Sk - Sq + i.

    q [B, H, Sq, D], k and v [B, Hkv, Sk, D] with Sk >= Sq, otherwise as in `causal_attention`. begin: [B, Sq]
    int32, the first key that each query sees, at most its own; by default key 0.
    Returns [B, Sq, H, D] in q's dtype. Differentiable.
    """
    if begin is None:
        begin = torch.zeros(1, q.shape[2], dtype=torch.int32, device=q.device).expand(len(q), -1)
    return _PrefixAttention.apply(q, k, v, begin, q.shape[-1] ** -0.5 if scale is None else scale)


class _PrefixAttention(torch.autograd.Function):
    """One block of `attention_block_`."""

    @staticmethod
    def forward(ctx, q, k, v, begin, scale):
        out, lse = nothing_seen(q.transpose(1, 2))
        end = _end_of_seen(q, k)
        attention_block_(q, k, v, begin, end, out.transpose(1, 2), lse, scale)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, begin, result, lse)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, begin, out, lse = ctx.saved_tensors
        delta = (grad_out.to(lse.dtype) * out).sum(-1).transpose(1, 2).contiguous()
        sums = [torch.zeros(x.transpose(1, 2).shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        dq, dk, dv = (x.transpose(1, 2) for x in sums)
        end = _end_of_seen(q, k)
        attention_block_backward_(
            grad_out.transpose(1, 2), q, k, v, begin, end, delta, lse, dq, dk, dv, ctx.scale
        )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _end_of_seen(q: Tensor, k: Tensor) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    end = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=q.device)
    return end.expand(len(q), -1)


# ---- fake kernels ----


def _like_heads(x: Tensor) -> Tensor:
    batch, heads, seq, dim = x.shape
    return x.new_empty(batch, seq, heads, dim).transpose(1, 2)


@torch.library.register_fake("pyruntime::causal_attention")
def _(q, k, v, scale):
    batch, heads, seq, dim = q.shape
    return q.new_empty(batch, seq, heads * dim), q.new_empty(batch, heads, seq, dtype=statistics_dtype(q))


@torch.library.register_fake("pyruntime::causal_attention_backward")
def _(grad_out, q, k, v, out, lse, scale):
    return _like_heads(q), _like_heads(k), _like_heads(v)
