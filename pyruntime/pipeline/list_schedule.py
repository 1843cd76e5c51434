"""List schedules: the order in which ranks compute, for given paths of the micro-batches."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pyruntime.pipeline.actions import Action, Kind
from pyruntime.pipeline.simulated import Costs

Path = tuple[int, ...]
Paths = tuple[Path, ...]


def list_schedule(
    placement: Sequence[int], paths: Paths, costs: Costs, most_stored: Sequence[int]
) -> tuple[list[list[Action]], float] | None:
    """Returns the computes of each rank, and the seconds until the last ends; None if ranks that store as
    much as they may wait for each other.

    A rank never idles while it can compute. It prefers a backward to a forward, then the stage that comes
    later on the micro-batch's path, then the earlier micro-batch. most_stored: forwards that each rank may
    store. That of the last stage does not count: its backward follows at once.
    """
    work = _Work(placement, paths, costs, most_stored)
    return (work.computes, work.now) if work.run() else None


class _Ready(NamedTuple):
    """A compute that a rank may run; the least comes first."""

    is_forward: bool
    place: int
    """Minus the place of the stage on the path."""
    micro_batch: int


class _Work:
    """The state of a list schedule in virtual time."""

    def __init__(
        self, placement: Sequence[int], paths: Paths, costs: Costs, most_stored: Sequence[int]
    ) -> None:
        self.placement, self.paths, self.most_stored = placement, paths, most_stored
        self.transfer, self.now = costs.transfer, 0.0
        stages, kinds = range(len(placement)), (Kind.BACKWARD, Kind.FORWARD)
        self._seconds = [[costs.seconds(Action(kind, stage, 0)) for stage in stages] for kind in kinds]
        ranks = max(placement) + 1
        self.computes: list[list[Action]] = [[] for _ in range(ranks)]
        self._ready: list[list[_Ready]] = [[] for _ in range(ranks)]
        self._stored = [0] * ranks
        self._is_busy = [False] * ranks
        self._events: list[tuple[float, int, int, _Ready | None]] = []
        """Seconds, number, rank, and what may run there from then on; None: the rank has ended its
        compute."""
        self._numbers = itertools.count()
        for number, path in enumerate(paths):
            self._ready[placement[path[0]]].append(_Ready(True, 0, number))

    def run(self) -> bool:
        """Runs all computes. Returns whether all could run."""
        self._begin(range(len(self.computes)))
        while self._events:
            touched = set()
            self.now = self._events[0][0]
            while self._events and self._events[0][0] <= self.now:
                _, _, rank, ready = heapq.heappop(self._events)
                if ready is None:
                    self._is_busy[rank] = False
                else:
                    self._ready[rank].append(ready)
                touched.add(rank)
            self._begin(sorted(touched))
        return not any(self._ready)

    def _begin(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            possible = [each for each in self._ready[rank] if self._has_room(rank, each)]
            if possible and not self._is_busy[rank]:
                self._compute(rank, min(possible))

    def _has_room(self, rank: int, ready: _Ready) -> bool:
        is_last = 1 - ready.place == len(self.paths[ready.micro_batch])
        return not ready.is_forward or is_last or self._stored[rank] < self.most_stored[rank]

    def _compute(self, rank: int, ready: _Ready) -> None:
        path, place = self.paths[ready.micro_batch], -ready.place
        kind = Kind.FORWARD if ready.is_forward else Kind.BACKWARD
        action = Action(kind, path[place], ready.micro_batch)
        self._ready[rank].remove(ready)
        self.computes[rank].append(action)
        self._is_busy[rank] = True
        is_last = place + 1 == len(path)
        self._stored[rank] += 0 if is_last else 1 if ready.is_forward else -1
        ended = self.now + self._seconds[ready.is_forward][action.stage]
        self._add(ended, rank, None)
        if is_last and ready.is_forward:
            self._add(ended, rank, _Ready(False, ready.place, ready.micro_batch))
            return
        place += 1 if ready.is_forward else -1
        if place >= 0:
            to = self.placement[path[place]]
            arrives = ended + (self.transfer if to != rank else 0)
            self._add(arrives, to, _Ready(ready.is_forward, -place, ready.micro_batch))

    def _add(self, seconds: float, rank: int, ready: _Ready | None) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), rank, ready))
