"""Checks that ranks agree bit by bit before a step: on gradients of replicated parameters, and on the numbers
that the step is taken with."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pyruntime import ops
from pyruntime.comm import Group, rank_name
from pyruntime.data_parallel.update import PartState
from pyruntime.ops.placements import PlacementError


def check_replicated(
    gradients: Iterable[tuple[PartState, Tensor]], numbers: Mapping[str, float], world: Group
) -> None:
    """Compares gradients and numbers of the ranks that must have the same.

    gradients: this rank's rows, summed over their axes (`ShardedAdamW.arrived_rows()`). numbers: the same on
    all ranks of `world`, all of which call this.

    Raises PlacementError on every rank if the gradient of a parameter that tensor-parallel ranks hold whole
    differs between them, if one differs between ranks that hold the same rows, or if a number differs."""
    by_group: dict[str, list[tuple[PartState, Tensor]]] = {}
    for state, rows in gradients:
        layout = getattr(state.parameter, "tp_layout", None)
        if layout is not None and layout.dim is None and layout.group.size > 1:
            by_group.setdefault(layout.group.name, []).append((state, rows))
        if state.axes.replicate.size > 1:
            by_group.setdefault(state.axes.replicate.name, []).append((state, rows))
    faults = []
    for name, held in by_group.items():
        digests = [zlib.crc32(rows.contiguous().view(-1).view(torch.uint8).cpu().numpy()) for _, rows in held]
        for place in _that_differ(digests, name):
            faults.append(
                f"the gradient of {held[place][0].part.key} is replicated over group {name}, but its ranks "
                "have different ones: a sum over them is missing, or one too many was taken"
            )
    names = list(numbers)
    faults += [f"{names[place]} differs between ranks" for place in _that_differ(numbers.values(), world)]
    if ranks := _ranks_with(bool(faults), world):
        where = ", ".join(rank_name(world, rank) for rank in ranks)
        raise PlacementError(
            f"Before the step, on {where}: {'; '.join(faults) or 'their errors say what differs'}."
        )


def _that_differ(numbers: Iterable[float], group: Group) -> list[int]:
    """Returns the places of numbers that are not the same on all ranks of the group."""
    told = torch.tensor(list(numbers), dtype=torch.float64)
    if told.numel() == 0:
        return []
    every = ops.all_gather_stats(told, group)
    same = (every == every[0]) | (every.isnan() & every[0].isnan())
    return same.all(0).logical_not().nonzero().flatten().tolist()


def _ranks_with(fault: bool, world: Group) -> list[int]:
    told = ops.all_gather_stats(torch.tensor([float(fault)], dtype=torch.float64), world)
    return told.flatten().nonzero().flatten().tolist()
