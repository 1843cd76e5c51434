"""Gathers features and parameters that are cut over ranks, and cuts whole features into this rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyruntime import ops
from pyruntime.nn.parameters import TensorGroup, in_order, own_of, padding_of, ranges_of


def gather_features(
    y_shard: Tensor,
    group: TensorGroup,
    *sizes: int,
    shares: Sequence[int] = (),
    as_read: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Gathers y_shard [..., N_r], rank r's features of the same rows, into y [..., N] on every rank.

    sizes: N, or the sizes of its parts where each is cut by itself. shares: N_r of each rank; (): as
    torch.chunk cuts N. as_read(shape, like, gather): makes a y that calls gather() when it is read (like: a
    tensor of y's dtype and device); None: gather at once.

    Every rank computes the same from y, so its gradient is whole on every rank, and the backward takes this
    rank's features of it without communication (the backward of all_gather would sum P copies)."""
    if group.size == 1:
        return y_shard
    return _GatherFeatures.apply(y_shard, group.name, group.size, group.rank, sizes, tuple(shares), as_read)


def split_features(x: Tensor, group: TensorGroup, features: int, shares: Sequence[int] = ()) -> Tensor:
    """Takes x_shard [..., N_r], rank r's features, of x [..., N], which is the same on every rank. shares: as
    in `gather_features`.

    A rank has only the gradient of its own features, so the backward gathers the gradients."""
    if group.size == 1:
        return x
    return _SplitFeatures.apply(x, group.name, group.size, group.rank, features, tuple(shares))


@torch.no_grad()
def gather_whole(
    local: Tensor, cuts: Iterable[tuple[TensorGroup, int, Sequence[int], Sequence[int]]]
) -> Tensor:
    """Gathers, on every rank, the full tensor of a shard. cuts: as `Cut.cuts_of` returns them. All ranks of
    the groups must call this; no gradient."""
    for axis, dim, sizes, shares in cuts:
        if axis.size > 1:
            local = _gather(local, axis.name, axis.size, dim, sizes, shares)
    return local


def _gather(
    local: Tensor, name: str, size: int, dim: int, sizes: Sequence[int], shares: Sequence[int]
) -> Tensor:
    missing = padding_of(sum(sizes), size, local.shape[dim], shares)
    if missing:  # all ranks send equally much
        local = pad(local, [0, 0] * (local.dim() - 1 - dim) + [0, missing])
    # all_gather joins rows and keeps the last dimension, so a last dimension of size 1 is added.
    gathered = ops.all_gather(local.unsqueeze(-1), name, dim=dim, rows=local.shape[dim] * size)
    return in_order(gathered.squeeze(-1), dim, size, sizes, shares)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        y_shard: Tensor,
        name: str,
        size: int,
        rank: int,
        sizes: tuple[int, ...],
        shares: tuple[int, ...],
        as_read: Callable[..., Tensor] | None,
    ) -> Tensor:
        ctx.ranges = ranges_of(sizes, size, rank, shares=shares)
        own = y_shard.detach()

        def gathered() -> Tensor:
            # .data, no view: autograd forbids in-place writes to a view that was made in this function.
            return _gather(own, name, size, own.dim() - 1, sizes, shares).data

        return gathered() if as_read is None else as_read((*own.shape[:-1], sum(sizes)), own, gathered)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return own_of(grad, -1, ctx.ranges).contiguous(), *[None] * 6


class _SplitFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, name: str, size: int, rank: int, features: int, shares: tuple[int, ...]
    ) -> Tensor:
        ctx.group = name, size, (features,), shares
        return own_of(x, -1, ranges_of((features,), size, rank, shares=shares)).contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):
        name, size, features, shares = ctx.group
        whole = _gather(grad.contiguous(), name, size, grad.dim() - 1, features, shares)
        return whole, *[None] * 5
