"""Attention over a sequence that is cut over ranks, as an op."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from pyruntime.choices import ContextVariant, WireFormat, check_value, values
from pyruntime.comm import Group, group_name, group_rank, group_size
from pyruntime.context.layouts import check_layout
from pyruntime.context.mask import Mask, mask_of
from pyruntime.context.variants import Attended, attend, attend_backward
from pyruntime.ops.attention import statistics_dtype

VARIANTS = values(ContextVariant)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    *,
    causal: bool = True,
    layout: str = "zigzag",
    document_ids: Tensor | None = None,
    scale: float | None = None,
    variant: str = "ring",
    wire: WireFormat = "same",
    window: int | None = None,
) -> Tensor:
    """softmax(scale q k^T + mask) v over the sequence of all ranks; returns [B, n, H, d] in q's dtype.

    Exact: no approximation, and all sums in fp32 (fp64 for fp64). Differentiable in q, k and v; an op for
    `torch.compile`. Every rank of the group calls it with the same settings.

    Args:
        q: [B, n, H, d], queries of this rank's tokens in `layout` (see `positions`): of all S/P tokens, or of
            the last n. float32, bfloat16, float16 or float64.
        k: [B, S/P, G, d]; G divides H, and query heads h H/G ... share key head h.
        v: as k.
        group: the P ranks that the sequence is cut over.
        causal: a query sees only the keys up to its own place in the sequence.
        layout: "contiguous", "zigzag", "striped", "placed" by the length of the documents, or "balanced" by
            their work.
        document_ids: integers [B, S] or [S] for the whole sequence in its order, the same on every rank. A
            query sees only keys of its own document; a document is a run of one id.
        scale: factor of the scores; 1 / sqrt(d) by default.
        variant: "ring", "all_gather_kv", "ulysses" (see `pyruntime.context.variants`), or "auto", which takes
            the ring: in all measurements it was the fastest (docs/figures/results.md).
        wire: only for the ring: the format that K and V are rounded to, this rank's included. The result is
            exact attention to the rounded values; their gradients are returned for k and v. "same", "bf16"
            or "fp8" (pyruntime/comm/wire.py).
        window: the last keys up to its own place that a query sees; None: all. Only with a causal mask. The
            ring sends no keys that no rank further along sees.

    Raises ValueError for shapes that do not fit or that the layout cannot cut, TypeError for dtypes;
    CommTimeout or PeerLost if a rank does not answer.

    Source: Liu et al. 2023 (arXiv 2310.01889); merge of blocks as in FlashAttention-2 (arXiv 2307.08691).
    """
    name = group_name(group)
    check_value("variant", variant, VARIANTS)
    _check_tensors(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    variant = "ring" if variant == "auto" else variant
    if wire != "same" and variant != "ring":
        raise ValueError(f'wire="{wire}" is only for variant="ring", not for "{variant}"; use wire="same".')
    if window is not None and (not causal or window < 1):
        raise ValueError(
            f"window={window} with causal={causal}: a window is 1 or more keys up to the query's own place, "
            "under a causal mask; pass causal=True, or window=None."
        )
    out, _, _ = torch.ops.pyruntime.ring_attention(
        q, k, v, document_ids, name, causal, layout, scale, variant, wire, window
    )
    return out


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    fits = q.dim() == 4 and k.shape == v.shape and k.dim() == 4
    if not fits or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ValueError(
            f"ring_attention: {shapes}; they must be [B, n, H, d], and [B, S/P, G, d] twice, d at least 1."
        )
    if q.shape[1] > k.shape[1] or (q.shape[1] == 0 and k.shape[1] > 0):
        raise ValueError(
            f"ring_attention: {shapes}; q must have as many tokens as k, or only 1 or more of the last ones."
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"ring_attention: {shapes}; the number of key/value heads must divide q's heads.")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"ring_attention: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; cast them to one dtype."
        )
    if q.dtype not in DTYPES:
        raise TypeError(
            f"ring_attention: q, k and v are {q.dtype}; use float32, bfloat16, float16 or float64."
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"ring_attention: q, k and v are on {q.device}, {k.device} and {v.device}; use one.")


def _check(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, layout: str, variant: str, ranks: int
) -> None:
    if variant == "ulysses" and k.shape[2] % ranks:
        raise ValueError(
            f'variant="ulysses" splits heads over ranks, but {ranks} ranks do not divide {k.shape[2]} '
            'key/value heads; use "ring" or "all_gather_kv".'
        )
    seq = k.shape[1] * ranks
    check_layout(layout, seq, ranks)
    if layout == "balanced" and document_ids is None:
        raise ValueError(
            'layout="balanced" balances the work of documents; pass document_ids, or use "zigzag".'
        )
    if document_ids is None:
        return
    if document_ids.shape not in ((seq,), (q.shape[0], seq)) or document_ids.is_floating_point():
        raise ValueError(
            f"document_ids are {document_ids.dtype} of shape {list(document_ids.shape)}; they must be "
            f"integers [{q.shape[0]}, {seq}] or [{seq}], for the whole sequence."
        )


@torch.library.custom_op("pyruntime::ring_attention", mutates_args=())
def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    group: str,
    causal: bool,
    layout: str,
    scale: float,
    variant: str,
    wire: str,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, document_ids, layout, variant, group_size(group))
    mask = _mask(q, k, document_ids, group, causal, layout, window)
    done = attend(variant, q, k, v, group, mask, scale, cast(WireFormat, wire))
    return done.out, done.lse, done.kept


@_op.register_fake
def _(q, k, v, document_ids, group, causal, layout, scale, variant, wire, window):
    ranks = group_size(group)
    _check(q, k, v, document_ids, layout, variant, ranks)
    batch, queries, heads, dim = q.shape
    out, statistics = q.new_empty(q.shape), statistics_dtype(q)
    if variant != "ulysses":
        return out, q.new_empty(batch, heads, queries, dtype=statistics), q.new_empty(0)
    lse = q.new_empty(batch, heads // ranks, queries * ranks, dtype=statistics)
    return out, lse, q.new_empty(batch, queries * heads + 2 * k.shape[1] * k.shape[2], dim)


@torch.library.custom_op("pyruntime::ring_attention_backward", mutates_args=())
def _backward_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    document_ids: Tensor | None,
    group: str,
    causal: bool,
    layout: str,
    scale: float,
    variant: str,
    wire: str,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = _mask(q, k, document_ids, group, causal, layout, window)
    done = Attended(out, lse, kept)
    dq, dk, dv = attend_backward(variant, grad_out, q, k, v, done, group, mask, scale, cast(WireFormat, wire))
    return _result(dq, q), _result(dk, k), _result(dv, v)


def _result(grad: Tensor, like: Tensor) -> Tensor:
    return grad.to(like.dtype, copy=True, memory_format=torch.contiguous_format)


@_backward_op.register_fake
def _(grad_out, q, k, v, out, lse, kept, document_ids, group, causal, layout, scale, variant, wire, window):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, document_ids, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, document_ids)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx, grad_out, *_):
    grads = torch.ops.pyruntime.ring_attention_backward(grad_out, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *8 * [None])


_op.register_autograd(_differentiate, setup_context=_save)


def _mask(
    q: Tensor,
    k: Tensor,
    document_ids: Tensor | None,
    group: str,
    causal: bool,
    layout: str,
    window: int | None,
) -> Mask:
    ranks, seq, own = group_size(group), k.shape[1] * group_size(group), group_rank(group)
    return mask_of(layout, seq, ranks, own, causal, document_ids, q.shape[1], q.device, window)
