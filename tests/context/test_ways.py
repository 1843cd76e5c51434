"""What goes which way round the ring, by plans alone."""

from __future__ import annotations

import pytest
import torch

from pyruntime.context.mask import Mask
from pyruntime.context.ways import NONE
from tests.context.test_layouts import documents

LAYOUTS = ("contiguous", "zigzag", "striped")


def masks(layout, ranks, share, causal=True, ids=None):
    return [Mask(layout, ranks * share, ranks, rank, causal, ids) for rank in range(ranks)]


@pytest.mark.parametrize("documented", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_every_rank_gets_all_keys_that_it_sees_and_all_parts_of_sums_come_home(
    ranks, layout, causal, documented
):
    share = 14
    ids = documents(2, ranks * share, seed=ranks) if documented else None
    every = masks(layout, ranks, share, causal, ids)
    plan = every[0].ways
    assert all(mask.ways == plan for mask in every)
    assert sorted(token for way in plan for token in range(*way.tokens)) == list(range(share))
    for rank, mask in enumerate(every):
        for owner in set(range(ranks)) - {rank}:
            begin, end = mask.of_rank(owner)
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
                for hop in range(distance, ranks):
                    assert part <= set(range(*way.sums(owner, hop)))
                added |= part
            assert seen <= got
            assert seen <= added


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
