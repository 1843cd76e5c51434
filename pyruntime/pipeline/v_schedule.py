"""ZB-V: two stages on every rank, in a V, and weight gradients where bubbles would be (arXiv 2405.15362;
2401.10241, section 6).

With 3 ranks, stages 0 to 5::

    rank 0   0 5
    rank 1   1 4
    rank 2   2 3

The rank that begins a micro-batch also ends it, so backwards begin where forwards did, and no rank waits.
"""

from __future__ import annotations

from collections import deque

from pyruntime.pipeline.actions import Action, Kind

FORWARD_SIZE = 4
"""What a forward stores until its input gradient has run, in quarters of itself."""
RULES = ((2, False), (2, True), (1, False))
"""What is stored from then until the weight gradient has run, in the same quarters, and whether input
gradients of the later stage come first."""


def zb_v(ranks: int, micro_batches: int) -> list[list[Action]]:
    """Computes of each rank, from a greedy list scheduler over unit costs.

    A rank stores at most 2 ranks forwards of a stage: as a stage is half of one of 1F1B, that is 1F1B's most.
    A weight gradient that waits counts as half a forward, or as a quarter where half would make a rank wait.
    Where forward, input gradient and weight gradient cost the same and micro_batches >= 2 ranks, no rank
    idles between its first and its last action (derived: simulated for 1 to 24 ranks).
    """
    attempts = [_Greedy(ranks, micro_batches, *rule) for rule in RULES]
    for attempt in attempts:
        attempt.run()
    return min(attempts, key=lambda attempt: attempt.waits).computes


class _Greedy:
    """In every step every rank takes the first it can of: an input gradient, a forward (of its later stage
    first, which leads to backwards sooner), a weight gradient."""

    def __init__(self, ranks: int, micro_batches: int, weight_size: int, late_first: bool) -> None:
        self.ranks = ranks
        self.stages = 2 * ranks
        self.micro_batches = micro_batches
        self.weight_size = weight_size
        self.late_first = late_first
        self.computes: list[list[Action]] = [[] for _ in range(ranks)]
        self.waits = 0
        """Steps in which a rank idled between its first and its last action."""
        self.forwards = [0] * self.stages
        """How many each stage has run: micro-batches go in ascending order."""
        self.backwards = [0] * self.stages
        self.stored = [0] * ranks
        self.weights: list[deque[Action]] = [deque() for _ in range(ranks)]
        """Weight gradients that wait, oldest first."""

    def run(self) -> None:
        own = 6 * self.micro_batches
        while any(len(computes) < own for computes in self.computes):
            # All ranks choose before any runs: what one makes in this step others have in the next.
            chosen = [self._choose(rank) for rank in range(self.ranks)]
            for rank, action in enumerate(chosen):
                if action is not None:
                    self._run(rank, action)
                elif 0 < len(self.computes[rank]) < own:
                    self.waits += 1

    def _choose(self, rank: int) -> Action | None:
        early, late = rank, self.stages - 1 - rank
        ready = [stage for stage in (early, late) if self._backward_is_ready(stage)]
        if ready:
            stage = max(ready) if self.late_first else min(ready, key=lambda stage: self.backwards[stage])
            return Action(Kind.BACKWARD_INPUT, stage, self.backwards[stage])
        # The last place is for the later stage: what the early one stores is freed only after it.
        places = self.stages * FORWARD_SIZE - self.stored[rank]
        for stage, needed in ((late, FORWARD_SIZE), (early, 2 * FORWARD_SIZE)):
            if self._forward_is_ready(stage) and places >= needed:
                return Action(Kind.FORWARD, stage, self.forwards[stage])
        return self.weights[rank][0] if self.weights[rank] else None

    def _forward_is_ready(self, stage: int) -> bool:
        arrived = self.forwards[stage - 1] if stage > 0 else self.micro_batches
        return self.forwards[stage] < arrived

    def _backward_is_ready(self, stage: int) -> bool:
        arrived = self.backwards[stage + 1] if stage + 1 < self.stages else self.forwards[stage]
        return self.backwards[stage] < arrived

    def _run(self, rank: int, action: Action) -> None:
        self.computes[rank].append(action)
        if action.kind is Kind.FORWARD:
            self.forwards[action.stage] += 1
            self.stored[rank] += FORWARD_SIZE
        elif action.kind is Kind.BACKWARD_INPUT:
            self.backwards[action.stage] += 1
            self.weights[rank].append(action.as_kind(Kind.BACKWARD_WEIGHT))
            self.stored[rank] -= FORWARD_SIZE - self.weight_size
        else:
            self.weights[rank].popleft()
            self.stored[rank] -= self.weight_size
