"""All ranks of a context must call attention alike: what would otherwise be garbage is an error."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from pyruntime import ops
from pyruntime.comm import companion, process_group, rank_name
from pyruntime.context.mask import Mask


def agree(variant: str, q: Tensor, k: Tensor, group: str, mask: Mask, scale: float) -> int:
    """A digest of all that the ranks must have in common, 1 or more.

    The ring compares it with what it sends. The other variants compare it once, by a small all-gather. Raises
    ValueError on all ranks where it differs.
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
            f"with {said}, and {names} with something else; call it alike on all."
        )
    known.agreed.add(digest)
    return digest
