"""One axis of parallelism as a Runtime names it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """An axis of parallelism: rank, size, group and mesh alike for all of them. One that the mesh does not
    have is of this rank alone: rank 0 of 1, without group or mesh.

    It passes wherever pyruntime takes a group or a mesh; torch's own functions take `axis.mesh`.
    """

    name: str
    """tp, tp_y, dp, cp, pp or replicas."""
    mesh: DeviceMesh | None
    """Of one dimension; of two for dp and replicas where there are groups of them (dp_replicate, dp_shard).
    None: the mesh has no such axis."""

    @property
    def rank(self) -> int:
        """This process's rank along the axis, of two dimensions with the last one fastest."""
        if self.mesh is None:
            return 0
        place, rank = self.mesh.get_coordinate(), 0
        assert place is not None, f"This rank is not in the mesh of axis {self.name}."
        for at, size in zip(place, self.mesh.shape, strict=True):
            rank = rank * size + at
        return rank

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises ValueError where the axis is of one rank alone, or of two dimensions."""
        if self.mesh is None:
            raise ValueError(
                f"The mesh has no axis {self.name}, so it is of this rank alone and has no process group; "
                f"start the Runtime with {self.name} above 1."
            )
        if self.mesh.ndim != 1:
            names = self.mesh.mesh_dim_names or ("0", "1")
            raise ValueError(
                f"The axis {self.name} is {names} here, each with a process group of its own; pass one of "
                f'them, as in runtime.{self.name}.mesh["{names[0]}"].'
            )
        return self.mesh.get_group()
