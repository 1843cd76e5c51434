"""The actions of a pipeline's ranks, and the schedule that lists them: data, without tensors.

A model is cut into stages 0 .. stages - 1, a step into micro-batches, and some schedules cut the sequences
of a micro-batch into slices. Every stage computes one forward and one backward of every slice. Between
neighbouring stages on different ranks, activations travel to the next stage and gradients to the previous.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, 1),
    Kind.RECEIVE_ACTIVATION: (Kind.SEND_ACTIVATION, -1),
    Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1),
    Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, 1),
}
"""By kind of transfer: the kind of the action at its other end, and the distance to the stage there."""


@dataclass(frozen=True)
class Action:
    """One compute, send or receive of `stage`, for one slice of one micro-batch.

    A send belongs to the stage that sends: activations go to stage + 1, gradients to stage - 1. A receive
    belongs to the stage that receives: activations come from stage - 1, gradients from stage + 1.
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

    @property
    def counterpart(self) -> Action:
        """The receive that belongs to a send, or the send to a receive. Raises KeyError for a compute."""
        kind, distance = COUNTERPARTS[self.kind]
        return Action(kind, self.stage + distance, self.micro_batch, self.slice)


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

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of `rank`, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def peer(self, transfer: Action) -> int:
        """Returns the rank at the other end of a send or receive."""
        return self.placement[transfer.counterpart.stage]

    def peak_in_flight(self, rank: int) -> int:
        """Returns the most forwards of a stage for one slice that `rank` stores at once: those whose input
        gradient has not been computed."""
        peak = stored = 0
        for action in self.actions[rank]:
            stored += (action.kind is Kind.FORWARD) - action.kind.makes_input_gradient
            peak = max(peak, stored)
        return peak


def sent_after(compute: Action, placement: Sequence[int]) -> Action | None:
    """Returns the send of the result of `compute`; None if no other rank needs it."""
    return _transfer(compute, placement, Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)


def received_before(compute: Action, placement: Sequence[int]) -> Action | None:
    """Returns the receive that `compute` needs; None if its input comes from no other rank."""
    return _transfer(compute, placement, Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)


def _transfer(compute: Action, placement: Sequence[int], forward: Kind, backward: Kind) -> Action | None:
    """Returns the transfer that goes with `compute`; None if it does not cross from one rank to another."""
    if compute.kind is not Kind.FORWARD and not compute.kind.makes_input_gradient:
        return None
    transfer = compute.as_kind(forward if compute.kind is Kind.FORWARD else backward)
    other = transfer.counterpart.stage
    crosses = 0 <= other < len(placement) and placement[other] != placement[compute.stage]
    return transfer if crosses else None


def with_transfers(
    computes: Sequence[Sequence[Action]], placement: Sequence[int]
) -> tuple[tuple[Action, ...], ...]:
    """Returns the computes of each rank with the sends and receives inserted.

    A send stands right after the compute that makes its data, a receive right before the compute that needs
    it. Messages between two ranks arrive in the order of sending. So a rank first receives the earlier
    messages of the same sender, even if it needs them later.
    """
    pending = _messages(computes, placement)
    return tuple(
        tuple(_rank_with_transfers(own, rank, pending, placement)) for rank, own in enumerate(computes)
    )


def _messages(
    computes: Sequence[Sequence[Action]], placement: Sequence[int]
) -> dict[tuple[int, int], deque[Action]]:
    """Returns the receives of each directed pair of ranks (from, to), in the order of sending."""
    messages: dict[tuple[int, int], deque[Action]] = {}
    for rank, own in enumerate(computes):
        for compute in own:
            send = sent_after(compute, placement)
            if send is not None:
                receive = send.counterpart
                messages.setdefault((rank, placement[receive.stage]), deque()).append(receive)
    return messages


def _rank_with_transfers(
    computes: Sequence[Action],
    rank: int,
    pending: dict[tuple[int, int], deque[Action]],
    placement: Sequence[int],
) -> Iterator[Action]:
    received = set()
    for compute in computes:
        needed = received_before(compute, placement)
        if needed is not None and needed not in received:
            queue = pending.get((placement[needed.counterpart.stage], rank), deque())
            # A message that nobody sends stays in the list, so that the validator can name it.
            for _ in range(queue.index(needed) + 1 if needed in queue else 0):
                received.add(queue[0])
                yield queue.popleft()
            if needed not in received:
                received.add(needed)
                yield needed
        yield compute
        send = sent_after(compute, placement)
        if send is not None:
            yield send
