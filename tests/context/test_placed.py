"""Documents lie on as few ranks as their length asks for, and little travels."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from pyruntime.context import placed
from pyruntime.context.layouts import document_bounds, hulls, positions
from pyruntime.context.ways import ways


def ids_of(*rows):
    """Document ids of rows of documents of these lengths."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])


def runs_of(lengths):
    return tuple(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


def counts(places, ids):
    """Keys that all ranks send, and the attention of each rank."""
    ranks, share = places.shape
    bounds = document_bounds(ids)
    plan = ways(hulls(places, places, True, bounds), share)
    sent = [
        way.keys(owner, distance)
        for way in plan
        for owner in range(ranks)
        for distance in range(1, ranks)
        if way.seen_from(owner, distance) != (0, 0)
    ]
    work = (torch.arange(ranks * share) - bounds[0] + 1).sum(0)
    return sum(end - begin for begin, end in sent), work[places].sum(1).tolist()


EXAMPLE = [8192, 2048, 2048, 1024, 1024, 1024, 1024]
"""On 4 ranks, of 4096 tokens each."""


def test_a_long_document_lies_on_as_many_neighbours_as_it_needs():
    on_two, on_four, *_ = placed.candidates([runs_of(EXAMPLE)], 4)
    for ranks, each in ((2, on_two), (4, on_four)):
        assert [any(begin < 8192 for begin, _ in own) for own in each] == [rank < ranks for rank in range(4)]
    as_places = [
        torch.stack([torch.cat([torch.arange(*run) for run in own]) for own in each])
        for each in (on_two, on_four)
    ]
    first, second = (counts(each, ids_of(EXAMPLE)) for each in as_places)
    assert first[0] == 2 * 3072  # for each of two ranks, what the other sees of it
    assert max(first[1]) / (sum(first[1]) / 4) == pytest.approx(1.684, abs=1e-3)
    assert max(second[1]) / (sum(second[1]) / 4) == pytest.approx(1.053, abs=1e-3)


def test_it_sends_less_than_the_balanced_layout_and_computes_as_evenly():
    ids = ids_of(EXAMPLE)
    found = {name: counts(positions(name, 16384, 4, ids), ids) for name in ("placed", "balanced", "zigzag")}
    assert found["placed"][0] < 0.5 * found["balanced"][0]
    assert max(found["placed"][1]) < 1.1 * max(found["balanced"][1]) < 0.7 * max(found["zigzag"][1])


def test_short_documents_do_not_travel():
    lengths = [24] * 8
    random.Random(3).shuffle(lengths)
    ids = ids_of(lengths)
    assert counts(positions("placed", 192, 4, ids), ids)[0] == 0


def test_one_document_is_a_zigzag():
    ids = ids_of([96])
    assert torch.equal(positions("placed", 96, 4, ids), positions("zigzag", 96, 4))
    assert torch.equal(positions("placed", 96, 4), positions("zigzag", 96, 4))


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_no_rank_has_much_more_attention_than_in_the_best_of_the_others(ranks):
    draw = random.Random(ranks)
    for _ in range(10):
        seq = ranks * 2 * draw.choice([16, 61])
        rows = []
        for _ in range(draw.choice([1, 3])):
            cuts = sorted({0, seq, *(draw.randrange(seq) for _ in range(draw.choice([1, 4, 20])))})
            rows.append([end - begin for begin, end in itertools.pairwise(cuts)])
        ids = ids_of(*rows)
        most = {
            name: max(counts(positions(name, seq, ranks, ids), ids)[1])
            for name in ("placed", "balanced", "zigzag")
        }
        assert most["placed"] <= 1.1 * min(most.values())


def test_places_follow_from_the_documents_alone():
    one, other = (ids_of(EXAMPLE), 7 * ids_of(EXAMPLE) + 5)
    assert torch.equal(positions("placed", 16384, 4, one), positions("placed", 16384, 4, other))
