"""Attention of this rank's queries to one block of keys, forward and backward; shapes as in `variants.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyruntime.context.mask import Run
from pyruntime.ops.attention import attention_block_, attention_block_backward_


def attend_block(q: Tensor, k: Tensor, v: Tensor, run: Run, scale: float, out: Tensor, lse: Tensor) -> None:
    """Adds what the queries see of these keys to `out` and `lse`, in place."""
    begin, end = _of_batch(run, q)
    attention_block_(heads(q), heads(k), heads(v), begin, end, heads(out), lse, scale)


class Backward:
    """The backward pass of this rank's queries, block by block of keys."""

    def __init__(self, grad_out: Tensor, q: Tensor, delta: Tensor, lse: Tensor, scale: float):
        self._grad_out, self._q, self._delta, self._lse, self._scale = grad_out, q, delta, lse, scale
        self.dq = self.zeros(q.shape)

    def zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=self._lse.dtype, device=self._lse.device)

    def block(self, k: Tensor, v: Tensor, run: Run, dkv: Tensor) -> None:
        """Adds the part of these keys to dq, and the part of the queries to dkv [2, B, keys, G, d]."""
        begin, end = _of_batch(run, self._q)
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


def _of_batch(run: Run, q: Tensor) -> tuple[Tensor, Tensor]:
    begin, end = (x.expand(len(q), -1) for x in run)
    return begin, end
