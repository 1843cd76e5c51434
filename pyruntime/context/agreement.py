"""Checks that all ranks of a context call attention alike; different arguments would give wrong results."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from pyruntime import ops
from pyruntime.comm import companion, process_group, rank_name
from pyruntime.context.mask import Mask


def agree(variant: str, q: Tensor, k: Tensor, group: str, mask: Mask, scale: float) -> int:
    """Returns a digest, 1 or more, of the arguments that must be the same on all ranks.

    The ring sends it along and compares it. The other variants compare it once, by a small all-gather, and
    raise ValueError on all ranks if it differs.
    """
    said = f"{variant} {scale!r} {tuple(q.shape)} {tuple(k.shape)} {q.dtype} {mask.digest}"
    digest = 1 + zlib.crc32(said.encode())
    own = process_group(group)
    if variant == "ring" or own.size() == 1:
        return digest
    known = companion(group, "cp")
    if digest in known.agreed:
        return digest
    found = ops.all_gather_stats(torch.tensor([digest], dtype=torch.float64), known.name)
    if not (found == digest).all():
        others = [rank for rank, other in enumerate(found.flatten().tolist()) if other != digest]
        names = ", ".join(rank_name(own, rank) for rank in others)
        raise ValueError(
            f"ring_attention: the ranks of group '{group}' disagree: {rank_name(own, own.rank())} was called "
            f"with {said}, but {names} with other arguments; pass the same on all ranks."
        )
    known.agreed.add(digest)
    return digest
