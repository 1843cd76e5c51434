"""Attention of this rank's queries to one block of keys, forward and backward; shapes as in `variants.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from pyruntime.context import flash
from pyruntime.context.mask import SeenKeys
from pyruntime.ops.attention import attention_block_, attention_block_backward_


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, seen: SeenKeys, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Adds what the queries see of these keys to `out` and `lse`, in place."""
    if (pieces := seen.pieces(q, k.shape[1])) is not None:
        for piece in pieces:
            flash.attend(piece, q, k, v, scale, out, lse)
        return
    begin, end = _of_batch(seen, q)
    attention_block_(heads(q), heads(k), heads(v), begin, end, heads(out), lse, scale)


class Backward:
    """The backward pass of this rank's queries, block by block of keys. out [B, n, H, d]: the result; without
    it, which flash attention needs, delta [B, n, H]: the sums of its products with grad_out."""

    def __init__(
        self,
        grad_out: Tensor,
        q: Tensor,
        lse: Tensor,
        scale: float,
        *,
        out: Tensor | None = None,
        delta: Tensor | None = None,
    ):
        self._grad_out, self._q, self._lse, self._scale = grad_out, q, lse, scale
        self._out, self._given_delta = out, delta
        self.dq = self.zeros(q.shape)

    @cached_property
    def _delta(self) -> Tensor:
        delta = self._given_delta
        if delta is None:
            assert self._out is not None
            delta = products(self._grad_out, self._out, self._lse.dtype)
        return delta.transpose(1, 2).contiguous()

    def zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=self._lse.dtype, device=self._lse.device)

    def block(self, k: Tensor, v: Tensor, seen: SeenKeys, dkv: Tensor) -> None:
        """Adds the part of these keys to dq, and the part of the queries to dkv [2, B, keys, G, d]."""
        if self._out is not None and (pieces := seen.pieces(self._q, k.shape[1])) is not None:
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


def products(grad_out: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of grad_out * out for each row of [B, n, H, d], in `dtype`: [B, n, H]."""
    return (grad_out.to(dtype) * out).sum(-1)


def heads(tokens: Tensor) -> Tensor:
    """Returns [B, heads, S, d] for [B, S, heads, d]."""
    return tokens.transpose(1, 2)


def _of_batch(seen: SeenKeys, q: Tensor) -> tuple[Tensor, Tensor]:
    begin, end = (x.expand(len(q), -1) for x in seen.there)
    return begin, end
