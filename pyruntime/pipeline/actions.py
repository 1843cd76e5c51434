"""The actions of a pipeline's ranks, and the schedule that lists them: data, without tensors.

A model is cut into stages 0 .. stages - 1, a step into micro-batches, and some schedules cut the sequences
of a micro-batch into slices. Every stage that a micro-batch visits, in most schedules all, computes one
forward and one backward of every slice. Between stages that it visits one after the other, on different
ranks, activations travel to the later and gradients to the earlier one.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST_UNITS = 2**20
"""Limit on the forwards of a step, over all stages; a larger number is taken for a typing error."""


def check_units(stages: int, micro_batches: int, slices: int) -> None:
    """Raises ValueError for a step with more forwards than MOST_UNITS."""
    if max(stages, micro_batches, slices, stages * micro_batches * slices) > MOST_UNITS:
        raise ValueError(
            f"micro_batches={micro_batches} in {slices} slice(s) through {stages} stage(s) are more than "
            f"{MOST_UNITS} forwards in a step; use smaller numbers."
        )


class Kind(enum.Enum):
    """The kind of an action; the value is its code in tables and on the terminal."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the input and of the weights together."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"

    @property
    def is_send(self) -> bool:
        return self in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)

    @property
    def is_receive(self) -> bool:
        return self in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)

    @property
    def is_compute(self) -> bool:
        return not (self.is_send or self.is_receive)

    @property
    def makes_input_gradient(self) -> bool:
        return self in (Kind.BACKWARD, Kind.BACKWARD_INPUT)


COUNTERPARTS = {
    Kind.SEND_ACTIVATION: Kind.RECEIVE_ACTIVATION,
    Kind.RECEIVE_ACTIVATION: Kind.SEND_ACTIVATION,
    Kind.SEND_GRADIENT: Kind.RECEIVE_GRADIENT,
    Kind.RECEIVE_GRADIENT: Kind.SEND_GRADIENT,
}
"""The kind of the action at the other end of a transfer, by its kind."""
TO_LATER = (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT)
"""Transfers whose other end is the next stage on the micro-batch's path, not the one before."""


@dataclass(frozen=True)
class Action:
    """One compute, send or receive of `stage`, for one slice of one micro-batch.

    A send belongs to the stage that sends, a receive to the stage that receives; the other end is the stage
    before or after it on the micro-batch's way (`Route.counterpart`).
    """

    kind: Kind
    stage: int
    micro_batch: int
    slice: int = 0

    def __str__(self) -> str:
        """Returns F0.3 for example, or F0.3/1 for a slice that is not the first."""
        return f"{self.kind.value}{self.stage}.{self.micro_batch}" + (f"/{self.slice}" if self.slice else "")

    def as_kind(self, kind: Kind) -> Action:
        """Returns the action of another kind for the same stage, micro-batch and slice."""
        return Action(kind, self.stage, self.micro_batch, self.slice)


