"""What goes which way round the ring, by plans alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from pyruntime.context.mask import Mask
from pyruntime.context.ways import NONE
from tests.context.test_layouts import documents

LAYOUTS = ("contiguous", "zigzag", "striped")


def masks(layout, ranks, share, causal=True, ids=None, queries=None, window=None):
    queries = share if queries is None else queries
    return [
        Mask(layout, ranks * share, ranks, rank, causal, queries, torch.device("cpu"), ids, window)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("queries", [14, 5])
@pytest.mark.parametrize("documented", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 9), (False, None)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_every_rank_gets_all_keys_that_it_sees_and_all_parts_of_sums_come_home(
    ranks, layout, causal, window, documented, queries
):
    share = 14
    ids = documents(2, ranks * share, seed=ranks) if documented else None
    every = masks(layout, ranks, share, causal, ids, queries, window)
    plan = every[0].ways
    assert all(mask.ways == plan for mask in every)
    assert sorted(token for way in plan for token in range(*way.tokens)) == list(range(share))
    assert len({way.comes_back for way in plan}) == 1
    for rank, mask in enumerate(every):
        for owner in set(range(ranks)) - {rank}:
            begin, end = mask.of_rank(owner).there
            seen = {t for b, e in zip(begin.flatten(), end.flatten(), strict=True) for t in range(b, e)}
            got, added = set(), set()
            for way in plan:
                distance = next(d for d in range(ranks) if way.owner(rank, d) == owner)
                held = range(share)
                for hop in range(1, distance + 1):  # what is passed on was there
                    assert set(range(*way.keys(owner, hop))) <= set(held)
                    held = range(*way.keys(owner, hop))
                got |= set(held)
                part = set(range(*way.seen(rank, owner)))
                assert not added & part  # each part once
                if way.comes_back:
                    hops = [way.seen_from(owner, hop) for hop in range(1, distance + 1)]
                else:
                    hops = [way.sums(owner, hop) for hop in range(distance, ranks)]
                assert all(part <= set(range(*each)) for each in hops)
                added |= part
            assert seen <= got
            assert seen <= added


def test_keys_that_are_in_no_window_do_not_travel():
    """Of contiguous shares of 10 tokens the next rank sees the last 3, and no other rank any."""
    up, down = masks("contiguous", 4, 10, window=4)[0].ways
    assert up.comes_back and down.comes_back
    assert [[up.keys(owner, d) for d in (1, 2, 3)] for owner in range(3)] == [[(7, 10), NONE, NONE]] * 3
    assert up.keys(3, 1) == (0, 1)  # by which ranks compare their arguments
    assert [down.keys(owner, d) for owner in range(4) for d in (1, 2, 3)] == [NONE] * 12
    assert (up.reach, down.reach) == (1, 0)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_window_sends_a_small_part_of_what_all_keys_do(layout):
    ranks, share, window = 8, 64, 16
    of_window, whole = (carried(masks(layout, ranks, share, window=each)[0]) for each in (window, None))
    assert of_window < whole / 10


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_documents_of_two_ranks_travel_between_these(ranks):
    """Each rank's second half begins a document that ends in the next rank's first half."""
    share = 12
    ids = (torch.arange(ranks * share) + share // 2) // share
    up, down = masks("contiguous", ranks, share, ids=ids)[0].ways
    assert up.comes_back
    for owner in range(ranks):
        seen = (share // 2, share) if owner < ranks - 1 else NONE
        assert [up.seen_from(owner, distance) for distance in (1, 2)] == [seen, NONE]
        assert down.seen_from(owner, 1) == NONE


def test_ranks_that_would_keep_many_sums_send_them_round_the_ring():
    for ranks, layout in itertools.product((3, 4, 8), LAYOUTS):
        assert not masks(layout, ranks, 8)[0].ways[0].comes_back


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_without_a_mask_both_ways_carry_as_much_over_every_edge(ranks):
    share = 10
    for way in masks("contiguous", ranks, share, causal=False)[0].ways:
        for rank in range(ranks):
            sent = [way.keys(way.owner(rank, d), d + 1) for d in range(ranks - 1)]
            assert sum(end - begin for begin, end in sent) == (ranks - 1) * share // 2


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_the_second_halves_of_a_zigzag_go_no_further_than_rank_0(ranks):
    _, back = masks("zigzag", ranks, 8)[0].ways
    for owner in range(ranks):
        hops = [d for d in range(1, ranks) if back.keys(owner, d) != NONE]
        assert hops == list(range(1, owner + 1))


def test_what_nobody_sees_does_not_travel_but_for_the_token_by_which_ranks_agree():
    ids = torch.arange(12) // 3  # every rank's tokens are a document
    up, down = masks("contiguous", 4, 3, ids=ids)[0].ways
    for owner in range(4):
        assert [up.keys(owner, d) for d in (1, 2, 3)] == [(0, 1), NONE, NONE]
        assert [down.keys(owner, d) for d in (1, 2, 3)] == [NONE] * 3
        assert [way.sums(owner, 3) for way in (up, down)] == [NONE] * 2


def carried(mask, sums=False):
    """Tokens whose keys, or sums of gradients, are sent from rank to rank, by all ranks."""
    found = 0
    for way in mask.ways:
        of_sums = way.seen_from if way.comes_back else way.sums
        for owner in range(way.ranks):
            for distance in range(1, way.ranks):
                begin, end = (of_sums if sums else way.keys)(owner, distance)
                found += end - begin
    return found


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize(("slices", "times"), [(2, 3 / 2), (3, 2), (4, 5 / 2)])
def test_slices_of_striped_sequences_send_keys_of_early_ones_again(slices, times, sums):
    """(C + 1) / 2 times as much as whole sequences, but for the first token of each rank."""
    ranks, share = 4, 96
    whole = carried(masks("striped", ranks, share)[0], sums)
    of_slice = share // slices
    sliced = sum(
        carried(masks("striped", ranks, of_slice * (part + 1), queries=of_slice)[0], sums)
        for part in range(slices)
    )
    assert sliced / whole == pytest.approx(times, rel=0.05)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_two_slices_of_zigzag_sequences_send_a_third_to_a_half_more(ranks):
    """The late chunks once, to the ranks before; the early ones to those behind, then to all others."""
    share = 96
    whole = carried(masks("zigzag", ranks, share)[0], sums=False)
    early = carried(masks("contiguous", ranks, share // 2)[0], sums=False)
    late = carried(masks("zigzag", ranks, share, queries=share // 2)[0], sums=False)
    assert 1.32 < (early + late) / whole < 1.51
