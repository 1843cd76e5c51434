"""Measuring this machine: what noise does to the fit of its links."""

import pytest

from pyruntime.cli.plan_measure import SIZES, link_of
from pyruntime.plan.measured import fit_alpha_beta
from pyruntime.train.errors import ConfigError

FLAT = [1e-3] * (len(SIZES) - 1) + [1e-6]
"""Seconds that fall with the size, as other work makes them."""
NOISE = [3.5e-3, 2.5e-3, 4.5e-3, 2.4e-3, 3.3e-3, 3.7e-3]
"""Seconds in which no transfer is to be seen: through them goes a line of 3 ms and hundreds of GB/s."""
RISING = [2e-5 + size / 2 / 5e9 for size in SIZES]


def test_a_round_that_other_work_disturbed_is_measured_again():
    rounds = iter([FLAT, RISING, RISING])
    link, medians = link_of(lambda: next(rounds), ranks=2)
    assert link.bandwidth > 0
    assert medians == pytest.approx([(a + b) / 2 for a, b in zip(FLAT, RISING, strict=True)])
    assert len(list(rounds)) == 1


def test_a_slope_that_is_smaller_than_the_noise_is_no_bandwidth():
    with pytest.raises(ValueError, match=r"take \d+% of its time, and the fit is wrong by \d+%"):
        fit_alpha_beta(SIZES, NOISE, 2)
    with pytest.raises(ConfigError, match="hardly longer"):
        link_of(lambda: NOISE, ranks=2)


def test_a_machine_that_is_too_busy_is_said_to_be_so():
    asked = []
    with pytest.raises(
        ConfigError, match=r"17 MB took hardly longer than those of 16 kB, 3 times over: other work"
    ):
        link_of(lambda: asked.append(1) or FLAT, ranks=2)
    assert len(asked) == 3
