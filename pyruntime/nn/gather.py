"""Gathering what is cut over the ranks: features, for readers that are replicated, and parameters. And the
reverse: this rank's features of what is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyruntime import ops
from pyruntime.nn.packed import in_order, ranges_of
from pyruntime.nn.parameters import TensorGroup, shard_bounds


def gather_features(
    y_shard: Tensor,
    group: TensorGroup,
    features: int,
    packed: tuple[int, ...] = (),
    *,
    as_read: Callable[..., Tensor] | None = None,
) -> Tensor:
    """y_shard [..., N_r], rank r's features of the same rows -> y [..., N], the same on every rank. packed:
    sizes of the parts of N that are cut by themselves. as_read: makes y of its shape, of a tensor with its
    dtype and device, and of what gathers its elements; None: they are gathered at once.

    Whatever reads y is replicated, so its gradient is already whole on every rank and the backward keeps this
    rank's features of it without communication (the backward of all_gather would sum P copies)."""
    if group.size == 1:
        return y_shard
    return _GatherFeatures.apply(y_shard, group.name, group.size, group.rank, features, packed, as_read)


def split_features(x: Tensor, group: TensorGroup, features: int) -> Tensor:
    """x [..., N], the same on every rank -> x_shard [..., N_r], rank r's features.

    Every rank's gradient is of its own features alone, so the backward gathers them."""
    if group.size == 1:
        return x
    return _SplitFeatures.apply(x, group.name, group.size, group.rank, features)


@torch.no_grad()
def gather_shard(
    local: Tensor, group: TensorGroup, dim: int, total: int, packed: tuple[int, ...] = ()
) -> Tensor:
    """The whole of a tensor that is `total` along `dim`, cut as parameters are, on every rank. All ranks of
    the group must call this; no gradient."""
    if group.size == 1:
        return local
    whole = _gather(local, group.name, group.size, dim, total)
    return in_order(whole, dim, group.size, packed) if packed else whole


def gather_whole(
    local: Tensor,
    cuts: Iterable[tuple[TensorGroup, int | None]],
    shape: Sequence[int],
    packed: tuple[int, ...] = (),
) -> Tensor:
    """The same of a tensor of `shape` that is cut over several axes, each along its dimension (None: over
    that axis it is not cut). packed: of one axis alone."""
    for axis, dim in cuts:
        if dim is not None:
            local = gather_shard(local, axis, dim, shape[dim], packed)
    return local


def _gather(local: Tensor, name: str, size: int, dim: int, total: int) -> Tensor:
    chunk = -(-total // size)  # every rank's share but that of the last ones, see parameters.py
    missing = chunk - local.shape[dim]
    if missing:  # all send equal shares; the padding of the last ones ends up behind the whole tensor
        local = pad(local, [0, 0] * (local.dim() - 1 - dim) + [0, missing])
    # all_gather joins rows, which come before a last dimension: here one that is one wide.
    gathered = ops.all_gather(local.unsqueeze(-1), name, dim=dim, rows=chunk * size)
    return gathered.squeeze(-1).narrow(dim, 0, total)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        y_shard: Tensor,
        name: str,
        size: int,
        rank: int,
        features: int,
        packed: tuple[int, ...],
        as_read: Callable[..., Tensor] | None,
    ) -> Tensor:
        ctx.ranges = (
            ranges_of(packed, size, rank, "features") if packed else [shard_bounds(features, size, rank)]
        )
        own = y_shard.detach()

        def gathered() -> Tensor:
            y = _gather(own, name, size, own.dim() - 1, features)
            # No view of what was gathered: autograd lets nobody write to a view that was made in here.
            return in_order(y, -1, size, packed) if packed else y.data

        return gathered() if as_read is None else as_read((*own.shape[:-1], features), own, gathered)

    @staticmethod
    def backward(ctx, grad: Tensor):
        own = [grad[..., start:stop] for start, stop in ctx.ranges]
        dy = torch.cat(own, -1) if len(own) > 1 else own[0].contiguous()
        return dy, None, None, None, None, None, None


class _SplitFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, name: str, size: int, rank: int, features: int) -> Tensor:
        ctx.group = name, size, features
        start, stop = shard_bounds(features, size, rank)
        return x[..., start:stop].contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):
        name, size, features = ctx.group
        return _gather(grad.contiguous(), name, size, grad.dim() - 1, features), None, None, None, None
