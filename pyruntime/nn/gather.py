"""Gathering what is cut over the ranks: features, for readers that are replicated, and parameters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyruntime import ops
from pyruntime.nn.parameters import TensorGroup, shard_bounds


def gather_features(y_shard: Tensor, group: TensorGroup, features: int) -> Tensor:
    """y_shard [..., N_r], rank r's features of the same rows -> y [..., N], the same on every rank.

    Whatever reads y is replicated, so its gradient is already whole on every rank and the backward keeps this
    rank's features of it without communication (the backward of all_gather would sum P copies)."""
    if group.size == 1:
        return y_shard
    return _GatherFeatures.apply(y_shard, group.name, group.size, group.rank, features)


@torch.no_grad()
def gather_shard(local: Tensor, group: TensorGroup, dim: int, total: int) -> Tensor:
    """The whole of a tensor that is `total` along `dim`, cut as parameters are, on every rank. All ranks of
    the group must call this; no gradient."""
    if group.size == 1:
        return local
    chunk = -(-total // group.size)  # every rank's share but that of the last ones, see parameters.py
    missing = chunk - local.shape[dim]
    if missing:  # all send equal shares; the padding of the last ones ends up behind the whole tensor
        local = pad(local, [0, 0] * (local.dim() - 1 - dim) + [0, missing])
    stacked = ops.all_gather(local.unsqueeze(0), group.name, rows=group.size)  # [P, *local.shape]
    return stacked.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, total)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_shard: Tensor, name: str, size: int, rank: int, features: int) -> Tensor:
        ctx.bounds = shard_bounds(features, size, rank)
        # Only the last shard may be narrower; padded to one width, the gathered features are contiguous up to
        # `features`.
        chunk = -(-features // size)
        padded = pad(y_shard, (0, chunk - y_shard.size(-1))) if y_shard.size(-1) < chunk else y_shard
        # all_gather joins rows: the features become the rows of a tensor that is one wide.
        gathered = ops.all_gather(padded.unsqueeze(-1), name, dim=padded.dim() - 1, rows=chunk * size)
        return gathered.squeeze(-1)[..., :features]

    @staticmethod
    def backward(ctx, grad: Tensor):
        start, stop = ctx.bounds
        return grad[..., start:stop].contiguous(), None, None, None, None
