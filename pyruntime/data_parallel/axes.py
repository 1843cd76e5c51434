"""The data-parallel axes: the ranks over which gradients are summed, and those over which states are cut."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pyruntime import comm
from pyruntime.comm.core import _C
from pyruntime.comm.exchange import gather
from pyruntime.nn.parameters import TensorGroup

PLACES = 4  # slots for flights in a transport
MOST_FLIGHTS = 3  # under way at once in one group
MOST_ANY_TIME = 2
"""Flights under way if ranks begin them at different moments: half of the slots. Then no rank waits for a
slot that another still uses. It has all rows of the flight two before, so every rank had begun that flight,
and so had finished the one four before."""
SMALL_GRADIENTS, BEFORE_GRADIENTS, AFTER_GRADIENTS = -2, -1, 1


class Flight(Protocol):
    """An operation that is under way in a group until its result is needed."""

    def advance(self) -> None:
        """Takes what has arrived, so that the transport has its slot back; never waits."""

    def has_landed(self) -> bool:
        """Whether complete() has nothing left to wait for or to copy."""

    def complete(self) -> None:
        """Waits for the result and uses it."""

    def drop(self) -> None:
        """Drops it; its result will not be used."""


class AxisUser(Protocol):
    """Code that begins flights of an axis."""

    def settle(self) -> None:
        """Returns when all ranks have begun the same flights. Every rank calls it."""

    def end_turn(self) -> None:
        """Settles, and begins all that is left to begin: another user begins flights now."""

    def forget_turn(self) -> None:
        """Is told that the group has failed."""


class FlightAxis:
    """The ranks of one axis, and the flights that this rank has under way among them, oldest first.

    Flights travel in the companion of the axis's group. They must begin in the same order on every rank, and
    this is the only place where they begin. Models that are sharded over one group share it. Made by `of`."""

    def __init__(self, mesh: DeviceMesh | None, most: int = MOST_FLIGHTS):
        self.mesh, self.most = mesh, most
        self.size = 1 if mesh is None else comm.group_size(mesh)
        self.rank = 0 if mesh is None else comm.group_rank(mesh)
        self.name = ""
        """Name of the companion."""
        self._flights: deque[Flight] = deque()
        self._user: weakref.ref[AxisUser] | None = None
        self.held: AxisUser | None = None
        """The user of which some ranks may have begun flights that others have not; else None."""

    @classmethod
    def of(cls, mesh: DeviceMesh, within: int = 0, most: int = MOST_FLIGHTS) -> FlightAxis:
        """Returns the axis of that group, with nothing under way and room for `most`. within: its place in
        the traffic class; another place is another axis. Every rank of it calls this alike."""
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
        """Lets one user of the axis begin flights at moments of its own. Every rank calls it alike."""
        before = None if self._user is None else self._user()
        if before is not user:
            self._user = weakref.ref(user)
            if before is not None:
                before.end_turn()

    def is_used_by(self, user: AxisUser) -> bool:
        return self._user is not None and self._user() is user

    def drop(self) -> None:
        """Drops all flights."""
        if self.held is not None:
            self.held.forget_turn()
        self._user = self.held = None
        while self._flights:
            self._flights.popleft().drop()

    def has_room(self) -> bool:
        return len(self._flights) < self.most

    def make_room(self, room: int = 1) -> None:
        """Completes the oldest flights until `room` more may be under way."""
        self._advance()
        while len(self._flights) > self.most - room:
            self._complete_oldest()

    def complete_all(self) -> None:
        self.make_room(self.most)

    def take_what_has_come(self, but: int = 1) -> None:
        """Completes the oldest flights that have arrived, except the latest `but`. Ranks see arrivals at
        different moments, and so begin other flights at different moments, though in the same order. So at
        most MOST_ANY_TIME flights may be under way until leave_latest()."""
        self._advance()
        while len(self._flights) > but and self._flights[0].has_landed():
            self._complete_oldest()

    def leave_latest(self) -> None:
        """Completes all flights but the latest: ranks that have begun the same ones are alike again."""
        self.make_room(self.most - 1)

    def _advance(self) -> None:
        """Takes everything as soon as it has arrived, because a rank that is ahead waits for slots that
        others still hold. Ranks must begin and complete flights alike; this does not change when they do."""
        try:
            for flight in self._flights:
                flight.advance()
        except BaseException:
            self.drop()  # the group has failed
            raise

    def add(self, flight: Flight) -> None:
        self._flights.append(flight)

    def complete_latest(self, flight: Flight) -> None:
        """Completes the flight, if it is the latest, before those under way. The flight that begins in its
        place is then at most PLACES - 1 behind the oldest."""
        if self._flights and self._flights[-1] is flight:
            self._complete(self._flights.pop())

    def complete_up_to(self, flight: Flight) -> None:
        """Completes flights, oldest first, until that one is completed."""
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
        """Returns every rank's value, on every rank."""
        return [value] if self.mesh is None else gather(self.mesh, "Sharding the model", value, list[int])


