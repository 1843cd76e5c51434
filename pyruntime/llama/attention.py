"""Causal grouped-query attention on the heads that this rank holds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from pyruntime.ops import attention as ops


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, begin: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """`softmax(scale q k^T + causal mask) v`; q `[B, H, Sq, d]`, k and v `[B, G, Sk, d]`, G divides H.

    The last query sees every key, the query before it all but the last, and so on (`Sk > Sq` when keys come
    from a cache). begin: `[B, Sq]` int32, the first key that each query sees, where its document begins;
    None: key 0. scale: 1 / sqrt(d) by default. Returns `[B, H, Sq, d]`.

    On a CPU this runs this project's own kernels, except for single queries. They take a quarter (bf16) to
    half (fp32) of the time of torch's flash kernel for CPUs. All else is torch's
    `scaled_dot_product_attention`, which chooses its kernel: on GPUs cuDNN's or flash (docs/how-to/gpus.md).
    """
    queries, keys = q.shape[2], k.shape[2]
    if begin is not None:
        return _in_documents(q, k, v, begin, scale)
    if queries == keys:
        if q.device.type == "cpu":
            out, _ = ops.causal_attention(
                q, k, v, scale
            )  # [B, S, H d], the memory that the caller transposes to
            return out.unflatten(-1, (q.shape[1], q.shape[3])).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    if queries == 1 and not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    if q.device.type == "cpu":
        return ops.prefix_attention(q, k, v, scale).transpose(1, 2)
    # On AMD's GPUs torch's flash kernels align a causal mask otherwise.
    if torch.version.hip is None:
        visible: Tensor = causal_lower_right(queries, keys)
    else:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)


def _in_documents(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, scale: float | None) -> Tensor:
    if q.device.type == "cpu":
        return ops.prefix_attention(q, k, v, scale, begin=begin).transpose(1, 2)
    queries, keys = q.shape[2], k.shape[2]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    first = begin.to(q.device)[:, None, :, None]
    visible = visible & (torch.arange(keys, device=q.device) >= first)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
