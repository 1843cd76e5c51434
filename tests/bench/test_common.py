"""What benchmarks share: sums over rounds, turns, tables."""

import time

import pytest

from bench.common.measuring import Sample, interleave, rounds_for
from bench.common.tables import table


def test_a_sample_gives_median_spread_and_ratios_of_paired_rounds():
    sample = Sample((4.0, 1.0, 2.0, 3.0, 5.0))
    assert sample.median == 3.0
    assert sample.spread == pytest.approx((4.0 - 2.0) / 2 / 3.0)
    # Every round is slower than the one before, for both: the ratio is the same in all of them.
    assert Sample((2.0, 4.0, 8.0)).over(Sample((1.0, 2.0, 4.0))).rounds == (2.0, 2.0, 2.0)
    assert Sample((7.0,)).spread == 0.0


def test_variants_take_turns_in_changing_order_and_are_timed_apart():
    calls = []

    def run(name: str, seconds: float):
        def variant() -> None:
            calls.append(name)
            time.sleep(seconds)

        return variant

    samples = interleave({"short": run("short", 0.001), "long": run("long", 0.02)}, rounds=12, seed=3)
    pairs = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert len(pairs) == 12
    assert set(pairs) == {("short", "long"), ("long", "short")}
    assert all(len(sample.rounds) == 12 for sample in samples.values())
    assert min(samples["long"].rounds) >= 0.02
    assert min(samples["short"].rounds) >= 0.001
    assert samples["short"].median < samples["long"].median


@pytest.mark.parametrize(("seconds", "least", "wanted"), [(0.0, 5, 5), (1000.0, 5, 100)])
def test_the_number_of_rounds_stays_within_its_limits(seconds, least, wanted):
    assert rounds_for(seconds, least, lambda: None) == wanted


def test_a_table_aligns_its_columns():
    lines = table(["what", "ms"], [["a", "1.5"], ["longer", "12.25"]]).splitlines()
    assert lines[0] == "what       ms"
    assert lines[2:] == ["a         1.5", "longer  12.25"]
