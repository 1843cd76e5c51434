"""Seconds that one pipeline stage takes for a slice of a sequence, from a few measurements.

A slice of i tokens that follows j tokens of its sequence takes::

    t(i, j)   = t0(i) + ctx(i, j)
    ctx(i, j) = a0 + a1 i + a2 j + a3 i j   for j > 0, and 0 for j = 0

t0 is measured: it is a staircase (a kernel computes whole tiles) that no formula follows. ctx is attention to
earlier tokens, linear in i j, and is fitted. At j = 0 ctx is 0 by definition. a0 and a1 do not vanish there,
but t0 already contains them.

t covers what was measured. For training, a slice's seconds are those of its forward, its backward and the
sends of both.

Source: TeraPipe, arXiv 2102.07988, equation 9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

COEFFICIENTS = ("a0", "a1", "a2", "a3")


@dataclass(frozen=True)
class SliceCost:
    """The function t(i, j) of one stage.

    base_lengths, base_seconds: the measured t0; lengths in tokens, increasing. Between them t0 is linear; a
    slice shorter than the first takes as long as the first. a0 (seconds), a1 and a2 (seconds per token) and
    a3 (seconds per token squared): the context term; it counts as 0 where they make it negative.

    Raises ValueError if lengths do not increase from at least 1, or a number is negative or not finite.
    """

    base_lengths: tuple[int, ...]
    base_seconds: tuple[float, ...]
    a0: float = 0.0
    a1: float = 0.0
    a2: float = 0.0
    a3: float = 0.0

    def __post_init__(self) -> None:
        lengths, seconds = self.base_lengths, self.base_seconds
        if not lengths or len(lengths) != len(seconds):
            raise ValueError(
                f"base_lengths has {len(lengths)} entries and base_seconds {len(seconds)}; "
                "give one measurement for each length, and at least one."
            )
        for before, length in zip((0, *lengths), lengths, strict=False):
            if length <= before:
                raise ValueError(
                    f"base_lengths must increase from at least 1, found {length} after {before}; "
                    "sort the measurements and keep one of each length."
                )
        for length, value in zip(lengths, seconds, strict=True):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"base_seconds of {length} tokens must be finite and at least 0, found {value}."
                )
        for name in COEFFICIENTS:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, found {getattr(self, name)}.")

    def base(self, length: ArrayLike) -> Floats:
        """Returns t0: seconds of slices of `length` tokens, of any shape, at the start of their sequence.

        Raises ValueError for a length below 1 or above the longest measured one.
        """
        tokens = np.asarray(length, dtype=np.float64)
        longest = self.base_lengths[-1]
        wrong = tokens[~((tokens >= 1) & (tokens <= longest))]
        if wrong.size:
            raise ValueError(
                f"A slice of {wrong.flat[0]:g} tokens: slices of 1 to {longest} tokens were measured; "
                "measure longer ones, or cut the sequence shorter."
            )
        return np.asarray(np.interp(tokens, self.base_lengths, self.base_seconds))

    def context(self, length: ArrayLike, context: ArrayLike) -> Floats:
        """Returns ctx: seconds that `context` earlier tokens add to slices of `length`; both broadcast.

        Raises ValueError for a negative context.
        """
        i, j = np.asarray(length, dtype=np.float64), np.asarray(context, dtype=np.float64)
        wrong = j[~(j >= 0)]
        if wrong.size:
            raise ValueError(f"context must not be negative, found {wrong.flat[0]:g} tokens.")
        added = self.a0 + self.a1 * i + self.a2 * j + self.a3 * i * j
        return np.where(j > 0, np.maximum(added, 0.0), 0.0)

    def seconds(self, length: ArrayLike, context: ArrayLike) -> Floats:
        """Returns t: seconds of slices of `length` tokens after `context` tokens; both broadcast.

        Raises ValueError as `base` and `context` do.
        """
        return self.base(length) + self.context(length, context)


@dataclass(frozen=True)
class Fit:
    """A cost and its error on measurements that it was not fitted to.

    error: mean of |predicted - measured| / measured over the held-out points, of the whole t. context_error:
    sum of |predicted - measured| over the sum of the measured context terms t - t0; a term lost in the noise
    of t then counts little (nan if there are no terms). fitted, held_out: number of points with context in
    each set.
    """

    cost: SliceCost
    error: float
    context_error: float
    fitted: int
    held_out: int


def fit(
    lengths: ArrayLike,
    contexts: ArrayLike,
    seconds: ArrayLike,
    base_lengths: Sequence[int],
    base_seconds: Sequence[float],
    *,
    held_out: float = 0.25,
    seed: int = 0,
) -> Fit:
    """Returns the cost whose context term is nearest to the measurements, by least squares of error over t.

    lengths, contexts (tokens) and seconds: one measurement each, [points]; those without context say nothing
    about the context term and are ignored. base_lengths, base_seconds: t0, see `SliceCost`. held_out: share
    of points, drawn by `seed`, that only measure the error.

    Raises ValueError if sizes differ, a measurement is not positive, or the points do not determine the four
    coefficients.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be above 0 and below 1, found {held_out}.")
    base = SliceCost(tuple(int(n) for n in base_lengths), tuple(float(s) for s in base_seconds))
    i, j, t = _points(lengths, contexts, seconds)
    order = np.random.default_rng(seed).permutation(len(t))
    kept_out = max(1, round(held_out * len(t)))
    test, train = order[:kept_out], order[kept_out:]
    term = t - base.base(i)
    a0, a1, a2, a3 = _least_squares(i[train], j[train], term[train], 1 / t[train])
    cost = SliceCost(base.base_lengths, base.base_seconds, a0, a1, a2, a3)
    miss = np.abs(cost.seconds(i, j) - t)[test]
    shown = term[test].sum()
    context_error = float(miss.sum() / shown) if shown > 0 else math.nan
    return Fit(cost, float(np.mean(miss / t[test])), context_error, len(train), len(test))


