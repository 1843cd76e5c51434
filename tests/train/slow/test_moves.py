"""Layers go where the rank that takes longest takes least, when that is worth it, and stay there."""

import itertools
import math
import random

import numpy as np
import pytest

from pyruntime.pipeline.split import least_largest
from pyruntime.train.slow.judge import WINDOWS, Window
from pyruntime.train.slow.rebalance import GAIN, best_move


def largest(per_layer, rest, counts):
    return max(r + n * s for r, n, s in zip(rest, counts, per_layer, strict=True))


@pytest.mark.parametrize("fewest", [1, 2])
def test_no_assignment_has_a_smaller_largest_rank(fewest):
    generator = np.random.default_rng(random.getrandbits(64))
    for _ in range(100):
        ranks = int(generator.integers(2, 5))
        layers = int(generator.integers(fewest * ranks, 12))
        per_layer = generator.uniform(0.1, 3, ranks).tolist()
        rest = generator.uniform(0, 4, ranks).tolist()
        found = least_largest(per_layer, rest, fewest, layers)
        assert sum(found) == layers
        assert min(found) >= fewest
        every = itertools.product(range(fewest, layers + 1), repeat=ranks)
        best = min(largest(per_layer, rest, counts) for counts in every if sum(counts) == layers)
        assert math.isclose(largest(per_layer, rest, found), best)


def test_too_few_layers_are_refused():
    with pytest.raises(ValueError, match="3 layers do not give 2 to each of 2 stages"):
        least_largest([1.0, 1.0], [0.0, 0.0], 2, 3)


def test_micro_batches_of_ranks_of_unequal_speed():
    counts = least_largest([1.0, 1.0, 1.0, 2.0], [0.0] * 4, 1, 12)
    assert largest([1.0, 1.0, 1.0, 2.0], [0.0] * 4, counts) == 4.0  # 6 in equal shares
    windows = [[Window(seconds) for seconds in (1.0, 1.0, 1.0, 2.0)]] * WINDOWS
    names = [f"rank {rank}" for rank in range(4)]
    move = best_move(windows, [[0], [1], [2], [3]], range(4), (3, 3, 3, 3), [3], names, "micro-batches")
    assert (move.before, move.after) == ((3, 3, 3, 3), (4, 4, 3, 1))
    assert move.sentence == (
        "micro-batches of the data-parallel ranks go from 3, 3, 3, 3 to 4, 4, 3, 1: rank 3 is slow, and they "
        "take 1, 1, 1, 2 s for each of them, so that the one that takes longest will take 33% less."
    )


def found(per_layer, layers, placement, rest=None, ranks_of=None, slow=()):
    """The move for ranks that take so long for a layer."""
    ranks = len(per_layer)
    rest = rest or [0.0] * ranks
    windows = [[Window(*each) for each in zip(per_layer, [0.0] * ranks, rest, strict=True)]] * WINDOWS
    places = ranks_of or [[rank] for rank in range(ranks)]
    return best_move(
        windows,
        places,
        placement,
        layers,
        slow,
        [f"rank {rank} (pp {rank}; host h{rank})" for rank in range(ranks)],
    )


def test_a_rank_twice_as_slow_holds_half_as_much():
    move = found([0.02, 0.01], [6, 6], [0, 1], slow=[0])
    assert (move.before, move.after) == ((6, 6), (4, 8))
    assert move.gain == pytest.approx(1 / 3)
    assert move.sentence == (
        "layers of the stages go from 6, 6 to 4, 8: rank 0 (pp 0; host h0) is slow, and the ranks of the "
        "pipeline take 0.02, 0.01 s a step for each layer they hold, so that the one that takes longest will "
        "take 33% less."
    )


def test_the_slowest_rank_of_a_stage_counts_and_what_is_not_of_layers_stays():
    # Ranks 0 and 1 are of the first stage, and the second one has a head as long as four layers.
    move = found([0.01, 0.03, 0.01, 0.01], [7, 5], [0, 1], rest=[0, 0, 0.04, 0.04], ranks_of=[[0, 1], [2, 3]])
    assert move.after == (4, 8)  # 0.12 s on either


def test_a_rank_s_stages_share_what_it_holds():
    interleaved = found([0.02, 0.01], [2, 2, 2, 2], [0, 1, 0, 1])
    assert interleaved.after == (2, 3, 1, 2)
    of_a_v = found([0.02, 0.01], [3, 3, 3, 3], [0, 1, 1, 0])
    assert of_a_v.after == (2, 4, 4, 2)


def test_little_to_gain_moves_nothing():
    assert found([0.0105, 0.01], [10, 10], [0, 1]) is None
    assert found([0.02, 0.01], [4, 8], [0, 1]) is None
    assert found([0.02, 0.01], [1, 1], [0, 1]) is None


def test_under_noise_layers_move_once_and_back_once():
    """Windows of a run whose rank 1 is slow from the 20th to the 60th, looked at after each."""
    generator = np.random.default_rng(random.getrandbits(64))
    layers, history, moves = (6, 6, 6), [], []
    for number in range(100):
        speed = [1.0, 2.0 if 20 <= number < 60 else 1.0, 1.0]
        history.append([Window(each * generator.lognormal(0, 0.03), rest_s=0.5) for each in speed])
        if len(history) < WINDOWS:
            continue
        move = best_move(history[-WINDOWS:], [[0], [1], [2]], [0, 1, 2], layers, [], ["a", "b", "c"])
        if move is not None:
            assert move.gain >= GAIN
            moves.append((number, move.after))
            layers, history = move.after, []
    (first, of_slow), (second, of_equal) = moves
    assert of_slow[1] in (3, 4)  # 6.5 or 8.5 s beside 8.5 or 7.5
    assert of_equal == (6, 6, 6)
    assert 20 <= first < 26
    assert 60 <= second < 66
