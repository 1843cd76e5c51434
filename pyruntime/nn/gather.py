"""Gathers features and parameters that are cut over ranks, and cuts whole features into this rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyruntime import ops
from pyruntime.nn.parameters import TensorGroup, in_order, own_of, ranges_of, shard_bounds


def gather_features(
    y_shard: Tensor,
    group: TensorGroup,
    *sizes: int,
    as_read: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Gathers y_shard [..., N_r], rank r's features of the same rows, into y [..., N] on every rank.

    sizes: N, or the sizes of its parts where each is cut by itself. as_read(shape, like, gather): makes a y
    that calls gather() when it is read (like: a tensor of y's dtype and device); None: gather at once.

    Every rank computes the same from y, so its gradient is whole on every rank, and the backward takes this
    rank's features of it without communication (the backward of all_gather would sum P copies)."""
    if group.size == 1:
        return y_shard
    return _GatherFeatures.apply(y_shard, group.name, group.size, group.rank, sizes, as_read)


def split_features(x: Tensor, group: TensorGroup, features: int) -> Tensor:
    """Takes x_shard [..., N_r], rank r's features, of x [..., N], which is the same on every rank.

    A rank has only the gradient of its own features, so the backward gathers the gradients."""
    if group.size == 1:
        return x
    return _SplitFeatures.apply(x, group.name, group.size, group.rank, features)


@torch.no_grad()
def gather_whole(local: Tensor, cuts: Iterable[tuple[TensorGroup, int, Sequence[int]]]) -> Tensor:
    """Gathers, on every rank, the full tensor of a shard. cuts: as `Cut.cuts_of` returns them. All ranks of
    the groups must call this; no gradient."""
    for axis, dim, sizes in cuts:
        if axis.size > 1:
            local = _gather(local, axis.name, axis.size, dim, sizes)
    return local


def _gather(local: Tensor, name: str, size: int, dim: int, sizes: Sequence[int]) -> Tensor:
    total = sum(sizes)
    chunk = -(-total // size)  # the last ranks may hold less, see parameters.py
    missing = chunk - local.shape[dim]
    if missing:  # all ranks send equal shares; the last ranks' padding ends up behind the full tensor
        local = pad(local, [0, 0] * (local.dim() - 1 - dim) + [0, missing])
    # all_gather joins rows and keeps the last dimension, so a last dimension of size 1 is added.
    gathered = ops.all_gather(local.unsqueeze(-1), name, dim=dim, rows=chunk * size)
    gathered = gathered.squeeze(-1).narrow(dim, 0, total)
    return in_order(gathered, dim, size, sizes) if len(sizes) > 1 else gathered


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        y_shard: Tensor,
        name: str,
        size: int,
        rank: int,
        sizes: tuple[int, ...],
        as_read: Callable[..., Tensor] | None,
    ) -> Tensor:
        ctx.ranges = ranges_of(sizes, size, rank)
        own = y_shard.detach()

        def gathered() -> Tensor:
            # .data, no view: autograd forbids in-place writes to a view that was made in this function.
            return _gather(own, name, size, own.dim() - 1, sizes).data

        return gathered() if as_read is None else as_read((*own.shape[:-1], sum(sizes)), own, gathered)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return own_of(grad, -1, ctx.ranges).contiguous(), None, None, None, None, None


class _SplitFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, name: str, size: int, rank: int, features: int) -> Tensor:
        ctx.group = name, size, features
        start, stop = shard_bounds(features, size, rank)
        return x[..., start:stop].contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):
        name, size, features = ctx.group
        return _gather(grad.contiguous(), name, size, grad.dim() - 1, (features,)), None, None, None, None
