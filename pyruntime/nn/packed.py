"""Where the features of a packed linear lie, on one rank and after all ranks' have been gathered.

Of parts of sizes n_0, n_1, .. rank r of P holds [part0_r | part1_r | ..], with n_i / P of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ranges_of(sizes: Sequence[int], world_size: int, rank: int, what: str) -> list[tuple[int, int]]:
    """[start, stop) of each part that rank `rank` holds, counted in the whole.

    Raises ValueError, naming `what`, where the ranks do not divide a part."""
    found, begin = [], 0
    for size in sizes:
        if size % world_size:
            raise ValueError(
                f"tp={world_size} does not divide {size}, a part of {what}, whose parts are {list(sizes)}; "
                "use a tp that divides each, or cut it as one."
            )
        share = size // world_size
        found.append((begin + rank * share, begin + (rank + 1) * share))
        begin += size
    return found


def in_order(gathered: Tensor, dim: int, world_size: int, sizes: Sequence[int]) -> Tensor:
    """`gathered` holds what the ranks hold, one rank after the other along `dim`; the whole, part after
    part."""
    dim %= gathered.dim()
    shares = gathered.unflatten(dim, (world_size, -1)).split([n // world_size for n in sizes], dim + 1)
    return torch.cat([share.flatten(dim, dim + 1) for share in shares], dim)
