"""What a rank holds of full tensors: as DTensors, and out of whatever state dicts hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pyruntime.nn.packed.dtensor import PackedDTensor, dtensor
from pyruntime.nn.parameters import Cut, Part


@dataclass(frozen=True)
class Layout(Cut):
    """A `Cut` that turns tensors of state dicts into this rank's, and the other way round."""

    def to_dtensors(self, local: Tensor) -> dict[str, Tensor]:
        """A DTensor per part over the storage of `local`, a plain tensor: the parameter's or anything of its
        shape (a gradient, a moment of the optimizer). No communication. Without a group they are plain."""
        shards = dict(zip(self.parts, self.split(local), strict=True))
        if not self.group.name:
            return {part.key: shard for part, shard in shards.items()}
        return {part.key: self.to_dtensor(part, shard) for part, shard in shards.items()}

    def to_dtensor(self, part: Part, shard: Tensor) -> DTensor:
        """The DTensor of one part over the storage of this rank's shard."""
        mesh = self.group.mesh(shard.device.type)
        if part.packed:
            return PackedDTensor.of(shard, self, part, mesh, self.placements)
        return dtensor(shard, mesh, self.placements, part.shape)

    def local_part(self, part: Part, value: Tensor) -> Tensor:
        """This rank's shard of `part` out of a DTensor (any placement, any mesh that holds this rank), a full
        tensor, or a plain tensor that is this rank's shard already. May communicate for a DTensor placed
        otherwise.

        Raises ValueError where the shape is none of these.
        """
        local_shape = self.local_shape_of(part)
        if isinstance(value, DTensor):
            if isinstance(value, PackedDTensor) or part.packed:
                return self._packed_part(part, value)
            mesh = self.group.mesh(value.device_mesh.device_type) if self.group.name else None
            if tuple(value.shape) == part.shape and value.device_mesh == mesh:
                return value.redistribute(mesh, self.placements).to_local()
            value = value.full_tensor()
        if tuple(value.shape) == part.shape:
            for dim, start, stop in self.places(part):
                value = value.narrow(dim, start, stop - start)
            if not part.packed or self.dim is None:
                return value
            held = [value.narrow(self.dim, start, stop - start) for start, stop in self.ranges(part)]
            return torch.cat(held, self.dim)
        if tuple(value.shape) == local_shape:
            return value
        raise ValueError(
            f"{part.key} has full shape {list(part.shape)} and shard {list(local_shape)} on this "
            f"process, group {self.group}; but the tensor to load has shape {list(value.shape)}; "
            "pass a DTensor, the full tensor or this rank's shard."
        )

    def _packed_part(self, part: Part, value: DTensor) -> Tensor:
        """Of a DTensor, where it or the part is packed."""
        if isinstance(value, PackedDTensor) and value.shard_mesh is None:
            theirs = value.tp_layout
            if (value.part, theirs.dim, theirs.group.name) == (part, self.dim, self.group.name):
                return value.to_local()
        return self.local_part(part, value.full_tensor())

    def gather_parts(self, source: Mapping[str, Tensor]) -> Tensor:
        """The local tensor, made of `source[part.key]` for every part."""
        shards = [self.local_part(part, source[part.key]) for part in self.parts]
        return shards[0] if len(shards) == 1 else torch.cat(shards, dim=self.dim or 0)
