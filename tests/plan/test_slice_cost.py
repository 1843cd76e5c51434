"""The cost of a slice follows its measurements, and says how far it is from those it did not see."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pyruntime.plan.slice_cost import SliceCost, fit, table

LENGTHS = tuple(range(8, 2049, 8))
# One tile of 128 tokens takes as long as any part of it.
TILES = tuple(3e-4 + 2e-4 * -(-n // 128) for n in LENGTHS)
COST = SliceCost(LENGTHS, TILES, a0=4e-5, a1=3e-7, a2=5e-8, a3=2e-9)


def scan(cost, noise=0.0, seed=1):
    """Measurements of 16 lengths by 16 contexts, and of t0, each off by up to `noise` of itself."""
    rng = np.random.default_rng(seed)
    lengths, contexts = (values.ravel() for values in np.meshgrid(*[np.arange(64, 1025, 64)] * 2))
    seconds = cost.seconds(lengths, contexts) * rng.uniform(1 - noise, 1 + noise, lengths.shape)
    base = np.array(cost.base_seconds) * rng.uniform(1 - noise, 1 + noise, len(cost.base_seconds))
    return lengths, contexts, seconds, cost.base_lengths, base.tolist()


def test_a_slice_costs_its_base_and_its_context():
    assert COST.seconds(256, 100) == pytest.approx(
        7e-4 + 4e-5 + 3e-7 * 256 + 5e-8 * 100 + 2e-9 * 256 * 100, rel=1e-12
    )


def test_without_context_the_context_term_is_exactly_0():
    assert np.array_equal(COST.context(LENGTHS, 0), np.zeros(len(LENGTHS)))
    assert np.array_equal(COST.seconds(LENGTHS, 0), TILES)


def test_the_base_is_linear_between_what_was_measured_and_flat_before():
    cost = SliceCost((4, 8, 16), (1.0, 3.0, 3.5))
    assert cost.base([1, 4, 6, 8, 12, 16]).tolist() == [1.0, 1.0, 2.0, 3.0, 3.25, 3.5]


def test_context_never_makes_a_slice_faster():
    cost = SliceCost((1, 64), (1.0, 1.0), a0=-5.0, a3=0.01)
    assert cost.seconds(8, [1, 10, 100]).tolist() == pytest.approx([1.0, 1.0, 4.0])


def test_exact_measurements_give_the_coefficients():
    found = fit(*scan(COST))
    for name in ("a0", "a1", "a2", "a3"):
        assert getattr(found.cost, name) == pytest.approx(getattr(COST, name), rel=1e-6)
    assert found.error < 1e-9
    assert (found.fitted, found.held_out) == (192, 64)


@pytest.mark.parametrize("seed", range(4))
def test_noise_of_a_percent_leaves_an_error_below_two(seed):
    lengths, contexts, *rest = scan(COST, noise=0.01, seed=seed)
    found = fit(lengths, contexts, *rest, seed=seed)
    assert 0.001 < found.error < 0.02
    assert found.error < found.context_error < 0.1
    truth = COST.context(lengths, contexts)
    assert np.mean(np.abs(found.cost.context(lengths, contexts) - truth) / truth) < 0.02


def test_no_coefficients_nearby_have_a_smaller_relative_error():
    lengths, contexts, seconds, *base = scan(COST, noise=0.05)
    cost = fit(lengths, contexts, seconds, *base, held_out=1e-9).cost
    seen = np.random.default_rng(0).permutation(len(seconds))[1:]

    def squares(cost):
        return float(np.sum((cost.seconds(lengths, contexts) / seconds - 1)[seen] ** 2))

    for name in ("a0", "a1", "a2", "a3"):
        for factor in (0.99, 1.01):
            assert squares(replace(cost, **{name: getattr(cost, name) * factor})) > squares(cost)


def test_the_error_is_that_of_points_which_were_not_fitted():
    lengths, contexts, seconds, *base = scan(COST)
    spoilt = seconds.copy()
    spoilt[contexts == 512] *= 1.5
    assert fit(lengths, contexts, spoilt, *base).error > 0.02
    found = fit(lengths, contexts, spoilt, *base, held_out=0.5, seed=3)
    assert (found.fitted, found.held_out) == (128, 128)
    order = np.random.default_rng(3).permutation(len(seconds))
    seen, unseen = order[128:], order[:128]
    again = fit(lengths[seen], contexts[seen], spoilt[seen], *base, held_out=1e-9).cost
    assert again.a3 == pytest.approx(found.cost.a3, rel=0.05)
    miss = np.abs(found.cost.seconds(lengths[unseen], contexts[unseen]) / spoilt[unseen] - 1)
    assert found.error == pytest.approx(miss.mean())


def test_points_without_context_do_not_enter_the_fit():
    lengths, contexts, seconds, *base = scan(COST)
    found = fit(*(np.append(a, b) for a, b in ((lengths, 64), (contexts, 0), (seconds, 99.0))), *base)
    assert found.cost.a3 == pytest.approx(COST.a3, rel=1e-6)
    assert found.fitted + found.held_out == len(seconds)


def test_a_cost_without_context_term_has_no_context_error():
    found = fit(*scan(SliceCost(LENGTHS, TILES)))
    assert found.error < 1e-9
    assert math.isnan(found.context_error)


def test_the_table_holds_every_slice_of_the_sequence():
    found = table(COST, 1024, 64)
    assert found.shape == (16, 17)
    for a in range(16):
        for b in range(17):
            expected = COST.seconds((a + 1) * 64, b * 64) if a + 1 + b <= 16 else math.inf
            assert found[a, b] == expected


@pytest.mark.parametrize(
    ("lengths", "seconds", "sentence"),
    [
        ((), (), "base_lengths has 0 entries and base_seconds 0"),
        ((1, 2), (1.0,), "base_lengths has 2 entries and base_seconds 1"),
        ((2, 1), (1.0, 1.0), "base_lengths must increase from at least 1, found 1 after 2"),
        ((0, 2), (1.0, 1.0), "found 0 after 0"),
        ((2, 2), (1.0, 1.0), "found 2 after 2"),
        ((1, 2), (1.0, -1.0), "base_seconds of 2 tokens must be finite and at least 0, found -1.0"),
        ((1, 2), (math.inf, 1.0), "base_seconds of 1 tokens .* found inf"),
    ],
)
def test_a_base_that_is_no_measurement_is_refused(lengths, seconds, sentence):
    with pytest.raises(ValueError, match=sentence):
        SliceCost(lengths, seconds)


def test_slices_that_were_not_measured_are_refused():
    with pytest.raises(ValueError, match="A slice of 2056 tokens: slices of 1 to 2048 tokens were measured"):
        COST.seconds([8, 2056], 0)
    with pytest.raises(ValueError, match="A slice of 0 tokens"):
        COST.base(0)
    with pytest.raises(ValueError, match="context must not be negative, found -8 tokens"):
        COST.seconds(8, -8)
    with pytest.raises(ValueError, match="step=7 does not divide length=2048"):
        table(COST, 2048, 7)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"held_out": 1.0}, "held_out must be above 0 and below 1, found 1.0"),
        ({"contexts": [8]}, r"lists of one size, found shapes \(256,\), \(1,\) and \(256,\)"),
        ({"seconds": [0.0] * 256}, "seconds must be positive and finite, found 0.0 for 64 tokens after 64"),
        (
            {"lengths": [64] * 256},
            "192 points to fit, with 1 lengths and 16 contexts above 0, do not determine",
        ),
        ({"contexts": [0] * 256}, "0 points to fit"),
    ],
)
def test_measurements_that_determine_no_cost_are_refused(arguments, sentence):
    names = ("lengths", "contexts", "seconds", "base_lengths", "base_seconds")
    with pytest.raises(ValueError, match=sentence):
        fit(**(dict(zip(names, scan(COST), strict=True)) | arguments))
