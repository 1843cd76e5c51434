"""Attention to one block of keys by torch's flash attention, on NVIDIA GPUs, which keeps no scores.

A block's mask is divided into pieces: queries that all see the same keys, or squares below their diagonal; so
it does not matter how a causal mask lies over fewer queries than keys. Flash attention gives a piece's output
and log-sum-exp, which are merged as `attention_block_` merges them; its backward pass takes the output and
log-sum-exp over all blocks (Liu et al. 2023, Ring Attention, arXiv:2310.01889), in torch's deterministic
mode. A piece's gradients come in q's dtype, and are summed in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MOST_PIECES = 16
"""Masks of more, such as those of many documents, are left to the operators that take any mask."""
MOST_FEATURES = 192
"""The widest head: with more features some GPUs lack the backward pass."""
AMPERE = 8
"""The first compute capability that has flash attention."""


class MaskPiece(NamedTuple):
    """Consecutive queries and keys. causal: as many of one as of the other, and query i sees keys 0 to i."""

    queries: slice
    keys: slice
    causal: bool


def is_there(q: Tensor) -> bool:
    """Whether flash attention takes such queries, [B, n, H, d]."""
    fits = (
        q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= MOST_FEATURES
    )
    if not fits or not q.is_cuda or torch.version.hip is not None:
        return False
    return torch.get_device_module(q.device).get_device_capability(q.device)[0] >= AMPERE


def pieces_of(begin: Tensor, end: Tensor) -> tuple[MaskPiece, ...] | None:
    """Divides a mask: query i sees keys begin[0, i] <= j < end[0, i]; begin and end [B or 1, queries] on the
    host. Returns None if sequences differ, or if it has more than MOST_PIECES."""
    if len(begin) > 1:
        return None
    sees = end[0] > begin[0]
    low, high = begin[0] * sees, end[0] * sees
    grows = high.diff()
    kinds = torch.where((low.diff() == 0) & ((grows == 0) | (grows == 1)), grows, 2)
    changes = [*(kinds.diff().nonzero().flatten() + 1).tolist(), len(kinds)]
    found: list[MaskPiece] = []
    first = 0
    while first < len(low):
        kind = int(kinds[first]) if first < len(kinds) else 2
        last = first if kind == 2 else next(each for each in changes if each > first)
        begins = first + 1 if kind == 1 and not sees[first] else first
        found += _between(begins, last + 1, int(low[begins]), int(high[last]), kind == 1)
        if len(found) > MOST_PIECES:
            return None
        first = last + 1
    return tuple(found)


def _between(first: int, stop: int, low: int, high: int, causal: bool) -> Iterator[MaskPiece]:
    """Yields the pieces of queries of which the last sees keys low <= j < high. causal: each before it sees
    one less than the next; else all see the same."""
    square = high - (stop - first) if causal else high
    if low < square:
        yield MaskPiece(slice(first, stop), slice(low, square), causal=False)
    if causal:
        yield MaskPiece(slice(first, stop), slice(square, high), causal=True)


def attend(piece: MaskPiece, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
    """Merges a piece into out [B, n, H, d] and lse [B, H, n], as `attention_block_`. q [B, n, H, d], k and v
    [B, keys, G, d]."""
    part, own, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        _heads(q, piece.queries),
        _heads(k, piece.keys),
        _heads(v, piece.keys),
        is_causal=piece.causal,
        scale=scale,
    )
    before, sums = lse[:, :, piece.queries], out[:, piece.queries]
    merged = torch.logaddexp(before, own)
    sums.mul_(_of_rows(before - merged)).add_(part.transpose(1, 2) * _of_rows(own - merged))
    before.copy_(merged)


def attend_backward(
    piece: MaskPiece,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    sums: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds a piece's gradients to those of queries, keys and values in `sums`, which have the shapes of q, k
    and v. out and lse: over all blocks."""
    with _deterministic():
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            _heads(grad_out, piece.queries),
            _heads(q, piece.queries),
            _heads(k, piece.keys),
            _heads(v, piece.keys),
            _heads(out, piece.queries),
            lse[:, :, piece.queries].contiguous(),
            None,  # sequences of one length
            None,
            piece.queries.stop - piece.queries.start,
            piece.keys.stop - piece.keys.start,
            0.0,
            piece.causal,
            None,  # no dropout
            None,
            scale=scale,
        )
    for each, tokens, found in zip(sums, (piece.queries, piece.keys, piece.keys), gradients, strict=True):
        each[:, tokens].add_(found.transpose(1, 2))


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Lets sums have an order: dQ is added up by several blocks of a kernel otherwise."""
    before, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def _heads(tokens: Tensor, some: slice) -> Tensor:
    """Returns some tokens of [B, n, H, d] as [B, H, some, d]."""
    return tokens[:, some].transpose(1, 2)


def _of_rows(logarithms: Tensor) -> Tensor:
    """Returns the factors [B, n, H, 1] of rows, for their logarithms [B, H, n]."""
    return logarithms.exp().transpose(1, 2).unsqueeze(-1)
