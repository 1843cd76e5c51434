"""Three variants of attention to the keys of all ranks, forward and backward.

ring            K and V travel round the ranks, half of a rank's tokens in each direction (`ways.py`); a rank
                computes one block while the next one travels. In the backward pass dK and dV follow one step
                behind: a rank adds its part to the received sum and sends it on; the owner's neighbour adds
                last. Where ranks see few keys of others, dK and dV go back as the keys came. Memory for a few
                times S / P tokens of K and V (arXiv 2310.01889, 2311.09431).
all_gather_kv   Gathers all of K and V first, then computes one block; dK and dV by reduce-scatter (Llama 3,
                arXiv 2407.21783, section 3.3.2). Memory for S tokens of K and V.
ulysses         All tokens of H / P heads instead of S / P tokens of all heads, by all-to-all (DeepSpeed-
                Ulysses, arXiv 2309.14509). P must divide the key/value heads.

For all input dtypes the sums out, log-sum-exp, dQ, dK and dV are fp32 (fp64 for fp64), also while dK and dV
travel; flash attention (flash.py) gives what is summed in the inputs' dtype. Every sum has a fixed order, so
results are bitwise the same in every run.

Shapes: k and v [B, S/P, G, d]; q [B, n, H, d], of a rank's last n tokens; lse [B, H, n]. Blocks of the
sequence are computed by `pyruntime.ops.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyruntime import ops
from pyruntime.choices import WireFormat
from pyruntime.comm import companion, process_group
from pyruntime.comm.all_to_all import AllToAll
from pyruntime.context.agreement import agree
from pyruntime.context.block_attention import Backward, attend_block, products
from pyruntime.context.mask import Mask
from pyruntime.context.ring_passes import CLASS, ring_backward, ring_forward
from pyruntime.ops.attention import nothing_seen


@dataclass(frozen=True)
class Attended:
    """The result of a forward pass."""

    out: Tensor
    """[B, n, H, d], in q's dtype."""
    lse: Tensor
    """Log-sum-exp of the scaled scores, for the queries that this rank computed."""
    kept: Tensor
    """Ulysses: Q, K and V after the all-to-all, so that the backward pass need not repeat it; else empty."""


def attend(
    variant: str, q: Tensor, k: Tensor, v: Tensor, group: str, mask: Mask, scale: float, wire: WireFormat
) -> Attended:
    """The forward pass of `variant`, which is not "auto". wire: only for the ring. Raises ValueError if the
    ranks' arguments differ."""
    agreement = agree(variant, q, k, group, mask, scale)
    if variant == "ring":
        out, lse = ring_forward(q, k, v, group, agreement, mask, scale, wire)
        return Attended(out.to(q.dtype), lse, q.new_empty(0))
    if variant == "all_gather_kv":
        keys, values = _gather(k, v, group, mask)
        out, lse = nothing_seen(q)
        attend_block(q, keys, values, mask.of_sequence(), scale, out, lse)
        return Attended(out.to(q.dtype), lse, q.new_empty(0))
    orders = (mask.order_of_queries, mask.order, mask.order)
    parts = [_to_heads(x, group, order) for x, order in zip((q, k, v), orders, strict=True)]
    kept = torch.cat([part.flatten(1, 2) for part in parts], dim=1)
    queries, keys, values = _split_heads(kept, q, k, group)
    out, lse = nothing_seen(queries)
    attend_block(queries, keys, values, mask.of_sequence(all_queries=True), scale, out, lse)
    return Attended(_to_tokens(out.to(q.dtype), group, mask.order_of_queries), lse, kept)


