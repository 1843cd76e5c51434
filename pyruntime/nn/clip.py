"""Computes the norm of gradients that are cut over ranks, and clips gradients by it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.nn.cut import memory_of
from pyruntime.nn.parameters import Group, TensorGroup
from pyruntime.ops.layers import sum_of_squares


@torch.no_grad()
def grad_norm(parameters: Tensor | Iterable[nn.Parameter], group: Group | TensorGroup | None) -> Tensor:
    """Returns the Euclidean norm of the full gradient, an fp64 scalar with the same bits on every rank.

    Parameters that are cut over the group are shards, so the squares of all ranks are summed. The others are
    replicated, so only rank 0's square counts. In a group of two axes this holds for each axis. Each axis
    takes one gather of a few numbers. Parameters without a gradient count as zero. Every rank must call it.
    Raises ValueError where a parameter is cut over another group."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    group = TensorGroup.of(group)
    axes = [axis for axis in group.axes if axis.size > 1]
    kinds = list(product((True, False), repeat=len(axes)))  # for each axis: whether gradients are cut over it
    gradients: dict[tuple[bool, ...], list[Tensor]] = {kind: [] for kind in kinds}
    for p in parameters:
        if p.grad is not None:
            gradients[tuple(axis.name in _cut_over(p, group) for axis in axes)].append(memory_of(p.grad))
    device = parameters[0].device if parameters else torch.device("cpu")
    squares = torch.stack([sum_of_squares(of_kind, device) for of_kind in gradients.values()])
    for place, axis in enumerate(axes):
        every = ops.all_gather_stats(squares, axis.name)  # [P, kinds]
        total = every.sum(0)
        squares = torch.stack([(total if kind[place] else every[0])[i] for i, kind in enumerate(kinds)])
    return squares.sum().sqrt()


def _cut_over(parameter: Tensor, group: TensorGroup) -> tuple[str, ...]:
    """Returns the names of the axes of `group` over which the parameter is cut."""
    layout = getattr(parameter, "tp_layout", None)
    cut_over = () if layout is None else layout.cut_over
    others = [name for name in cut_over if name not in {axis.name for axis in group.axes}]
    if getattr(parameter, "tp_dim", None) is not None and parameter.tp_group_name != group.name:
        others.insert(0, parameter.tp_group_name)
    if others:
        raise ValueError(
            f"A parameter of shape {list(parameter.shape)} is cut over group {others[0]!r}, "
            f"but the norm of its gradient was requested over {group.name!r}; pass the group that the layers "
            "were built with."
        )
    return cut_over


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[nn.Parameter],
    max_norm: float,
    group: Group | TensorGroup | None,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales every gradient in place so that their norm over the group is at most max_norm. Returns the norm
    before that (fp64 scalar, see grad_norm). torch.nn.utils.clip_grad_norm_ covers all shards too (cut.py),
    but this one sums in fp64.

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
    grads = [memory_of(p.grad) for p in parameters if p.grad is not None]
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    # A factor on a device is not read, because the host would wait for it.
    if grads and (total.device.type != "cpu" or scale.item() != 1.0):
        torch._foreach_mul_(grads, scale.to(grads[0].device, torch.float32))
    return total
