"""How long a schedule takes and where its ranks idle, from what each action costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyruntime.pipeline.actions import Action, Kind, Schedule
from pyruntime.pipeline.validate import check

LONGEST_S = 1e12
"""Of one action: sums of these are finite."""
Table = tuple[tuple[float, ...], ...]
"""Seconds by stage, and by slice: table[stage][slice]."""


@dataclass(frozen=True)
class Costs:
    """Seconds of each action; a number for all stages and slices, or table[stage][slice].

    Raises ValueError for seconds that are negative or above LONGEST_S.
    """

    forward: float | Table
    backward_input: float | Table
    backward_weight: float | Table
    """A whole backward costs this and backward_input."""
    transfer: float = 0.0
    """From the send to the arrival of a message. Sending does not occupy a rank."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "transfer"):
            value = getattr(self, name)
            for seconds in (value,) if isinstance(value, (int, float)) else (s for row in value for s in row):
                if not 0 <= seconds <= LONGEST_S:
                    raise ValueError(
                        f"{name} must be seconds of at least 0 and at most {LONGEST_S:g}, found {seconds}."
                    )

    @classmethod
    def uniform(
        cls,
        forward: float = 1,
        backward_input: float = 1,
        backward_weight: float = 1,
        transfer: float = 0,
    ) -> Costs:
        """The same seconds for every stage and slice."""
        return cls(forward, backward_input, backward_weight, transfer)

    @classmethod
    def of_tables(
        cls,
        forward: Sequence[Sequence[float]],
        backward_input: Sequence[Sequence[float]],
        backward_weight: Sequence[Sequence[float]],
        transfer: float = 0,
    ) -> Costs:
        """From rows by stage of seconds by slice."""
        return cls(_frozen(forward), _frozen(backward_input), _frozen(backward_weight), transfer)

    def seconds(self, compute: Action) -> float:
        """Raises ValueError where a table has no such stage or slice, or `compute` is a transfer."""
        match compute.kind:
            case Kind.FORWARD:
                return _look_up("forward", self.forward, compute)
            case Kind.BACKWARD_INPUT:
                return _look_up("backward_input", self.backward_input, compute)
            case Kind.BACKWARD_WEIGHT:
                return _look_up("backward_weight", self.backward_weight, compute)
            case Kind.BACKWARD:
                halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
                return sum(self.seconds(compute.as_kind(kind)) for kind in halves)
        raise ValueError(f"{compute} is a transfer: it occupies no rank.")


def _frozen(table: Sequence[Sequence[float]]) -> Table:
    return tuple(tuple(row) for row in table)


def _look_up(name: str, table: float | Table, compute: Action) -> float:
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
    check(schedule, channel_capacity=sum(map(len, schedule.actions)) + 1)
    clocks = [0.0] * schedule.ranks
    position = [0] * schedule.ranks
    arrival: dict[Action, float] = {}
    """Of messages, by their receive."""
    spans: list[list[Span]] = [[] for _ in clocks]
    waiting = True
    while waiting:
        waiting = False
        for rank, actions in enumerate(schedule.actions):
            for action in actions[position[rank] :]:
                if action.kind.is_send:
                    arrival[action.counterpart] = clocks[rank] + costs.transfer
                elif action.kind.is_receive:
                    if action not in arrival:
                        waiting = True
                        break
                    clocks[rank] = max(clocks[rank], arrival[action])
                else:
                    end = clocks[rank] + costs.seconds(action)
                    spans[rank].append(Span(rank, action, clocks[rank], end))
                    clocks[rank] = end
                position[rank] += 1
    ends = [own[-1].end for own in spans if own]
    return Timeline(schedule, tuple(span for own in spans for span in own), max(ends))
