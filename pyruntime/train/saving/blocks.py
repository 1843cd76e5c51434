"""Decides which rank writes which block of a checkpoint.

torch.distributed.checkpoint lists the blocks that a rank holds. This module ensures that each is written
once, because torch's own way exchanges pickles between ranks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from pyruntime.comm.exchange import Exchange
from pyruntime.train.saving.staging import Piece


@dataclass(frozen=True)
class HeldBlock:
    """A block that some rank holds, in the form that ranks exchange. Offsets and sizes in elements."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    """The shape of its tensor."""
    nbytes: int


def held(state: dict[str, Any], planner: DefaultSavePlanner, rank: int) -> list[WriteItem]:
    """Returns the blocks of `state` that this rank holds, without empty ones (fewer rows than ranks)."""
    planner.set_up_planner(state, is_coordinator=rank == 0)
    items = planner.create_local_plan().items
    return [item for item in items if item.tensor_data is None or math.prod(item.tensor_data.chunk.sizes)]


def settle(items: Sequence[WriteItem], group: dist.ProcessGroup, doing: str) -> list[WriteItem]:
    """Returns those of `items` that this rank writes. Every rank of `group` calls it. Raises CommTimeout,
    PeerLost, and ValueError on all ranks if the blocks do not make up whole tensors."""
    told = [block_of(item) for item in items]
    if group.size() == 1:
        return [items[place] for place in assign([told])[0]]
    exchange = Exchange(group, doing)
    if group.rank() > 0:
        exchange.tell(told)
        places, refusal = exchange.hear(0, tuple[list[int], str], to_this_rank=True)
    else:
        everyone = [told, *(exchange.hear(rank, list[HeldBlock]) for rank in range(1, group.size()))]
        try:
            (places, *others), refusal = assign(everyone), ""
        except ValueError as error:
            none: list[list[int]] = [[] for _ in everyone]
            (places, *others), refusal = none, str(error)
        for rank, theirs in enumerate(others, start=1):
            exchange.tell((theirs, refusal), to=rank)
    if refusal:
        raise ValueError(refusal)
    return [items[place] for place in places]


def assign(by_rank: Sequence[Sequence[HeldBlock]]) -> list[list[int]]:
    """Returns for each rank the indices of the blocks that it writes. A block that several ranks hold goes to
    the one with the fewest bytes so far, then to the lowest rank.

    Raises ValueError if the blocks do not make up whole tensors.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for rank, blocks in enumerate(by_rank):
        for place, block in enumerate(blocks):
            holders[block.name, block.offsets].append((rank, place))
    _check_whole(by_rank, holders)
    written = [0] * len(by_rank)
    chosen: list[list[int]] = [[] for _ in by_rank]
    # Blocks with a single holder come first, so that the others even out the bytes.
    for candidates in sorted(holders.values(), key=lambda found: len(found) > 1):
        rank, place = min(candidates, key=lambda found: (written[found[0]], found[0]))
        written[rank] += by_rank[rank][place].nbytes
        chosen[rank].append(place)
    return [sorted(places) for places in chosen]


def _check_whole(by_rank: Sequence[Sequence[HeldBlock]], holders: dict) -> None:
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for candidates in holders.values():
        blocks = {by_rank[rank][place] for rank, place in candidates}
        (block, *others) = blocks
        wanted, held_elements = found.get(block.name, (block.whole, 0))
        if others or wanted != block.whole:
            raise ValueError(f"ranks disagree about {block.name}: {sorted(blocks, key=str)}")
        found[block.name] = wanted, held_elements + math.prod(block.sizes)
    for name, (whole, held_elements) in found.items():
        if held_elements != math.prod(whole):
            raise ValueError(f"the ranks hold {held_elements} of {math.prod(whole)} elements of {name}")


def in_files(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Shares a rank's blocks out over files, at least one, so that a file has one block of a tensor. A rank
    has up to three of experts, which ZeRO cuts by rows."""
    files: list[list[WriteItem]] = [[]]
    seen: Counter[str] = Counter()
    for item in items:
        number = seen[item.index.fqn]
        seen[item.index.fqn] += 1
        if number == len(files):
            files.append([])
        files[number].append(item)
    return files


def block_of(item: WriteItem) -> HeldBlock:
    data = item.tensor_data
    assert data is not None  # only tensors are saved
    piece = piece_of(item)
    return HeldBlock(piece.name, piece.offsets, piece.shape, tuple(data.size), piece.nbytes)


def piece_of(item: WriteItem) -> Piece:
    """Returns the block as a file stores it."""
    data = item.tensor_data
    assert data is not None
    return Piece(item.index.fqn, data.properties.dtype, tuple(data.chunk.sizes), tuple(data.chunk.offsets))
