"""Layouts of context parallelism: the tokens that each rank has, and the keys that a query sees among them.

Every layout gives all ranks the same number of tokens, in the order of the sequence. So in every layout the
keys that a query sees among one rank's tokens are one run, with and without causal mask and documents. With
P = 4 ranks and 16 tokens::

    contiguous   0000 1111 2222 3333     rank 3 computes seven times what rank 0 does under a causal mask
    zigzag       0011 2233 3322 1100     equal work: rank r has chunks r and 2 P - 1 - r
    striped      0123 0123 0123 0123     nearly equal work, also with short documents
    balanced     by the work of `document_ids`: chunks are assigned one by one, the costliest first
    placed       by the length of documents: long ones on several neighbours, short ones on one (`placed.py`);
                 zigzag without documents, or where another layout needs less

Sources: arXiv 2310.01889 (ring attention), 2311.09431 (striped), zhuzilin/ring-flash-attention (zigzag).
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import torch
from torch import Tensor

from pyruntime.choices import HALVED_LAYOUTS, ContextLayout, check_value, values
from pyruntime.context import placed
from pyruntime.context.ways import Tokens, tokens_sent, ways

LAYOUTS = (*values(ContextLayout), "balanced")
MOST_CHUNKS = 16
"""Limit on the chunks of a rank in the balanced layout."""
LEAST_CHUNK = 64
"""Least tokens of a chunk in the balanced layout, if the sequence is long enough: a block of queries."""
MOST_PLACED = 128
"""Limit on placed layouts that are kept: those of the micro-batches of a step, and of the next one, which is
read ahead. With fewer each would be made again when its step comes."""


def check_layout(layout: str, seq: int, ranks: int) -> None:
    """Raises ValueError unless `layout` can cut `seq` tokens over `ranks` ranks."""
    check_value("layout", layout, LAYOUTS)
    unit = ranks * (2 if layout in HALVED_LAYOUTS and ranks > 1 else 1)
    if seq % unit:
        raise ValueError(
            f"The {layout} layout over {ranks} ranks cuts a sequence into {unit} equal parts, but {seq} "
            f"tokens do not divide by {unit}; pad the sequence to {-(-seq // unit) * unit} tokens."
        )


def positions(
    layout: str,
    seq: int,
    ranks: int,
    document_ids: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Returns the places of each rank's tokens in the sequence, int64 [ranks, seq / ranks], ascending.

    document_ids: for the balanced layout, [seq] or [B, seq]; see `ring_attention`. The same on every rank.
    device: where they are made; the balanced layout's, which are computed on the host, are copied.

    Raises ValueError if the layout cannot cut the sequence, or is balanced without documents.
    """
    check_layout(layout, seq, ranks)
    if layout == "placed":
        if document_ids is None:
            return _positions("zigzag", seq, ranks, torch.device(device))
        starts = document_bounds(document_ids)[0]
        rows = tuple(dict.fromkeys(tuple(row.unique().tolist()) for row in starts))
        return _placed(rows, seq, ranks).to(device)
    if layout != "balanced":
        return _positions(layout, seq, ranks, torch.device(device))
    if document_ids is None:
        raise ValueError(
            'layout="balanced" balances the work of documents; pass document_ids, or use "zigzag".'
        )
    return _balanced(document_ids, ranks).to(device)


def take_shard(
    tokens: Tensor, layout: str, ranks: int, rank: int, document_ids: Tensor | None = None
) -> Tensor:
    """Returns the part [B, S / ranks, ...] of `tokens` [B, S, ...] that belongs to `rank`."""
    places = positions(layout, tokens.shape[1], ranks, document_ids)[rank]
    return tokens.index_select(1, places.to(tokens.device))


@lru_cache(maxsize=64)
def _positions(layout: str, seq: int, ranks: int, device: torch.device) -> Tensor:
    places = torch.arange(seq, device=device)
    if layout == "contiguous" or ranks == 1:
        return places.view(ranks, -1)
    if layout == "striped":
        return places.view(-1, ranks).T.contiguous()
    chunks = places.view(2 * ranks, -1)
    return torch.stack([torch.cat((chunks[r], chunks[2 * ranks - 1 - r])) for r in range(ranks)])


