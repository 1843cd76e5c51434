"""The ZB-V schedule: two stages on every rank, placed as a V, and weight gradients where bubbles would be
(Qi et al., arXiv 2405.15362; 2401.10241, section 6).

With 3 ranks, stages 0 to 5::

    rank 0   0 5
    rank 1   1 4
    rank 2   2 3

The rank that begins a micro-batch also ends it, so backwards begin where forwards did, and no rank waits.
"""

from __future__ import annotations

from collections import Counter, deque

from pyruntime.pipeline.actions import Action, Kind


def zb_v(ranks: int, micro_batches: int) -> list[list[Action]]:
    """Returns the computes of each rank.

    A rank stores at most 2 * ranks forwards of a stage. This counts those whose weight gradient waits: they
    keep the inputs of linears and the gradients of their outputs, about as much memory. It is the maximum of
    1F1B, whose stages are twice as large. With at least 2 * ranks micro-batches, no rank idles between its
    first and last action if forward, input gradient and weight gradient cost the same.
    """
    if micro_batches > ranks:
        return [_V(ranks, rank, micro_batches).computes for rank in range(ranks)]
    greedy = _Greedy(ranks, micro_batches)
    greedy.run()
    return greedy.computes


class _V:
    """One rank of the schedule as it was published. The late stage begins its gradients first; then F I W of
    one stage and F I W of the other take turns without a gap. With fewer than 2 * ranks micro-batches it is
    the schedule of 2 * ranks, without the actions of the missing micro-batches."""

    def __init__(self, ranks: int, rank: int, micro_batches: int) -> None:
        self.early, self.late = rank, 2 * ranks - 1 - rank
        self.micro_batches = micro_batches
        turns = max(micro_batches, 2 * ranks)
        self.computes: list[Action] = []
        self._done: Counter[tuple[Kind, int]] = Counter()
        # The first micro-batch returns to this rank after this many forwards.
        for _ in range(2 * (ranks - rank) - 1):
            self._run(self.early, Kind.FORWARD)
        for _ in range(rank):
            self._run(self.late, Kind.FORWARD)
            self._run(self.early, Kind.FORWARD)
        for _ in range(ranks - rank):
            self._run(self.late, *TURN)
        while self._done[Kind.FORWARD, self.late] < turns:
            if self._done[Kind.FORWARD, self.early] < turns:
                self._run(self.early, Kind.FORWARD)
            self._run(self.early, *TURN[1:])
            self._run(self.late, *TURN)
        # Other ranks wait for the last input gradients, so weight gradients fill the end.
        for _ in range(rank):
            self._run(self.early, Kind.BACKWARD_INPUT)
            self._run(self.late, Kind.BACKWARD_INPUT)
        for _ in range(ranks - rank):
            self._run(self.early, *TURN[1:])
        for stage in (self.late, self.early):
            while self._done[Kind.BACKWARD_WEIGHT, stage] < turns:
                self._run(stage, Kind.BACKWARD_WEIGHT)

    def _run(self, stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            micro_batch = self._done[kind, stage]
            if micro_batch < self.micro_batches:
                self.computes.append(Action(kind, stage, micro_batch))
            self._done[kind, stage] += 1


TURN = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class _Greedy:
    """The schedule for few micro-batches. In every step each rank takes the first of these that it can:
    an input gradient, of the stage that has run fewer; a forward, of its later stage if possible, which leads
    to backwards sooner; a weight gradient."""

    def __init__(self, ranks: int, micro_batches: int) -> None:
        self.ranks = ranks
        self.stages = 2 * ranks
        self.micro_batches = micro_batches
        self.computes: list[list[Action]] = [[] for _ in range(ranks)]
        self.forwards = [0] * self.stages
        """Number that each stage has run: micro-batches go in ascending order."""
        self.backwards = [0] * self.stages
        self.stored = [0] * ranks
        """Forwards whose weight gradient has not run."""
        self.weights: list[deque[Action]] = [deque() for _ in range(ranks)]
        """Weight gradients that wait, oldest first."""

    def run(self) -> None:
        own = 6 * self.micro_batches
        while any(len(computes) < own for computes in self.computes):
            # All ranks choose before any runs: others can use the results of this step only in the next.
            chosen = [self._choose(rank) for rank in range(self.ranks)]
            for rank, action in enumerate(chosen):
                if action is not None:
                    self._run(rank, action)

    def _choose(self, rank: int) -> Action | None:
        early, late = rank, self.stages - 1 - rank
        ready = [stage for stage in (early, late) if self._backward_is_ready(stage)]
        if ready:
            stage = min(ready, key=lambda stage: self.backwards[stage])
            return Action(Kind.BACKWARD_INPUT, stage, self.backwards[stage])
        # The last place is for the later stage: the early stage's memory is freed only after it has run.
        places = self.stages - self.stored[rank]
        for stage, needed in ((late, 1), (early, 2)):
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
            self.stored[rank] += 1
        elif action.kind is Kind.BACKWARD_INPUT:
            self.backwards[action.stage] += 1
            self.weights[rank].append(action.as_kind(Kind.BACKWARD_WEIGHT))
        else:
            self.weights[rank].popleft()
            self.stored[rank] -= 1
