"""Attention of this rank's queries to one block of keys, forward and backward; shapes as in `variants.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyruntime.context import flash
from pyruntime.context.mask import SeenKeys
from pyruntime.ops.attention import attention_block_, attention_block_backward_


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, seen: SeenKeys, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Adds what the queries see of these keys to `out` and `lse`, in place."""
    pieces = seen.pieces(k.shape[1]) if flash.is_there(q) else None
    if pieces is not None:
        for piece in pieces:
            flash.attend(piece, q, k, v, scale, out, lse)
        return
    begin, end = _of_batch(seen, q)
    attention_block_(heads(q), heads(k), heads(v), begin, end, heads(out), lse, scale)


class Backward:
    """The backward pass of this rank's queries, block by block of keys. out [B, n, H, d]: the result, which
    flash attention needs; delta [B, n, H]: the sums of its products with grad_out."""

    def __init__(
        self, grad_out: Tensor, q: Tensor, delta: Tensor, out: Tensor | None, lse: Tensor, scale: float
    ):
        self._grad_out, self._q, self._out, self._lse, self._scale = grad_out, q, out, lse, scale
        self._delta = delta.transpose(1, 2).contiguous()
        self.dq = self.zeros(q.shape)

    def zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=self._lse.dtype, device=self._lse.device)

    def block(self, k: Tensor, v: Tensor, seen: SeenKeys, dkv: Tensor) -> None:
        """Adds the part of these keys to dq, and the part of the queries to dkv [2, B, keys, G, d]."""
        pieces = seen.pieces(k.shape[1]) if flash.is_there(self._q) else None
        if pieces is not None and self._out is not None:
            sums = self.dq, dkv[0], dkv[1]
            for piece in pieces:
                flash.attend_backward(
                    piece, self._grad_out, self._q, k, v, self._out, self._lse, self._scale, sums
                )
            return
        begin, end = _of_batch(seen, self._q)
        attention_block_backward_(
            heads(self._grad_out),
            heads(self._q),
            heads(k),
            heads(v),
            begin,
            end,
            self._delta,
            self._lse,
            heads(self.dq),
            heads(dkv[0]),
            heads(dkv[1]),
            self._scale,
        )


def heads(tokens: Tensor) -> Tensor:
    """Returns [B, heads, S, d] for [B, S, heads, d]."""
    return tokens.transpose(1, 2)


def _of_batch(seen: SeenKeys, q: Tensor) -> tuple[Tensor, Tensor]:
    begin, end = (x.expand(len(q), -1) for x in seen.there)
    return begin, end
