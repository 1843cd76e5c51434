"""Accounts for the seconds of a step, from the spans of the computing stream.

    step = computing + exposed + bubble + host

exposed: the stream waited for rows or sums of other ranks, or for another stream, or did nothing but signal
and sum. bubble: it waited for a rank of another stage, or of another place in a ring, which had not computed
what it would send. host: it had done all that it had been asked for. Spans have no holes, so the sum closes
to rounding; `of_step` raises if it does not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Seconds = Mapping[tuple[str, ...], float]
"""By several names."""
Span = tuple[int, float, float, int, str, str]
"""Stream, begin, end, how it was spent, what, where: csrc/sim/clock/clock.h."""
WORK, WAIT, HOST = 0, 1, 2
COMPUTING = 0
"""The stream on which a rank computes: the default one."""
OTHER_STREAM = "another stream"
"""In place of an axis, where the stream waited for an event. Gradients and weights of ZeRO have a stream."""
WORK_OF_ANOTHER = "work of another rank"
"""The name of what a stream waits for in a bubble (csrc/sim/clock/programs.h)."""
COMMUNICATING = ("await", "end_puts", "finish", "reduce")
"""Kernels by which the computing stream itself serves communication, without waiting."""


@dataclass(frozen=True)
class StepAccount:
    """Seconds of one step of one rank, and what they were spent on."""

    step: float
    computing: Seconds
    """By kernel and place."""
    communicating: Seconds
    """Signals and sums, by kernel and place. They are exposed too: one rank alone has none."""
    waits: Seconds
    """By axis, what was waited for, and place."""
    host: float
    launches: int
    """Kernels that computed."""

    @property
    def exposed(self) -> float:
        return math.fsum(self.waits.values()) - self.bubble + math.fsum(self.communicating.values())

    @property
    def bubble(self) -> float:
        return math.fsum(seconds for key, seconds in self.waits.items() if key[1] == WORK_OF_ANOTHER)

    @property
    def exposed_waits(self) -> Seconds:
        """The waits that are no bubble."""
        return {key: each for key, each in self.waits.items() if key[1] != WORK_OF_ANOTHER}


def by(counted: Seconds, field: int) -> dict[str, float]:
    """Returns the sums of what was counted by one field of its keys, the most first."""
    found: defaultdict[str, float] = defaultdict(float)
    for key, seconds in counted.items():
        found[key[field]] += seconds
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def of_step(spans: Iterable[Span], begin: float, end: float, axes: Mapping[str, str]) -> StepAccount:
    """Returns the account of the computing stream between two moments. axes: the axis of a group, by its
    name. Raises ValueError if the spans do not cover the step, or one covers another."""
    computing: defaultdict[tuple[str, ...], float] = defaultdict(float)
    communicating: defaultdict[tuple[str, ...], float] = defaultdict(float)
    waits: defaultdict[tuple[str, ...], float] = defaultdict(float)
    host = covered = 0.0
    launches = 0
    for stream, first, last, spent, what, where in spans:
        seconds = min(last, end) - max(first, begin)
        if stream != COMPUTING or seconds <= 0:
            continue
        covered += seconds
        if spent == WAIT:
            waits[_axis(what, axes), _kind(what), where] += seconds
        elif spent == HOST:
            host += seconds
        else:
            (communicating if what in COMMUNICATING else computing)[what, where] += seconds
            launches += what not in COMMUNICATING
    if not math.isclose(covered, end - begin, rel_tol=1e-9):
        raise ValueError(f"The spans of the computing stream cover {covered} s of a step of {end - begin} s.")
    return StepAccount(end - begin, dict(computing), dict(communicating), dict(waits), host, launches)


def _axis(what: str, axes: Mapping[str, str]) -> str:
    """A wait's words end with its group, or a companion of it: "rows of NAME (pp, 0 to 1)"."""
    name = what.rpartition(" of ")[2]
    matching = [group for group in axes if name == group or name.startswith(f"{group} (")]
    return axes[max(matching, key=len)] if matching else OTHER_STREAM


def _kind(what: str) -> str:
    return what.rpartition(" of ")[0] or what
