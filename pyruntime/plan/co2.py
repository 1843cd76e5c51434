"""CO2: averages parameters once in tau steps, hidden by the steps that follow (arXiv 2401.16265)."""

from __future__ import annotations

import math

from pyruntime.plan.communication import Link, all_reduce

TAUS = (1, 3, 6, 12, 24, 48, 96, 192)


def least_tau(exchange: float, step: float) -> int:
    """Returns tau_min, the inner steps of `step` seconds that hide an all-reduce of `exchange` seconds:
    ceil(t_AR / t_step), at least 1 (derived)."""
    return max(1, math.ceil(exchange / step))


def tau_min(nbytes: float, over: Link, step: float) -> int:
    """Returns `least_tau` for an all-reduce of `nbytes` bytes of parameters."""
    return least_tau(all_reduce(nbytes, over), step)


def usual_tau(least: int) -> int:
    """Returns the smallest usual number of inner steps that is at least `least`."""
    return next((tau for tau in TAUS if tau >= least), least)


def exposed(nbytes: float, over: Link, step: float, tau: int) -> float:
    """Returns the exposed seconds of each step: the rest of the all-reduce after tau steps, over tau."""
    return max(0.0, all_reduce(nbytes, over) - tau * step) / tau
