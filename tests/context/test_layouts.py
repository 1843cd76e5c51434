"""Which tokens ranks hold, and which keys their queries see."""

from __future__ import annotations

import pytest
import torch

from pyruntime.context.layouts import (
    LAYOUTS,
    check_layout,
    document_bounds,
    positions,
    take_shard,
    visible_keys,
)
from pyruntime.context.mask import mask_of


def documents(batch: int, seq: int, seed: int = 0) -> torch.Tensor:
    """Ids of packed documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    is_first = torch.rand(batch, seq, generator=generator) < 6 / seq
    return is_first.cumsum(1)


def visible(
    seq: int, causal: bool, document_ids: torch.Tensor | None, window: int | None = None
) -> torch.Tensor:
    """[B, query, key]: whether a query sees a key."""
    places = torch.arange(seq)
    seen = (places[:, None] >= places) if causal else torch.ones(seq, seq, dtype=torch.bool)
    if window is not None:
        seen &= places[:, None] - places < window
    if document_ids is None:
        return seen[None]
    return seen & (document_ids[:, :, None] == document_ids[:, None, :])


def test_the_layouts_as_they_are_drawn():
    def owners(layout):
        places = positions(layout, 16, 4)
        ranks = torch.empty(16, dtype=torch.long)
        for rank, own in enumerate(places):
            ranks[own] = rank
        return "".join(map(str, ranks.tolist()))

    assert owners("contiguous") == "0000111122223333"
    assert owners("zigzag") == "0011223333221100"
    assert owners("striped") == "0123012301230123"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_token_is_held_once_and_in_order(layout, ranks):
    seq = 2 * ranks * 9
    places = positions(layout, seq, ranks, documents(2, seq))
    assert places.shape == (ranks, seq // ranks)
    assert torch.equal(places.flatten().sort().values, torch.arange(seq))
    assert (places.diff(dim=1) > 0).all()
    tokens = torch.randn(2, seq, 3)
    shards = [take_shard(tokens, layout, ranks, rank, documents(2, seq)) for rank in range(ranks)]
    order = places.flatten().argsort()
    assert torch.equal(torch.cat(shards, 1)[:, order], tokens)


@pytest.mark.parametrize("queries", [16, 5])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 7), (True, 100), (False, None)])
@pytest.mark.parametrize(
    ("layout", "packed"),
    [(layout, packed) for layout in LAYOUTS for packed in (False, True) if packed or layout != "balanced"],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_queries_see_is_a_run_of_every_ranks_keys(layout, ranks, packed, causal, window, queries):
    seq = 2 * ranks * 8
    ids = documents(3, seq) if packed else None
    places = positions(layout, seq, ranks, ids)
    expected = visible(seq, causal, ids, window)
    keys = torch.arange(seq // ranks)
    for rank in range(ranks):
        mask = mask_of(layout, seq, ranks, rank, causal, ids, queries, window=window)
        last = places[rank][-queries:]
        for other in range(ranks):
            begin, end = mask.of_rank(other).there
            seen = (begin[..., None] <= keys) & (keys < end[..., None])
            assert torch.equal(seen, expected[:, last][:, :, places[other]])
        begin, end = mask.of_sequence().there
        seen = (begin[..., None] <= torch.arange(seq)) & (torch.arange(seq) < end[..., None])
        assert torch.equal(seen, expected[:, last])


def test_bounds_of_documents():
    starts, ends = document_bounds(torch.tensor([[7, 7, 3, 3, 3, 7]]))
    assert starts.tolist() == [[0, 0, 2, 2, 2, 5]]
    assert ends.tolist() == [[2, 2, 5, 5, 5, 6]]


def work(places: torch.Tensor, seen: torch.Tensor) -> list[int]:
    return [int(seen[:, own].sum()) for own in places]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_is_shared_as_evenly_as_the_layouts_say(ranks):
    seq = 1024
    seen = visible(seq, True, None)
    for layout, most in (("zigzag", 1.0), ("striped", 1.02), ("contiguous", 2 - 1 / ranks + 0.01)):
        shares = work(positions(layout, seq, ranks), seen)
        assert max(shares) / (sum(shares) / ranks) <= most
    contiguous = work(positions("contiguous", seq, ranks), seen)
    assert max(contiguous) / (sum(contiguous) / ranks) > 1.45


def test_the_balanced_layout_evens_out_documents():
    seq, ranks = 4096, 4
    ids = torch.zeros(1, seq, dtype=torch.long)
    ids[:, 2048:] = torch.arange(2048) // 128 + 1  # one long document, then many short ones
    seen = visible(seq, True, ids)
    balanced, zigzag = (work(positions(layout, seq, ranks, ids), seen) for layout in ("balanced", "zigzag"))
    assert max(balanced) / (sum(balanced) / ranks) < 1.05
    assert max(zigzag) / (sum(zigzag) / ranks) > 1.2


def test_masks_of_documents_are_worked_out_once_until_the_ids_change():
    ids = documents(1, 32)
    first = mask_of("zigzag", 32, 2, 0, True, ids)
    assert mask_of("zigzag", 32, 2, 0, True, ids) is first
    ids[:, 16:] += 1
    assert mask_of("zigzag", 32, 2, 0, True, ids) is not first


@pytest.mark.parametrize(
    ("layout", "seq", "sentence"),
    [
        ("zigzag", 1001, "into 8 equal parts, but 1001 tokens do not divide by 8; pad the sequence to 1008"),
        ("striped", 1002, "into 4 equal parts, but 1002 tokens do not divide by 4; pad the sequence to 1004"),
        ("spiral", 8, "layout='spiral' is none of contiguous, zigzag, striped, placed, balanced"),
    ],
)
def test_what_cannot_be_cut_is_said(layout, seq, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_layout(layout, seq, 4)


def test_balanced_needs_documents():
    with pytest.raises(ValueError, match='pass document_ids, or use "zigzag"'):
        positions("balanced", 64, 2)


def test_keys_that_nobody_sees_are_an_empty_run():
    begin, end = visible_keys(torch.tensor([0, 1]), torch.tensor([2, 3]), True, None)
    assert (begin == end).all()
