"""Which keys of each rank this rank's queries see, worked out once for a sequence."""

from __future__ import annotations

import zlib
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyruntime.context.layouts import document_bounds, positions, visible_keys
from pyruntime.context.ways import Way, ways

Run = tuple[Tensor, Tensor]
"""(begin, end) of the keys that each query sees, [B or 1, queries] int32."""


class Mask:
    """What rank `rank` of `ranks` sees of a sequence of `seq` tokens. queries: how many tokens of each rank,
    its last ones, are queries."""

    def __init__(
        self,
        layout: str,
        seq: int,
        ranks: int,
        rank: int,
        causal: bool,
        queries: int,
        document_ids: Tensor | None,
    ):
        self._causal = causal
        documents = b"" if document_ids is None else document_ids.cpu().contiguous().numpy().tobytes()
        self.digest = zlib.crc32(f"{layout} {seq} {causal}".encode() + documents)
        """Of the arguments that are the same on every rank."""
        self._bounds = None if document_ids is None else document_bounds(document_ids)
        self.positions = positions(layout, seq, ranks, document_ids)
        """Of the keys."""
        self._queries_of_ranks = self.positions[:, self.positions.shape[1] - queries :]
        self._queries = self._queries_of_ranks[rank]
        self._of_rank: dict[int, Run] = {}
        self._whole: dict[bool, Run] = {}

    def of_rank(self, rank: int) -> Run:
        """What this rank's queries see of that rank's keys."""
        if rank not in self._of_rank:
            self._of_rank[rank] = visible_keys(
                self._queries, self.positions[rank], self._causal, self._bounds
            )
        return self._of_rank[rank]

    def of_sequence(self, *, all_queries: bool = False) -> Run:
        """What this rank's queries, or those of all ranks in order, see of all keys in the order of the
        sequence."""
        if all_queries not in self._whole:
            everything = torch.arange(self.positions.numel())
            queries = self._queries_of_ranks.flatten().sort().values if all_queries else self._queries
            self._whole[all_queries] = visible_keys(queries, everything, self._causal, self._bounds)
        return self._whole[all_queries]

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """How the keys of all ranks go round, the same on every rank."""
        ranks, share = self.positions.shape
        queries = self._queries_of_ranks.flatten()
        by_owner = []
        for keys in self.positions:
            begin, end = visible_keys(queries, keys, self._causal, self._bounds)
            seen = begin < end
            first = torch.where(seen, begin, share).amin(0).view(ranks, -1).amin(1)
            last = torch.where(seen, end, 0).amax(0).view(ranks, -1).amax(1)
            by_owner.append(list(zip(first.tolist(), last.tolist(), strict=True)))
        return ways(list(zip(*by_owner, strict=True)), share)

    @cached_property
    def order(self) -> Tensor:
        """Where each key of the sequence stands when the ranks' keys are joined rank by rank, [seq]."""
        return self.positions.flatten().argsort()

    @cached_property
    def order_of_queries(self) -> Tensor:
        """As `order`, of the queries."""
        return self._queries_of_ranks.flatten().argsort()


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By the tensor of document ids, as every layer of a model asks for the same one: what the ids were, as
nobody says when they change, and their masks."""


def mask_of(
    layout: str,
    seq: int,
    ranks: int,
    rank: int,
    causal: bool,
    document_ids: Tensor | None,
    queries: int | None = None,
) -> Mask:
    """The mask, from the last times where nothing has changed. queries: all tokens by default."""
    key = (layout, seq, ranks, rank, causal, seq // ranks if queries is None else queries)
    if document_ids is None:
        return _without_documents(*key)
    ids, masks = _known.get(document_ids, (None, {}))
    if ids is None or not torch.equal(ids, document_ids):
        _, masks = _known[document_ids] = document_ids.clone(), {}
    if key not in masks:
        masks[key] = Mask(*key, document_ids)
    return masks[key]


@lru_cache(maxsize=64)
def _without_documents(layout: str, seq: int, ranks: int, rank: int, causal: bool, queries: int) -> Mask:
    return Mask(layout, seq, ranks, rank, causal, queries, None)
