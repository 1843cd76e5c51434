"""The data-parallel axes: over which ranks gradients are summed, and over which of them states are cut."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh

from pyruntime import comm
from pyruntime.comm.core import _C
from pyruntime.comm.exchange import gather

PLACES = 4  # of flights, in a transport
MOST_FLIGHTS = 3  # under way at once in one group
MOST_ANY_TIME = 2
"""Where ranks begin flights at different moments. With half as many as a transport has places no rank ever
waits for one in another's hands: it has all rows of the flight two before, so every rank had begun that, and
so finished the one four before."""
BEFORE_GRADIENTS, AFTER_GRADIENTS = -1, 1


class Flight(Protocol):
    """What is under way in a group until somebody needs it."""

    def advance(self) -> None:
        """Takes what has come, so that the transport has its place back; waits for nobody."""

    def has_landed(self) -> bool:
        """Whether complete() has nothing left to wait for or to copy."""

    def complete(self) -> None:
        """Waits for it and uses it."""

    def drop(self) -> None:
        """Lets go of it; nobody will use it."""


class AxisUser(Protocol):
    """Who begins flights of an axis."""

    def settle(self) -> None:
        """All ranks have begun the same flights when it returns. Every rank calls it."""

    def end_turn(self) -> None:
        """As settle(), and nothing is left to begin: another begins flights now."""

    def forget_turn(self) -> None:
        """The group has failed."""


class FlightAxis:
    """The ranks of one axis, and the flights that this rank has under way among them, oldest first.

    Flights travel in the companion of the axis's group. They must begin in the same order on every rank, and
    this is the only place where they begin; models that are sharded over one group share it. From `of`."""

    def __init__(self, mesh: DeviceMesh | None, most: int = MOST_FLIGHTS):
        self.mesh, self.most = mesh, most
        self.size = 1 if mesh is None else comm.group_size(mesh)
        self.rank = 0 if mesh is None else comm.group_rank(mesh)
        self.name = ""
        """Of the companion."""
        self._flights: deque[Flight] = deque()
        self._user: weakref.ref[AxisUser] | None = None
        self.held: AxisUser | None = None
        """The user, while some ranks may have begun flights of it that others have not."""

    @classmethod
    def of(cls, mesh: DeviceMesh, within: int = 0, most: int = MOST_FLIGHTS) -> FlightAxis:
        """The axis of that group, with nothing under way and room for `most`. within: its place in the class
        of traffic; another place is another axis. Every rank of it asks for it alike."""
        if comm.group_size(mesh) == 1:
            return cls(mesh)
        own = comm.companion(mesh, "dp", within=within)
        axis = own.open
        if axis is None:
            axis = own.open = cls(mesh, most)
            axis.name = own.name
        assert isinstance(axis, cls)
        if axis.held is not None:
            axis.held.settle()
        axis._user = None
        axis.complete_all()
        return axis

    def turn_to(self, user: AxisUser) -> None:
        """Of those that share the axis, who may begin flights at moments of its own. Every rank calls it
        alike."""
        before = None if self._user is None else self._user()
        if before is not user:
            self._user = weakref.ref(user)
            if before is not None:
                before.end_turn()

    def is_used_by(self, user: AxisUser) -> bool:
        return self._user is not None and self._user() is user

    def drop(self) -> None:
        """Lets go of all flights."""
        if self.held is not None:
            self.held.forget_turn()
        self._user = self.held = None
        while self._flights:
            self._flights.popleft().drop()

    def has_room(self) -> bool:
        return len(self._flights) < self.most

    def make_room(self, room: int = 1) -> None:
        """Completes the oldest flights until so many more may be under way."""
        self._advance()
        while len(self._flights) > self.most - room:
            self._complete_oldest()

    def complete_all(self) -> None:
        self.make_room(self.most)

    def take_what_has_come(self, but: int = 1) -> None:
        """Completes the oldest flights of which all has come, but so many of the latest. Ranks see that at
        different moments, and so begin others at different ones, if in the same order: for MOST_ANY_TIME
        flights, until leave_latest()."""
        self._advance()
        while len(self._flights) > but and self._flights[0].has_landed():
            self._complete_oldest()

    def leave_latest(self) -> None:
        """Completes all flights but the latest: ranks that have begun the same ones are alike again."""
        self.make_room(self.most - 1)

    def _advance(self) -> None:
        """A rank that is ahead waits for places that the others still hold. So everything is taken as soon as
        it has come; but when flights begin and complete, in which ranks must be alike, does not depend on
        that."""
        try:
            for flight in self._flights:
                flight.advance()
        except BaseException:
            self.drop()  # the group has failed
            raise

    def add(self, flight: Flight) -> None:
        self._flights.append(flight)

    def complete_latest(self, flight: Flight) -> None:
        """Completes the flight, if it is the latest, before those under way: then what begins in its place
        is no more than PLACES - 1 behind the oldest."""
        if self._flights and self._flights[-1] is flight:
            self._complete(self._flights.pop())

    def complete_up_to(self, flight: Flight) -> None:
        """Completes flights, oldest first, until that one has been."""
        self._advance()
        while flight in self._flights:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        self._complete(self._flights.popleft())

    def _complete(self, flight: Flight) -> None:
        try:
            flight.complete()
        except BaseException:
            self.drop()  # the group has failed
            raise

    def of_all_ranks(self, value: list[int]) -> list[list[int]]:
        """Every rank's value, on every rank."""
        return [value] if self.mesh is None else gather(self.mesh, "Sharding the model", value, list[int])


