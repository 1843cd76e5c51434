"""Samples come in an order that seed and number alone decide: every window once an epoch, sources in their
shares."""

from collections import Counter

import numpy as np
import pytest

from pyruntime.train.data.order import BLOCK, SampleOrder, quotas, shuffled


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 1000, 4096, 4097])
@pytest.mark.second_tier("4097")
def test_an_epoch_is_a_permutation_and_others_are_others(count):
    first, second = ([shuffled(index, count, 3, epoch) for index in range(count)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(count))
    if count >= 16:
        assert first != second != [shuffled(index, count, 4, 1) for index in range(count)]


def test_a_permutation_of_more_windows_than_memory_holds_is_as_random_as_a_drawn_one():
    count = 10**12
    found = np.array([shuffled(index, count, 0, 0) for index in range(4000)])
    assert len(set(found.tolist())) == 4000 and found.max() < count
    halves = np.histogram(found, bins=10, range=(0, count))[0]
    assert abs(halves - 400).max() < 6 * np.sqrt(400)  # a neighbour in the order is anywhere
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.1


def test_without_weights_an_epoch_is_every_window_of_every_source_once():
    order = SampleOrder((5, 1, 7), seed=2)
    for epoch in range(3):
        samples = order.samples(13 * epoch, 13)
        assert {sample.epoch for sample in samples} == {epoch}
        assert sorted((sample.source, sample.window) for sample in samples) == [
            (source, window) for source, count in enumerate(order.windows) for window in range(count)
        ]


def test_with_weights_every_block_has_the_shares_and_each_source_its_own_epochs():
    order = SampleOrder((50, 2000), seed=5, weights=(0.25, 0.75))
    samples = order.samples(0, 3 * BLOCK)
    for block in range(3):
        shares = Counter(sample.source for sample in samples[block * BLOCK : (block + 1) * BLOCK])
        assert shares == {0: BLOCK // 4, 1: 3 * BLOCK // 4}
    small = [sample for sample in samples if sample.source == 0]
    for epoch in range(len(small) // 50):
        part = small[50 * epoch : 50 * epoch + 50]
        assert {sample.epoch for sample in part} == {epoch}
        assert sorted(sample.window for sample in part) == list(range(50))
    runs = [sample.source for sample in samples[:BLOCK]]
    assert max(len(run) for run in "".join(map(str, runs)).split("1")) < 10  # and not all of one first


def test_a_source_s_own_order_does_not_depend_on_the_weights():
    found = []
    for weights in ((1.0, 1.0), (0.1, 0.9)):
        samples = SampleOrder((300, 300), seed=1, weights=weights).samples(0, 2 * BLOCK)
        found.append([(s.epoch, s.window) for s in samples if s.source == 1][:500])
    assert found[0] == found[1]


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0), (0.7, 0.2, 0.05, 0.05), (1e-3, 1.0)])
def test_shares_are_the_nearest_that_add_up(weights):
    found = quotas(weights)
    assert sum(found) == BLOCK
    assert all(
        abs(share - BLOCK * weight / sum(weights)) < 1 for share, weight in zip(found, weights, strict=True)
    )


def test_samples_are_found_wherever_one_begins():
    for order in (SampleOrder((11, 4), seed=7), SampleOrder((11, 4), seed=7, weights=(2.0, 1.0))):
        whole = order.samples(0, 2500)
        assert whole[1020:1060] == order.samples(1020, 40)
        assert whole != SampleOrder((11, 4), seed=8, weights=order.weights).samples(0, 2500)
