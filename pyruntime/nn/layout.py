"""What a rank holds of full tensors: as DTensors, those of packed linears too, whose placement torch does not
know, and out of whatever state dicts hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map_only

from pyruntime.nn.packed import in_order
from pyruntime.nn.parameters import Cut, Part

aten = torch.ops.aten
_SAME_ROWS = {
    *(aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default),
}
"""What gives a tensor that is cut in the same way."""


def dtensor(
    shard: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """A DTensor of `shape` over the storage of this rank's `shard`; no communication."""
    return DTensor.from_local(
        shard,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


class PackedDTensor(DTensor):
    """A tensor [.., sum of n_i, ..] of which this rank holds [part0_r | part1_r | ..].

    No placement of torch's says so, so its own says "Shard" and is never acted on: a checkpoint
    (torch.distributed.checkpoint) writes and reads each part's piece where it belongs in the whole, without
    communication; `full_tensor()` and `redistribute()` put the whole in order; an operator computes of the
    whole, for which every rank must call it. Writing into it is refused. With `shard_mesh` the rank holds
    some rows of its parts alone, as Shard(0) over that mesh cuts them (ZeRO)."""

    tp_layout: Cut
    part: Part
    shard_mesh: DeviceMesh | None

    @classmethod
    def of(
        cls,
        local: Tensor,
        layout: Cut,
        part: Part,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shard_mesh: DeviceMesh | None = None,
    ) -> PackedDTensor:
        """mesh, placements: as they would be were the parts one."""
        spec = dtensor(local.detach(), mesh, placements, part.shape)._spec
        made = cls(local, spec, requires_grad=local.requires_grad)
        made.tp_layout, made.part, made.shard_mesh = layout, part, shard_mesh
        return made

    def like(self, local: Tensor) -> PackedDTensor:
        """Another tensor that is cut in the same way."""
        return PackedDTensor.of(
            local, self.tp_layout, self.part, self.device_mesh, self.placements, self.shard_mesh
        )

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole, on every rank, all of which must call it; no gradient."""
        layout, local = self.tp_layout, self._local_tensor.detach()
        assert layout.dim is not None
        if self.shard_mesh is not None:
            local = dtensor(local, self.shard_mesh, [Shard(0)], layout.local_shape()).full_tensor()
        mesh = layout.group.mesh(local.device.type)
        gathered = dtensor(local, mesh, layout.placements, self.part.shape).full_tensor()
        return in_order(gathered, layout.dim, layout.group.size, self.part.packed)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **_: Any
    ) -> DTensor:
        """An ordinary DTensor of the whole; no gradient."""
        mesh = device_mesh or self.device_mesh
        whole = DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=placements)

    def _pieces(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """(where it begins in the whole, this rank's memory of it) of every part."""
        dim, local, rows = self.tp_layout.dim, self._local_tensor.detach(), 0
        assert dim is not None
        if self.shard_mesh is not None:
            shape = torch.Size(self.tp_layout.local_shape())
            rows = compute_local_shape_and_global_offset(shape, self.shard_mesh, [Shard(0)])[1][0]
        held = rows if dim == 0 else 0  # which of the tensor-parallel rank's features begin here
        offsets = [0] * local.dim()
        offsets[0] = rows
        at = 0
        for start, stop in self.tp_layout.ranges(self.part):
            low, high = max(at, held), min(at + stop - start, held + local.shape[dim])
            if low < high:
                offsets[dim] = start + low - at
                yield torch.Size(offsets), local.narrow(dim, low - held, high - low)
            at += stop - start

    # -- as torch.distributed.checkpoint asks

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.size(),
                ),
            )
            for offsets, piece in self._pieces()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=at, sizes=piece.size()) for at, piece in self._pieces()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, piece in self._pieces():
            if offsets == index.offset:
                return piece
        raise ValueError(f"This rank holds nothing of {index.fqn} that begins at {index.offset}.")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SAME_ROWS:
            return args[0].like(func(args[0]._local_tensor, *args[1:], **kwargs))
        if func._schema.is_mutable and isinstance(args[0], PackedDTensor):
            raise ValueError(
                f"{func} would write into {args[0].part.key} of a state dict, of which a rank holds the "
                f"shards of parts {list(args[0].part.packed)}; use load_state_dict(), or the parameter."
            )
        args, kwargs = tree_map_only(PackedDTensor, PackedDTensor.full_tensor, (args, kwargs))
        return func(*args, **kwargs)


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
