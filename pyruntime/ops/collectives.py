"""Collectives without a GEMM, over the same transport as the primitives. Rows are cut as
torch.tensor_split cuts them."""

from __future__ import annotations

import torch
from torch import Tensor

from pyruntime.comm.groups import Group, group_name
from pyruntime.ops.primitives import ROWS_UNKNOWN


def all_gather(x_shard: Tensor, group: Group, *, dim: int = 0, rows: int | None = None) -> Tensor:
    """All ranks' rows in order, [.., M, .., K] from [.., M_r, .., K]. Backward: reduce_scatter of the
    gradient.

    rows: M; None: the ranks exchange what they hold.
    """
    return torch.ops.pyruntime.all_gather(
        x_shard, group_name(group), dim, ROWS_UNKNOWN if rows is None else rows
    )


def reduce_scatter(x: Tensor, group: Group, *, dim: int = 0) -> Tensor:
    """This rank's rows [.., M_r, .., K] of the sum over ranks of x [.., M, .., K]. Backward: all_gather of
    the gradient."""
    return torch.ops.pyruntime.reduce_scatter(x, group_name(group), dim)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks of x, any shape, on every rank. Backward: identity, as the sum is used alike on
    every rank."""
    return torch.ops.pyruntime.all_reduce(x, group_name(group))


def replicate_grad(w: Tensor, group: Group) -> Tensor:
    """w itself; in the backward its gradient is summed over the ranks.

    For replicated parameters that are applied to sequence shards (norms): each rank sees the gradient of
    its own rows only.
    """
    return torch.ops.pyruntime.replicate_grad(w, group_name(group))


def all_gather_stats(x: Tensor, group: Group) -> Tensor:
    """[P, *x.shape]: x of every rank, the same shape on all of them. No gradient."""
    return torch.ops.pyruntime.all_gather_stats(x, group_name(group))
