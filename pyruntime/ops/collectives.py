"""Collectives without a GEMM, over the primitives' transport. Rows are cut as by torch.tensor_split."""

from __future__ import annotations

import torch
from torch import Tensor

from pyruntime.comm.groups import Group, group_name
from pyruntime.ops.primitives import ROWS_UNKNOWN


def all_gather(x_shard: Tensor, group: Group, *, dim: int = 0, rows: int | None = None) -> Tensor:
    """Returns all ranks' rows in rank order, [.., M, .., K] from [.., M_r, .., K]. Backward: reduce_scatter
    of the gradient.

    rows: M; None: the ranks exchange their numbers of rows.
    """
    return torch.ops.pyruntime.all_gather(
        x_shard, group_name(group), dim, ROWS_UNKNOWN if rows is None else rows
    )


def reduce_scatter(x: Tensor, group: Group, *, dim: int = 0) -> Tensor:
    """Returns this rank's rows [.., M_r, .., K] of the sum over ranks of x [.., M, .., K]. Backward:
    all_gather of the gradient."""
    return torch.ops.pyruntime.reduce_scatter(x, group_name(group), dim)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Returns the sum over ranks of x, any shape, on every rank. Backward: the identity, which is right if
    all ranks use the sum in the same way."""
    return torch.ops.pyruntime.all_reduce(x, group_name(group))


def replicate_grad(w: Tensor, group: Group) -> Tensor:
    """Returns w; in the backward its gradient is summed over the ranks.

    Use it for replicated parameters that are applied to sequence shards (norms), where each rank has only the
    gradient of its own rows.
    """
    return torch.ops.pyruntime.replicate_grad(w, group_name(group))


def all_gather_stats(x: Tensor, group: Group) -> Tensor:
    """Returns x of every rank, [P, *x.shape]; all ranks pass the same shape. No gradient."""
    return torch.ops.pyruntime.all_gather_stats(x, group_name(group))
