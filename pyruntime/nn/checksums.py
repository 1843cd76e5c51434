"""Whether the ranks of a group hold the same tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from pyruntime.comm import rank_name
from pyruntime.comm.exchange import gather
from pyruntime.nn.cut import memory_of


def different(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[tuple[str, int]]:
    """The tensors whose content is not the first rank's on some rank of `group`, each with the first such
    rank; the same on every rank. Reads every tensor once and exchanges a line for each.

    Raises ValueError, on every rank alike, where ranks have other names, shapes or dtypes."""
    local = {name: memory_of(tensor) for name, tensor in tensors.items()}
    mine = [(name, f"{name} {list(t.shape)} {t.dtype}", _checksum(t)) for name, t in local.items()]
    kind = list[tuple[str, str, tuple[int, int]]]
    everyone = gather(group, "Comparing the models of the ranks", mine, kind)
    first = rank_name(group.group_name, 0)
    found: dict[str, int] = {}
    for rank, theirs in enumerate(everyone):
        one = rank_name(group.group_name, rank)
        for (name, ours, own_sum), (_, other, other_sum) in zip(everyone[0], theirs, strict=False):
            if ours != other:
                raise ValueError(
                    f"The ranks hold different models: where {first} has {ours}, {one} has {other}; build "
                    "the same model on every rank."
                )
            if own_sum != other_sum:
                found.setdefault(name, rank)
        if len(theirs) != len(everyone[0]):
            raise ValueError(
                f"The ranks hold different models: {first} has {len(everyone[0])} parameters, {one} has "
                f"{len(theirs)}; build the same model on every rank."
            )
    return list(found.items())


@torch.no_grad()
def _checksum(tensor: Tensor) -> tuple[int, int]:
    """Two integer sums over the bits, one weighted by row so that permuted rows differ; (0, 0) on meta."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0, 0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    rows = tensor.detach().contiguous().view(integer).view(len(tensor) if tensor.dim() else 1, -1)
    # Integer sums wrap and do not round, so their order does not matter.
    sums = rows.sum(1, dtype=torch.int64)
    weights = torch.arange(1, sums.numel() + 1, device=sums.device)
    return int(sums.sum()), int((sums * weights).sum())