@lru_cache(maxsize=MOST_PLACED)
def _placed(rows: tuple[tuple[int, ...], ...], seq: int, ranks: int) -> Tensor:
    """Returns the layout that sends least, of those whose rank with most attention has little more than it
    needs. rows: where documents begin."""
    documents = [tuple(itertools.pairwise((*row, seq))) for row in rows]
    ids = torch.stack([torch.searchsorted(torch.tensor(row), torch.arange(seq), right=True) for row in rows])
    bounds = document_bounds(ids)
    found = [_positions("zigzag", seq, ranks, torch.device("cpu")), _balanced(ids, ranks)]
    for runs in placed.candidates(documents, ranks):
        found.append(torch.stack([torch.cat([torch.arange(*run) for run in own]) for own in runs]))
    work = (torch.arange(seq) - bounds[0] + 1).sum(0)
    most = [int(work[each].sum(1).max()) for each in found]
    allowed = (1 + placed.MORE_WORK) * min(most)
    sent = [
        tokens_sent(ways(hulls(each, each, True, bounds), seq // ranks)) if own <= allowed else None
        for each, own in zip(found, most, strict=True)
    ]
    return found[min((each, at) for at, each in enumerate(sent) if each is not None)[1]]


def _balanced(document_ids: Tensor, ranks: int) -> Tensor:
    """Assigns chunks by longest processing time first, the same number to every rank."""
    starts, _ = document_bounds(document_ids)
    seq = starts.shape[1]
    share = seq // ranks
    count = max(
        n for n in range(1, MOST_CHUNKS + 1) if share % n == 0 and (n == 1 or share // n >= LEAST_CHUNK)
    )
    work = (torch.arange(seq) - starts + 1).sum(0).view(ranks * count, -1).sum(1).tolist()
    load = [0] * ranks
    chunks: list[list[int]] = [[] for _ in range(ranks)]
    for chunk in sorted(range(len(work)), key=lambda chunk: (-work[chunk], chunk)):
        rank = min((r for r in range(ranks) if len(chunks[r]) < count), key=lambda r: (load[r], r))
        load[rank] += work[chunk]
        chunks[rank].append(chunk)
    places = torch.arange(seq).view(ranks * count, -1)
    return torch.stack([places[sorted(own)].flatten() for own in chunks])


def document_bounds(document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where each token's document begins and ends, both int64 [B, seq], for ids [B, seq] or [seq]. A
    document is a run of one id."""
    ids = document_ids.reshape(-1, document_ids.shape[-1]).cpu()
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = torch.where(is_first, places, 0).cummax(1).values
    is_last = torch.ones_like(is_first)
    is_last[:, :-1] = is_first[:, 1:]
    ends = torch.where(is_last, places + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return starts, ends


def visible_keys(
    queries: Tensor,
    keys: Tensor,
    causal: bool,
    bounds: tuple[Tensor, Tensor] | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the run of keys that each query sees, (begin, end), int32 [B or 1, queries] each.

    queries, keys: their places in the sequence, ascending. bounds: `document_bounds` of all tokens. window:
    the most keys that a query sees up to its own place.
    """
    first = torch.zeros_like(queries)[None] if bounds is None else bounds[0][:, queries]
    if window is not None:
        first = torch.maximum(first, queries - (window - 1))
    if causal:
        beyond = (queries + 1)[None].expand(first.shape)
    elif bounds is None:
        beyond = torch.full_like(first, int(keys[-1]) + 1 if len(keys) else 0)
    else:
        beyond = bounds[1][:, queries]
    begin, end = torch.searchsorted(keys, first.contiguous()), torch.searchsorted(keys, beyond.contiguous())
    return begin.int(), torch.maximum(begin, end).int()


def hulls(
    queries: Tensor,
    keys: Tensor,
    causal: bool,
    bounds: tuple[Tensor, Tensor] | None,
    window: int | None = None,
) -> list[tuple[Tokens, ...]]:
    """Returns [rank][owner]: the least run of the owner's keys with all that any query of the rank sees.

    queries, keys: the places of each rank's, [ranks, n]. The rest as in `visible_keys`."""
    ranks, share = keys.shape
    by_owner = []
    for own in keys:
        begin, end = visible_keys(queries.flatten(), own, causal, bounds, window)
        seen = begin < end
        first = torch.where(seen, begin, share).amin(0).view(ranks, -1).amin(1)
        last = torch.where(seen, end, 0).amax(0).view(ranks, -1).amax(1)
        by_owner.append(list(zip(first.tolist(), last.tolist(), strict=True)))
    return list(zip(*by_owner, strict=True))
