"""Simulates a schedule: its length and the idle times of its ranks, from the cost of each action."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyruntime.pipeline.actions import Action, Kind, Schedule
from pyruntime.pipeline.validate import check

LONGEST_S = 1e12
"""Limit on the seconds of one action, which keeps sums finite."""
Table = Sequence[Sequence[float]]
"""Seconds by stage, and by slice: table[stage][slice]."""


@dataclass(frozen=True)
class Costs:
    """Seconds of each action: a number for all stages and slices, or a `Table`.

    Raises ValueError for seconds that are negative or above LONGEST_S.
    """

    forward: float | Table = 1
    backward_input: float | Table = 1
    backward_weight: float | Table = 1
    """A whole backward costs the sum of this and backward_input."""
    transfer: float = 0
    """Seconds from the send of a message to its arrival. Sending does not occupy a rank."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "transfer"):
            value = getattr(self, name)
            for seconds in (value,) if isinstance(value, (int, float)) else (s for row in value for s in row):
                if not 0 <= seconds <= LONGEST_S:
                    raise ValueError(f"{name} must be from 0 to {LONGEST_S:g} seconds, found {seconds}.")

    def seconds(self, compute: Action) -> float:
        """Raises ValueError if `compute` is a transfer, or if its stage or slice is not in a table."""
        if not compute.kind.is_compute:
            raise ValueError(f"{compute} is a transfer: it occupies no rank.")
        if compute.kind is Kind.BACKWARD:
            halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            return sum(self.seconds(compute.as_kind(kind)) for kind in halves)
        name = compute.kind.name.lower()
        table: float | Table = getattr(self, name)
        if isinstance(table, (int, float)):
            return table
        if compute.stage >= len(table) or compute.slice >= len(table[compute.stage]):
            raise ValueError(f"{name} has no seconds for slice {compute.slice} of stage {compute.stage}.")
        return table[compute.stage][compute.slice]


@dataclass(frozen=True)
class Span:
    """A compute with its start and end, in seconds from the start of the schedule."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The start and end of every compute of `schedule`."""

    schedule: Schedule
    spans: tuple[Span, ...]
    """Sorted by rank; those of a rank in the order in which it ran them."""
    makespan: float
    """Seconds from the first start to the last end."""

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.rank == rank)

    def work(self, rank: int) -> float:
        """Seconds that `rank` computes."""
        return math.fsum(span.end - span.start for span in self.spans_of(rank))

    def bubble(self, rank: int) -> float:
        """Seconds of the makespan in which `rank` idles."""
        return self.makespan - self.work(rank)

    def waits(self, rank: int) -> float:
        """Seconds that `rank` idles between its first start and its last end. Unlike `bubble`, this leaves
        out the idle time at both ends of a step, which the neighbouring steps can fill."""
        spans = self.spans_of(rank)
        return spans[-1].end - spans[0].start - self.work(rank) if spans else 0.0

    def peak_in_flight(self, rank: int) -> int:
        """See `Schedule.peak_in_flight`."""
        return self.schedule.peak_in_flight(rank)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs `schedule` with these costs. A rank computes one action at a time, in order; a receive waits for
    its message; a send never waits, as if channels had room for all messages.

    Raises ScheduleError for a schedule that `check` refuses.
    """
    clocks = [0.0] * schedule.ranks
    arrival: dict[Action, float] = {}
    """Seconds at which each message arrives, by its receive."""
    spans: list[list[Span]] = [[] for _ in clocks]

    def time(rank: int, action: Action) -> None:
        if action.kind.is_send:
            arrival[schedule.route.other_end(action)] = clocks[rank] + costs.transfer
        elif action.kind.is_receive:
            clocks[rank] = max(clocks[rank], arrival[action])
        else:
            end = clocks[rank] + costs.seconds(action)
            spans[rank].append(Span(rank, action, clocks[rank], end))
            clocks[rank] = end

    check(schedule, channel_capacity=sum(map(len, schedule.actions)) + 1, on_action=time)
    ends = [own[-1].end for own in spans if own]
    return Timeline(schedule, tuple(span for own in spans for span in own), max(ends))
