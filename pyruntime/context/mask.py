"""Computes, once for a sequence, which keys of each rank this rank's queries see."""

from __future__ import annotations

import zlib
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyruntime.comm.devices import put
from pyruntime.context import flash
from pyruntime.context.flash import MaskPiece
from pyruntime.context.layouts import document_bounds, hulls, positions, visible_keys
from pyruntime.context.ways import Way, ways

CPU = torch.device("cpu")


class SeenKeys:
    """The keys that each query sees, begin <= key < end, [B or 1, queries] int32. device: where attention
    reads them."""

    def __init__(self, begin: Tensor, end: Tensor, device: torch.device):
        self._begin, self._end, self._device = begin, end, device
        self._after: dict[int, SeenKeys] = {}
        self._pieces: dict[int, tuple[MaskPiece, ...] | None] = {}

    @cached_property
    def there(self) -> tuple[Tensor, Tensor]:
        """begin and end on the device."""
        return put(self._begin, self._device), put(self._end, self._device)

    def after(self, keys: int) -> SeenKeys:
        """Returns the same, with keys counted from number `keys` on; earlier ones are negative."""
        if keys == 0:
            return self
        if keys not in self._after:
            self._after[keys] = SeenKeys(self._begin - keys, self._end - keys, self._device)
        return self._after[keys]

    def pieces(self, q: Tensor, keys: int) -> tuple[MaskPiece, ...] | None:
        """Returns what queries `q` see of that many keys, for flash attention; None if it does not take them,
        or this has no few pieces."""
        if not flash.is_there(q):
            return None
        if keys not in self._pieces:
            self._pieces[keys] = flash.pieces_of(self._begin.clamp(0, keys), self._end.clamp(0, keys))
        return self._pieces[keys]


class Mask:
    """The keys that rank `rank` of `ranks` sees in a sequence of `seq` tokens. queries: number of tokens of
    each rank, its last ones, that are queries. device: where tables go, once, that attention there reads.
    window: the most keys that a query sees up to its own place; None: all."""

    def __init__(
        self,
        layout: str,
        seq: int,
        ranks: int,
        rank: int,
        causal: bool,
        queries: int,
        device: torch.device,
        document_ids: Tensor | None,
        window: int | None = None,
    ):
        self._device = device
        self._causal, self._window = causal, window
        documents = b"" if document_ids is None else document_ids.cpu().contiguous().numpy().tobytes()
        self.digest = zlib.crc32(f"{layout} {seq} {causal} {window}".encode() + documents)
        """Digest of the arguments that are the same on every rank."""
        self._bounds = None if document_ids is None else document_bounds(document_ids)
        self.positions = positions(layout, seq, ranks, document_ids)
        """Places of the keys, [ranks, seq / ranks]."""
        self._queries_of_ranks = self.positions[:, self.positions.shape[1] - queries :]
        self._queries = self._queries_of_ranks[rank]
        self._of_rank: dict[int, SeenKeys] = {}
        self._whole: dict[bool, SeenKeys] = {}

    def of_rank(self, rank: int) -> SeenKeys:
        """Returns the keys of `rank` that this rank's queries see."""
        if rank not in self._of_rank:
            self._of_rank[rank] = self._there(self._queries, self.positions[rank])
        return self._of_rank[rank]

    def of_sequence(self, *, all_queries: bool = False) -> SeenKeys:
        """Returns the keys of the whole sequence, in its order, that this rank's queries see; all_queries:
        that the queries of all ranks, in the order of the sequence, see."""
        if all_queries not in self._whole:
            everything = torch.arange(self.positions.numel())
            queries = self._queries_of_ranks.flatten().sort().values if all_queries else self._queries
            self._whole[all_queries] = self._there(queries, everything)
        return self._whole[all_queries]

    def _there(self, queries: Tensor, keys: Tensor) -> SeenKeys:
        begin, end = visible_keys(queries, keys, self._causal, self._bounds, self._window)
        return SeenKeys(begin, end, self._device)

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """The directions in which keys travel round the ring, the same on every rank."""
        queries, keys = self._queries_of_ranks, self.positions
        return ways(hulls(queries, keys, self._causal, self._bounds, self._window), keys.shape[1])

    @cached_property
    def order(self) -> Tensor:
        """The index of each key of the sequence in the ranks' keys joined rank by rank, [seq]."""
        return put(self.positions.flatten().argsort(), self._device)

    @cached_property
    def places(self) -> Tensor:
        """`positions` rank by rank, on the device, [seq]."""
        return put(self.positions.flatten(), self._device)

    @cached_property
    def order_of_queries(self) -> Tensor:
        """The same as `order`, for the queries."""
        return put(self._queries_of_ranks.flatten().argsort(), self._device)


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""A copy of the document ids and their masks, by the tensor of ids: every layer of a model passes the same
tensor. The copy shows whether its values have changed since."""


def mask_of(
    layout: str,
    seq: int,
    ranks: int,
    rank: int,
    causal: bool,
    document_ids: Tensor | None,
    queries: int | None = None,
    device: torch.device = CPU,
    window: int | None = None,
) -> Mask:
    """Returns the mask, cached for the same arguments. queries: all tokens by default."""
    key = (layout, seq, ranks, rank, causal, seq // ranks if queries is None else queries, device, window)
    if document_ids is None:
        return _without_documents(*key)
    ids, masks = _known.get(document_ids, (None, {}))
    if ids is None or not torch.equal(ids, document_ids):
        _, masks = _known[document_ids] = document_ids.clone(), {}
    if key not in masks:
        masks[key] = Mask(*key[:-1], document_ids, window)
    return masks[key]


@lru_cache(maxsize=64)
def _without_documents(
    layout: str,
    seq: int,
    ranks: int,
    rank: int,
    causal: bool,
    queries: int,
    device: torch.device,
    window: int | None,
) -> Mask:
    return Mask(layout, seq, ranks, rank, causal, queries, device, None, window)