@dataclass(frozen=True)
class Axes:
    """The axes of a sharded model. `shard`: states are cut over its ranks. `replicate`: its ranks hold the
    same. Gradients are summed over both. `weights`: the ranks of `shard`, in a group of their own for
    weights, so that gradients and weights do not wait for each other's slots. `small`: on devices the same
    ranks in groups of their own for gradients of small parameters, which come late behind those of experts: a
    layer's matrices would wait for their slots."""

    shard: FlightAxis
    replicate: FlightAxis
    weights: FlightAxis
    small: Axes | None = None

    @property
    def size(self) -> int:
        return self.shard.size * self.replicate.size

    @property
    def of_gradients(self) -> tuple[FlightAxis, FlightAxis]:
        return self.shard, self.replicate

    @property
    def of_all_gradients(self) -> tuple[FlightAxis, ...]:
        """Those of small parameters too."""
        return self.of_gradients if self.small is None else (*self.of_gradients, *self.small.of_gradients)

    def note_failed_pass(self, of_weights: bool = False) -> None:
        """Notes that this rank has left a forward or backward pass by an exception. Its flights (of_weights:
        weights' too), and those of ranks that have left none, then raise ValueError, on all ranks."""
        for axis in (*self.of_all_gradients, *((self.weights,) if of_weights else ())):
            if axis.size > 1:
                _C.note_failed_pass(axis.name)


def own_axes() -> Axes:
    """Returns the axes of a rank that shares its states and gradients with no other."""
    return Axes(FlightAxis(None), FlightAxis(None), FlightAxis(None))


class AxesOf:
    """The axes of each parameter of a model that is sharded over `mesh`: those of the mesh. Experts that lie
    over a group of their own (`pyruntime.nn.TensorGroup.copies`) have those of the ranks that hold the same
    ones. Every rank makes it alike; raises ValueError as `axes_of` does."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None, stage: int):
        self.main = axes_of(mesh, stage)
        self._of_group: dict[str, Axes] = {}
        """By the name of the group over which experts lie."""
        for parameter in model.parameters():
            group = _own_group(parameter)
            if group is not None and group.name not in self._of_group:
                self._of_group[group.name] = axes_of(group.copies, stage)

    def of(self, parameter: Tensor) -> Axes:
        group = _own_group(parameter)
        return self.main if group is None else self._of_group[group.name]

    @property
    def every(self) -> tuple[Axes, ...]:
        """All axes, the model's first."""
        return self.main, *self._of_group.values()


def _own_group(parameter: Tensor) -> TensorGroup | None:
    layout = getattr(parameter, "tp_layout", None)
    return None if layout is None or layout.group.copies is None else layout.group


def flight_axes(every: Iterable[Axes]) -> list[FlightAxis]:
    """Returns the axes over which gradients are summed, each once and in the same order on all ranks."""
    return list(dict.fromkeys(axis for axes in every for axis in axes.of_all_gradients))


def axes_of(mesh: DeviceMesh | None, stage: int) -> Axes:
    """Returns the axes of a mesh with one dimension (dp) or two (dp_replicate, dp_shard), or of one rank.

    Raises ValueError if there are more, or two at stage 0, which cuts nothing.
    """
    if mesh is None:
        return own_axes()
    if mesh.ndim == 1:
        shard, replicate = (None, mesh) if stage == 0 else (mesh, None)
    elif mesh.ndim == 2 and stage > 0:
        of_replicas, of_shards = mesh.mesh_dim_names or (0, 1)
        shard, replicate = mesh[of_shards], mesh[of_replicas]
    else:
        raise _no_axes(mesh, stage)

    def axis(of: DeviceMesh | None, *place: int) -> FlightAxis:
        return FlightAxis(None) if of is None else FlightAxis.of(of, *place)

    # At stage 3 the computation waits for weights. At 1 and 2 it waits for gradients while weights return;
    # CPU ranks begin these at moments of their own.
    on_device = mesh.device_type != "cpu"
    most = MOST_FLIGHTS if on_device or stage == 3 else MOST_ANY_TIME
    weights, small = axis(shard, BEFORE_GRADIENTS if stage == 3 else AFTER_GRADIENTS, most), None
    if on_device:
        small = Axes(axis(shard, SMALL_GRADIENTS), axis(replicate, SMALL_GRADIENTS), weights)
    return Axes(axis(shard), axis(replicate), weights, small)


def _no_axes(mesh: DeviceMesh, stage: int) -> ValueError:
    return ValueError(
        f"stage={stage} over a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}: pass one dimension "
        '(mesh["dp"]), or, at stages 1 to 3, two (mesh["dp_replicate", "dp_shard"]); states are cut over '
        "the last one."
    )
