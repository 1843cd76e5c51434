"""CO2: parameters are averaged once in tau steps, under the steps that follow (arXiv 2401.16265)."""

from __future__ import annotations

import math

from pyruntime.plan.communication import Link, all_reduce

TAUS = (1, 3, 6, 12, 24, 48, 96, 192)


def least_tau(exchange: float, step: float) -> int:
    """tau_min: inner steps of `step` seconds under which an all-reduce of `exchange` seconds is hidden,
    ceil(t_AR / t_step), and at least 1 (derived)."""
    return max(1, math.ceil(exchange / step))


def tau_min(nbytes: float, over: Link, step: float) -> int:
    """`least_tau` of an all-reduce of `nbytes` bytes of parameters."""
    return least_tau(all_reduce(nbytes, over), step)


def usual_tau(least: int) -> int:
    """The smallest usual number of inner steps that is at least `least`."""
    return next((tau for tau in TAUS if tau >= least), least)


def exposed(nbytes: float, over: Link, step: float, tau: int) -> float:
    """Seconds exposed in each step: what is left of the all-reduce after tau steps, shared out."""
    return max(0.0, all_reduce(nbytes, over) - tau * step) / tau
