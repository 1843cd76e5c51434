"""One axis of parallelism of a Runtime."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """An axis of parallelism, with rank, size, group and mesh alike for all axes. If the mesh does not have
    it, it holds only this rank: rank 0 of 1, without group or mesh.

    It passes wherever pyruntime takes a group or a mesh; torch's own functions take `axis.mesh`.
    """

    name: str
    """tp, tp_y, ep, dp, cp, pp, replicas or edp."""
    mesh: DeviceMesh | None
    """A mesh of one dimension, or of two, (dp_replicate, dp_shard), for dp, replicas and edp if there are
    groups of them. None: the mesh has no such axis."""
    copies: DeviceMesh | None = None
    """The ranks that hold the same experts as this one (`Runtime.edp`), if this is ep and not tp. Gradients
    of experts are summed over these, not over the replicas of the rest of the model."""

    @property
    def rank(self) -> int:
        """This process's rank along the axis; of two dimensions the last one is fastest."""
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
        """The process group. Raises ValueError if the axis holds only this rank, or has two dimensions."""
        if self.mesh is None:
            raise ValueError(
                f"The mesh has no axis {self.name}, so it holds only this rank and has no process group; "
                f"start the Runtime with {self.name} above 1."
            )
        if self.mesh.ndim != 1:
            names = self.mesh.mesh_dim_names or ("0", "1")
            raise ValueError(
                f"The axis {self.name} is {names} here, each with a process group of its own; pass one of "
                f'them, as in runtime.{self.name}.mesh["{names[0]}"].'
            )
        return self.mesh.get_group()
