"""Assigns sequences to replicas: numbered blocks, dealt out in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Deal:
    """Deals blocks of sequences by number, from 0. Each block counts once: one that was given back is dealt
    again before any new one."""

    def __init__(self, first: int = 0, again: Iterable[int] = ()):
        self.first = first
        """The lowest block that has never been dealt."""
        self._again = sorted(again)

    def take(self) -> int:
        if self._again:
            return heapq.heappop(self._again)
        self.first += 1
        return self.first - 1

    def give_back(self, block: int) -> None:
        """Takes back a block that has not counted."""
        heapq.heappush(self._again, block)

    def to_list(self, in_work: Iterable[int]) -> list[int]:
        """Returns the lowest block never dealt, then those that have not counted, `in_work` among them."""
        return [self.first, *sorted([*self._again, *in_work])]


def step_of_data(block: int, step: int, tau: int) -> int:
    """Returns the step of a single replica's run whose sequences a replica with this block takes in its
    `step`. Both steps count from 1."""
    return block * tau + (step - 1) % tau + 1
