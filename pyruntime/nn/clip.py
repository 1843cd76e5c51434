"""The norm of a gradient that is cut over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.nn.parameters import Group, TensorGroup
from pyruntime.ops.layers import sum_of_squares


@torch.no_grad()
def grad_norm(parameters: Tensor | Iterable[nn.Parameter], group: Group | TensorGroup | None) -> Tensor:
    """The Euclidean norm of the full gradient, an fp64 scalar, bitwise the same on every rank of `group`.

    Parameters with `tp_dim` set are shards, and every rank's square counts; the others are replicated, and
    rank 0's square counts once. One gather of two numbers. Parameters without a gradient count as zero. Every
    rank must call it."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    group = TensorGroup.of(group)
    cut, whole = [], []
    for p in parameters:
        if p.grad is None:
            continue
        if getattr(p, "tp_dim", None) is None:
            whole.append(p.grad)
        elif p.tp_group_name == group.name:
            cut.append(p.grad)
        else:
            raise ValueError(
                f"A parameter of shape {list(p.shape)} is cut over group {p.tp_group_name!r}, but its "
                f"gradient's norm was asked over {group.name!r}; pass the group that the layers were built "
                "with."
            )
    if group.size == 1:
        return sum_of_squares(cut + whole).sqrt()
    device = parameters[0].device if parameters else torch.device("cpu")
    squares = torch.stack([sum_of_squares(cut, device), sum_of_squares(whole, device)])
    gathered = ops.all_gather_stats(squares, group.name)  # [P, 2]
    return (gathered[:, 0].sum() + gathered[0, 1]).sqrt()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[nn.Parameter],
    max_norm: float,
    group: Group | TensorGroup | None,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ over shards: scales every gradient in place so that their norm over the
    group is at most max_norm, and returns the norm before (fp64 scalar, see grad_norm). torch's own sees all
    shards as well (gradients.py); this one sums in fp64.

    Raises ValueError where max_norm is not positive; RuntimeError for a norm of nan or inf with
    error_if_nonfinite."""
    if not max_norm > 0:
        raise ValueError(
            f"max_norm={max_norm} would erase or keep every gradient; it must be a number above 0."
        )
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = grad_norm(parameters, group)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The gradient's norm is {total.item()}, so it cannot be clipped to max_norm={max_norm}."
        )
    grads = [p.grad for p in parameters if p.grad is not None]
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if grads and (total.device.type != "cpu" or scale.item() != 1.0):
        torch._foreach_mul_(grads, scale.to(grads[0].device, torch.float32))
    return total