def table(cost: SliceCost, length: int, step: int) -> Floats:
    """Returns the seconds of every slice of a sequence of `length` tokens on a grid of `step`: [n, n + 1].

    n = length / step. Entry [a, b] is the slice of (a + 1) step tokens after b step tokens, inf if they
    exceed the sequence.

    Raises ValueError if `step` does not divide `length`, or `length` exceeds what was measured.
    """
    if step < 1 or length < step or length % step:
        raise ValueError(
            f"step={step} does not divide length={length} tokens; use a step that does, or pad the sequence."
        )
    n = length // step
    slices, contexts = np.arange(1, n + 1)[:, None], np.arange(n + 1)[None]
    seconds = cost.seconds(slices * step, contexts * step)
    return np.where(slices + contexts <= n, seconds, np.inf)


def _points(lengths: ArrayLike, contexts: ArrayLike, seconds: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Returns the measurements with context, each [points]."""
    i, j, t = (np.asarray(values, dtype=np.float64) for values in (lengths, contexts, seconds))
    if i.ndim != 1 or i.shape != j.shape or i.shape != t.shape:
        raise ValueError(
            f"lengths, contexts and seconds must be lists of one size, found shapes {i.shape}, {j.shape} "
            f"and {t.shape}."
        )
    wrong = np.flatnonzero(~(np.isfinite(t) & (t > 0)))
    if wrong.size:
        at = wrong[0]
        raise ValueError(
            f"seconds must be positive and finite, found {t[at]} for {i[at]:g} tokens after {j[at]:g}."
        )
    return i[j != 0], j[j != 0], t[j != 0]


def _least_squares(i: Floats, j: Floats, term: Floats, weight: Floats) -> list[float]:
    """Returns a0 to a3 that minimize the sum of (weight (a0 + a1 i + a2 j + a3 i j - term))²."""
    rank = 0
    if len(i) >= len(COEFFICIENTS):
        features = np.stack((np.ones_like(i), i, j, i * j), axis=1)
        # In tokens the columns differ by a factor of a million, which would cost digits of the solution.
        scale = features.max(axis=0)
        solution, _, rank, _ = np.linalg.lstsq(features / scale * weight[:, None], term * weight, rcond=None)
    if rank < len(COEFFICIENTS):
        raise ValueError(
            f"{len(i)} points to fit, with {len(set(i))} lengths and {len(set(j))} contexts above 0, do not "
            "determine four coefficients; measure a grid of at least 3 lengths by 3 contexts."
        )
    return [float(value) for value in solution / scale]