def attend_backward(
    variant: str,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    done: Attended,
    group: str,
    mask: Mask,
    scale: float,
    wire: WireFormat,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv for the forward pass `done`, in fp32 (fp64 for fp64)."""
    agreement = agree(variant, q, k, group, mask, scale)
    if variant == "ulysses":
        queries, keys, values = _split_heads(done.kept, q, k, group)
        seen, of_out = mask.of_sequence(all_queries=True), dict[str, Tensor]()
        if seen.pieces(queries, keys.shape[1]) is not None:
            of_out["out"] = _to_heads(done.out, group, mask.order_of_queries)
        else:  # fewer bytes
            delta = products(grad_out, done.out, done.lse.dtype).unsqueeze(-1)
            of_out["delta"] = _to_heads(delta, group, mask.order_of_queries).squeeze(-1)
        own = _to_heads(grad_out, group, mask.order_of_queries)
        backward = Backward(own, queries, done.lse, scale, **of_out)
        dkv = backward.zeros((2, *keys.shape))
        backward.block(keys, values, seen, dkv)
        dq = _to_tokens(backward.dq, group, mask.order_of_queries)
        dk, dv = (_to_tokens(each, group, mask.order) for each in dkv)
        return dq, dk, dv
    backward = Backward(grad_out, q, done.lse, scale, out=done.out)
    if variant == "ring":
        dkv = ring_backward(backward, k, v, group, agreement, mask, wire)
    else:
        keys, values = _gather(k, v, group, mask)
        whole = backward.zeros((2, *keys.shape))
        backward.block(keys, values, mask.of_sequence(), whole)
        dkv = _scatter(whole, group, mask)
    return backward.dq, dkv[0], dkv[1]


# -- all-gather of K and V


def _gather(k: Tensor, v: Tensor, group: str, mask: Mask) -> tuple[Tensor, Tensor]:
    """Returns K and V of all ranks in the order of the sequence, [B, S, G, d] each."""
    ranks = len(mask.positions)
    own = torch.stack((k, v))
    if ranks > 1:
        rows = ops.all_gather(own.flatten(0, -2), _companion(group), rows=ranks * own[..., 0].numel())
        own = rows.view(ranks, *own.shape).movedim(0, 2).flatten(2, 3)
    keys, values = own.index_select(2, mask.order)
    return keys, values


def _scatter(dkv: Tensor, group: str, mask: Mask) -> Tensor:
    """Sums dkv [2, B, S, G, d] over ranks; returns this rank's dK and dV [2, B, S/P, G, d]."""
    ranks, share = mask.positions.shape
    by_rank = dkv.index_select(2, mask.places)
    if ranks == 1:
        return by_rank
    rows = by_rank.unflatten(2, (ranks, share)).movedim(2, 0).flatten(0, -2)
    own = ops.reduce_scatter(rows, _companion(group))
    return own.view(*dkv.shape[:2], share, *dkv.shape[3:])


def _companion(group: str) -> str:
    return companion(group, CLASS).name


# -- heads instead of tokens


def _to_heads(x: Tensor, group: str, order: Tensor) -> Tensor:
    """Exchanges [B, n, H, d] for [B, n P, H/P, d]: this rank's heads of the tokens of all ranks, in sequence
    order. order: `Mask.order` or `Mask.order_of_queries`."""
    ranks = process_group(group).size()
    by_rank = x.unflatten(2, (ranks, x.shape[2] // ranks)).movedim(2, 0)
    tokens = _all_to_all(by_rank, group).movedim(0, 1).flatten(1, 2)
    return tokens.index_select(1, order)


def _to_tokens(x: Tensor, group: str, order: Tensor) -> Tensor:
    """Exchanges [B, n P, H/P, d] for [B, n, H, d], all heads of this rank's tokens: reverses `_to_heads`."""
    ranks = process_group(group).size()
    joined = torch.empty_like(x).index_copy_(1, order, x)
    by_rank = joined.unflatten(1, (ranks, x.shape[1] // ranks)).movedim(1, 0)
    return _all_to_all(by_rank, group).movedim(0, 2).flatten(2, 3).contiguous()


def _split_heads(joined: Tensor, q: Tensor, k: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """Splits [B, tokens * heads, d] into the queries, keys and values [B, tokens, heads, d] joined in it."""
    ranks = process_group(group).size()
    sizes = [x.shape[1] * x.shape[2] for x in (q, k, k)]
    queries, keys, values = (
        part.unflatten(1, (x.shape[1] * ranks, x.shape[2] // ranks))
        for part, x in zip(joined.split(sizes, dim=1), (q, k, k), strict=True)
    )
    return queries, keys, values


def _all_to_all(by_rank: Tensor, group: str) -> Tensor:
    """Sends by_rank[r] to each rank r; returns what each rank sent, [P, ...]. Not overlapped."""
    sent = by_rank.contiguous()
    if len(sent) == 1:
        return sent
    ones = [1] * len(sent)
    return AllToAll(group, _companion(group), sent, ones, ones).wait()
