"""How long a schedule takes and where its ranks idle, from what each action costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyruntime.pipeline.actions import Action, Kind, Schedule
from pyruntime.pipeline.validate import check

LONGEST_S = 1e12
"""Of one action: sums of these are finite."""
Table = Sequence[Sequence[float]]
"""Seconds by stage, and by slice: table[stage][slice]."""


@dataclass(frozen=True)
class Costs:
    """Seconds of each action; a number for all stages and slices, or rows by stage of seconds by slice.

    Raises ValueError for seconds that are negative or above LONGEST_S.
    """

    forward: float | Table = 1
    backward_input: float | Table = 1
    backward_weight: float | Table = 1
    """A whole backward costs this and backward_input."""
    transfer: float = 0
    """From the send to the arrival of a message. Sending does not occupy a rank."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "transfer"):
            value = getattr(self, name)
            for seconds in (value,) if isinstance(value, (int, float)) else (s for row in value for s in row):
                if not 0 <= seconds <= LONGEST_S:
                    raise ValueError(
                        f"{name} must be seconds of at least 0 and at most {LONGEST_S:g}, found {seconds}."
                    )

    def seconds(self, compute: Action) -> float:
        """Raises ValueError where a table has no such stage or slice, or `compute` is a transfer."""
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
    """A compute and when it ran, in seconds from the start of the schedule."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every compute of `schedule` ran."""

    schedule: Schedule
    spans: tuple[Span, ...]
    """By rank, and in the order in which the rank ran them."""
    makespan: float
    """Seconds from the first start to the last end."""

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.rank == rank)

    def work(self, rank: int) -> float:
        """Seconds that `rank` computes."""
        return math.fsum(span.end - span.start for span in self.spans_of(rank))

    def bubble(self, rank: int) -> float:
        """Seconds of the makespan in which `rank` does not compute."""
        return self.makespan - self.work(rank)

    def waits(self, rank: int) -> float:
        """Seconds between the first start and the last end of `rank` in which it does not compute: the bubble
        without what one step leaves at its ends, where the next begins."""
        spans = self.spans_of(rank)
        return spans[-1].end - spans[0].start - self.work(rank) if spans else 0.0

    def peak_in_flight(self, rank: int) -> int:
        """See `Schedule.peak_in_flight`."""
        return self.schedule.peak_in_flight(rank)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs `schedule` with these costs: a rank computes one action at a time, in order, and a receive keeps
    it until the message is there. Sends never wait: channels are taken to be as long as needed.

    Raises ScheduleError for a schedule that `check` refuses.
    """
    clocks = [0.0] * schedule.ranks
    arrival: dict[Action, float] = {}
    """Of messages, by their receive."""
    spans: list[list[Span]] = [[] for _ in clocks]

    def time(rank: int, action: Action) -> None:
        if action.kind.is_send:
            arrival[action.counterpart] = clocks[rank] + costs.transfer
        elif action.kind.is_receive:
            clocks[rank] = max(clocks[rank], arrival[action])
        else:
            end = clocks[rank] + costs.seconds(action)
            spans[rank].append(Span(rank, action, clocks[rank], end))
            clocks[rank] = end

    check(schedule, channel_capacity=sum(map(len, schedule.actions)) + 1, on_action=time)
    ends = [own[-1].end for own in spans if own]
    return Timeline(schedule, tuple(span for own in spans for span in own), max(ends))
