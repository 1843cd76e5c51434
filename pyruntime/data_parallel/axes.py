"""The data-parallel axes: over which ranks gradients are summed, and over which of them states are cut."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pyruntime import comm

MOST_FLIGHTS = 3  # under way at once in one group; a transport has room for four


class Flight(Protocol):
    """What is under way in a group until somebody needs it."""

    def advance(self) -> None:
        """Takes what has come, so that the transport has its place back; waits for nobody."""

    def complete(self) -> None:
        """Waits for it and uses it."""

    def drop(self) -> None:
        """Lets go of it; nobody will use it."""


class Axis:
    """The ranks of one axis, and the flights that this rank has under way among them, oldest first.

    Flights travel in the companion of the axis's group. They must begin in the same order on every rank, and
    this is the only place where they begin; models that are sharded over one group share it. From `of`."""

    _of_group: ClassVar[dict[str, Axis]] = {}

    def __init__(self, mesh: DeviceMesh | None):
        self.mesh = mesh
        self.size = 1 if mesh is None else comm.group_size(mesh)
        self.rank = 0 if mesh is None else comm.group_rank(mesh)
        self.name = ""
        """Of the companion."""
        self._flights: deque[Flight] = deque()

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Axis:
        """The axis of that group, with nothing under way. Every rank of it asks for it alike."""
        if comm.group_size(mesh) == 1:
            return cls(mesh)
        own = comm.companion(mesh, "dp")
        if own.drop is None:
            axis = cls._of_group[own.name] = cls(mesh)
            axis.name, own.drop = own.name, axis.drop
        axis = cls._of_group[own.name]
        axis.make_room(0)
        return axis

    def drop(self) -> None:
        """Lets go of all flights."""
        while self._flights:
            self._flights.popleft().drop()

    def has_room(self) -> bool:
        return len(self._flights) < MOST_FLIGHTS

    def make_room(self, most: int = MOST_FLIGHTS - 1) -> None:
        """Completes the oldest flights until at most `most` are under way."""
        self._advance()
        while len(self._flights) > most:
            self._complete_oldest()

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

    def complete_up_to(self, flight: Flight) -> None:
        """Completes flights, oldest first, until that one has been."""
        self._advance()
        while flight in self._flights:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        try:
            self._flights.popleft().complete()
        except BaseException:
            self.drop()  # the group has failed
            raise

    def of_all_ranks(self, value: list[int]) -> list[list[int]]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        told: list[list[int]] = [[] for _ in range(self.size)]
        with comm.named_failures(self.mesh, "Sharding the model"):
            dist.all_gather_object(told, value, group=comm.process_group(self.mesh))
        return told


@dataclass(frozen=True)
class Axes:
    """`shard`: states are cut over its ranks. `replicate`: its ranks hold the same. Gradients are summed over
    both."""

    shard: Axis
    replicate: Axis

    @property
    def size(self) -> int:
        return self.shard.size * self.replicate.size


def axes_of(mesh: DeviceMesh, stage: int) -> Axes:
    """The axes of a mesh with one dimension (dp) or two (dp_replicate, dp_shard).

    Raises ValueError where there are more, or two at stage 0, which cuts nothing.
    """
    if mesh.ndim == 1:
        whole = Axis.of(mesh)
        return Axes(Axis(None), whole) if stage == 0 else Axes(whole, Axis(None))
    if mesh.ndim == 2 and stage > 0:
        replicate, shard = mesh.mesh_dim_names or (0, 1)
        return Axes(Axis.of(mesh[shard]), Axis.of(mesh[replicate]))
    raise ValueError(
        f"stage={stage} over a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}: pass one dimension "
        '(mesh["dp"]), or at stages 1 to 3 two, of which states are cut over the last (mesh["dp_replicate", '
        '"dp_shard"]).'
    )