@dataclass(frozen=True)
class Axes:
    """`shard`: states are cut over its ranks. `replicate`: its ranks hold the same. Gradients are summed over
    both. `weights`: the ranks of `shard`, for what weights travel in, so that neither waits for the other's
    places."""

    shard: FlightAxis
    replicate: FlightAxis
    weights: FlightAxis

    @property
    def size(self) -> int:
        return self.shard.size * self.replicate.size

    def note_failed_pass(self, of_weights: bool = False) -> None:
        """This rank has left a forward or backward pass by an exception. Its flights, also those of weights
        where that is said, and those of ranks that have not raise ValueError, on all ranks."""
        for axis in (self.shard, self.replicate, *((self.weights,) if of_weights else ())):
            if axis.size > 1:
                _C.note_failed_pass(axis.name)


def axes_of(mesh: DeviceMesh | None, stage: int) -> Axes:
    """The axes of a mesh with one dimension (dp) or two (dp_replicate, dp_shard), or of one rank alone.

    Raises ValueError where there are more, or two at stage 0, which cuts nothing.
    """
    if mesh is None:
        return Axes(FlightAxis(None), FlightAxis(None), FlightAxis(None))
    # Stage 3 computes as soon as weights come; at 1 and 2 they return while gradients are what is waited for.
    place = (BEFORE_GRADIENTS, MOST_FLIGHTS) if stage == 3 else (AFTER_GRADIENTS, MOST_ANY_TIME)
    if mesh.ndim == 1:
        if stage == 0:
            return Axes(FlightAxis(None), FlightAxis.of(mesh), FlightAxis(None))
        return Axes(FlightAxis.of(mesh), FlightAxis(None), FlightAxis.of(mesh, *place))
    if mesh.ndim == 2 and stage > 0:
        replicate, shard = mesh.mesh_dim_names or (0, 1)
        return Axes(
            FlightAxis.of(mesh[shard]), FlightAxis.of(mesh[replicate]), FlightAxis.of(mesh[shard], *place)
        )
    raise ValueError(
        f"stage={stage} over a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}: pass one dimension "
        '(mesh["dp"]), or at stages 1 to 3 two, of which states are cut over the last (mesh["dp_replicate", '
        '"dp_shard"]).'
    )