class Route:
    """The way of every micro-batch through the stages, and the rank of each stage.

    placement: the rank of each stage. paths: the stages that each micro-batch visits, in order; empty: all
    stages.
    """

    def __init__(self, placement: Sequence[int], paths: Sequence[Sequence[int]] = ()):
        self.placement, self._visits_all = placement, not paths
        self._next = {
            (stage, number): after for number, path in enumerate(paths) for stage, after in pairwise(path)
        }
        self._previous = {(after, number): stage for (stage, number), after in self._next.items()}

    def after(self, stage: int, micro_batch: int) -> int | None:
        """Returns the stage that the micro-batch visits after `stage`; None: none."""
        if not self._visits_all:
            return self._next.get((stage, micro_batch))
        return stage + 1 if stage + 1 < len(self.placement) else None

    def before(self, stage: int, micro_batch: int) -> int | None:
        """Returns the stage that the micro-batch visits before `stage`; None: none."""
        if not self._visits_all:
            return self._previous.get((stage, micro_batch))
        return stage - 1 if stage > 0 else None

    def counterpart(self, transfer: Action) -> Action | None:
        """Returns the receive that belongs to a send, or the send to a receive; None if the micro-batch
        visits no stage there. Raises KeyError for a compute."""
        kind = COUNTERPARTS[transfer.kind]
        find = self.after if transfer.kind in TO_LATER else self.before
        stage = find(transfer.stage, transfer.micro_batch)
        return None if stage is None else Action(kind, stage, transfer.micro_batch, transfer.slice)

    def other_end(self, transfer: Action) -> Action:
        """Returns the counterpart of a transfer that has one."""
        found = self.counterpart(transfer)
        assert found is not None, f"{transfer} has no other end"
        return found

    def peer(self, transfer: Action) -> int:
        """Returns the rank at the other end of a send or receive."""
        return self.placement[self.other_end(transfer).stage]

    def sent_after(self, compute: Action) -> Action | None:
        """Returns the send of the result of `compute`; None if no other rank needs it."""
        return self._transfer(compute, Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)

    def received_before(self, compute: Action) -> Action | None:
        """Returns the receive that `compute` needs; None if its input comes from no other rank."""
        return self._transfer(compute, Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)

    def _transfer(self, compute: Action, forward: Kind, backward: Kind) -> Action | None:
        """Returns the transfer that goes with `compute`; None if it does not cross from one rank to
        another."""
        if compute.kind is not Kind.FORWARD and not compute.kind.makes_input_gradient:
            return None
        transfer = compute.as_kind(forward if compute.kind is Kind.FORWARD else backward)
        other = self.counterpart(transfer)
        crosses = other is not None and self.placement[other.stage] != self.placement[compute.stage]
        return transfer if crosses else None


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of a pipeline in one step, in order."""

    kind: str
    """Name of the schedule."""
    micro_batches: int
    slices: int
    """Parts that each sequence is cut into."""
    placement: tuple[int, ...]
    """Rank of each stage."""
    actions: tuple[tuple[Action, ...], ...]
    """Actions of each rank, in order."""
    paths: tuple[tuple[int, ...], ...] = ()
    """The stages that each micro-batch visits, in order; empty: all stages."""
    replicas: int = 1
    """Stages that follow each other and hold the same layers, for all stages alike; a path visits one of
    them. Stage number s * replicas + r is then replica r of stage s."""

    @functools.cached_property
    def route(self) -> Route:
        return Route(self.placement, self.paths)

    def path(self, micro_batch: int) -> Sequence[int]:
        """Returns the stages that the micro-batch visits, in order."""
        return self.paths[micro_batch] if self.paths else range(self.stages)

    def column(self, replica: int) -> range:
        """Returns the stages that are replica number `replica`; without replicas, all."""
        return range(replica, self.stages, self.replicas)

    def visits(self, stage: int) -> int:
        """Returns how many micro-batches visit `stage`."""
        return sum(stage in path for path in self.paths) if self.paths else self.micro_batches

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of `rank`, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def peak_in_flight(self, rank: int) -> int:
        """Returns the most forwards of a stage for one slice that `rank` stores at once: those whose input
        gradient has not been computed."""
        peak = stored = 0
        for action in self.actions[rank]:
            stored += (action.kind is Kind.FORWARD) - action.kind.makes_input_gradient
            peak = max(peak, stored)
        return peak


def with_transfers(
    computes: Sequence[Sequence[Action]], placement: Sequence[int], paths: Sequence[Sequence[int]] = ()
) -> tuple[tuple[Action, ...], ...]:
    """Returns the computes of each rank with the sends and receives inserted. placement, paths: see `Route`.

    A send stands right after the compute that makes its data, a receive right before the compute that needs
    it. Messages between two ranks arrive in the order of sending. So a rank first receives the earlier
    messages of the same sender, even if it needs them later.
    """
    route = Route(placement, paths)
    pending = _messages(computes, route)
    return tuple(tuple(_rank_with_transfers(own, rank, pending, route)) for rank, own in enumerate(computes))


def _messages(computes: Sequence[Sequence[Action]], route: Route) -> dict[tuple[int, int], deque[Action]]:
    """Returns the receives of each directed pair of ranks (from, to), in the order of sending."""
    messages: dict[tuple[int, int], deque[Action]] = {}
    for rank, own in enumerate(computes):
        for compute in own:
            send = route.sent_after(compute)
            if send is not None:
                messages.setdefault((rank, route.peer(send)), deque()).append(route.other_end(send))
    return messages


def _rank_with_transfers(
    computes: Sequence[Action], rank: int, pending: dict[tuple[int, int], deque[Action]], route: Route
) -> Iterator[Action]:
    received = set()
    for compute in computes:
        needed = route.received_before(compute)
        if needed is not None and needed not in received:
            queue = pending.get((route.peer(needed), rank), deque())
            # A message that nobody sends stays in the list, so that the validator can name it.
            for _ in range(queue.index(needed) + 1 if needed in queue else 0):
                received.add(queue[0])
                yield queue.popleft()
            if needed not in received:
                received.add(needed)
                yield needed
        yield compute
        send = route.sent_after(compute)
        if send is not None:
            yield send
