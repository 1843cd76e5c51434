"""Converts between a rank's shards and the tensors of state dicts. Shards become DTensors; those of packed
linears, shards of unequal sizes, and rows of stacks of experts, become a subclass, because torch has no
placement for them."""

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
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from pyruntime.nn.parameters import Cut, Part, in_order, own_of, padding_of
from pyruntime.nn.rows import blocks_of, row_count, shape_of_rows

aten = torch.ops.aten
_SAME_ROWS = {
    *(aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default),
}
"""Operators whose result is cut as their input is."""


def dtensor(
    shard: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Makes a DTensor of `shape` over the storage of this rank's `shard`; no communication. The shard may lie
    on the host, whatever the mesh's devices."""
    size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
    if shard.device.type not in (mesh.device_type, "meta"):  # from_local would copy it to the mesh's device
        meta = TensorMeta(size, stride, shard.dtype)
        return DTensor(shard, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=size, stride=stride)


class BlocksDTensor(DTensor):
    """A tensor of which this rank holds blocks that no placement of torch describes:

        [part0_r | part1_r | ..]     of a packed linear's [.., sum of n_i, ..]
        n_r of [.., n, ..]           where the part's `shares` say how many elements each rank holds
        rows of a stack [E, m, n]    that begin or end within a matrix; the local tensor is [rows, n]

    Its own placement says "Shard", but nothing relies on it: a checkpoint (torch.distributed.checkpoint)
    writes and reads each block at its place in the full tensor, without communication; `full_tensor()` and
    `redistribute()` put the blocks in order; `copy_()` into it takes them; any other operator runs on the
    full tensor, so every rank must call it, and may not write. With `shard_mesh` the rank holds only its rows
    of the tensor-parallel shard, which ZeRO cuts over that mesh (rows.py)."""

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
    ) -> BlocksDTensor:
        """mesh, placements: as for a tensor that is cut as one."""
        spec = dtensor(local.detach(), mesh, placements, part.shape)._spec
        made = cls(local, spec, requires_grad=local.requires_grad)
        made.tp_layout, made.part, made.shard_mesh = layout, part, shard_mesh
        return made

    def like(self, local: Tensor) -> BlocksDTensor:
        """Wraps the shard of another tensor that is cut in the same way."""
        return BlocksDTensor.of(
            local, self.tp_layout, self.part, self.device_mesh, self.placements, self.shard_mesh
        )

    def is_cut_like(self, other: BlocksDTensor) -> bool:
        """Whether this rank holds the same blocks of both."""
        mine, theirs = self.tp_layout, other.tp_layout
        return (self.part, mine.dim, mine.group.name, self.shard_mesh) == (
            other.part,
            theirs.dim,
            theirs.group.name,
            other.shard_mesh,
        )

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Gathers the full tensor on every rank. All ranks must call it; no gradient."""
        layout, local = self.tp_layout, self._local_tensor.detach()
        if self.shard_mesh is not None:
            shape = layout.local_shape_of(self.part)
            every = shape_of_rows(shape, row_count(shape))
            local = dtensor(local, self.shard_mesh, [Shard(0)], every).full_tensor().view(shape)
        if not layout.cut_over:
            return local
        mesh, part, size = layout.group.mesh(local.device.type), self.part, layout.group.size
        if not part.is_in_blocks:
            return dtensor(local, mesh, layout.placements, part.shape).full_tensor()
        dim, padded = layout.dim, list(part.shape)
        assert dim is not None  # only what is cut is in blocks, over one axis
        missing = padding_of(padded[dim], size, local.shape[dim], part.shares)
        local = pad(local, [0, 0] * (local.dim() - 1 - dim) + [0, missing])
        padded[dim] = size * local.shape[dim]
        gathered = dtensor(local, mesh, layout.placements, padded).full_tensor()
        return in_order(gathered, dim, size, part.packed or (part.shape[dim],), part.shares)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **_: Any
    ) -> DTensor:
        """Returns an ordinary DTensor of the full tensor; no gradient."""
        mesh = device_mesh or self.device_mesh
        whole = DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=placements)

    def _blocks(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """Yields, for every block, (its offsets in the full tensor, this rank's memory of it)."""
        local, shape = self._local_tensor.detach(), self.tp_layout.local_shape_of(self.part)
        if self.shard_mesh is None:
            yield from self._of_shard([0] * len(shape), local)
            return
        count = row_count(shape)
        first = min(count, -(-count // self.shard_mesh.size()) * self.shard_mesh.get_local_rank())
        for block in blocks_of(shape, first, len(local)):
            memory = local[block.first : block.first + block.rows]
            yield from self._of_shard(block.offsets, memory.view(block.sizes))

    def _of_shard(self, offsets: Sequence[int], memory: Tensor) -> Iterator[tuple[torch.Size, Tensor]]:
        """Yields the blocks of the full tensor that a block of the tensor-parallel shard is."""
        found = [(list(offsets), memory)]
        for dim, ranges in self.tp_layout.ranges(self.part).items():
            found = [each for one in found for each in _in_full(*one, dim, ranges)]
        for at, each in found:
            yield torch.Size(at), each

    # -- the interface of torch.distributed.checkpoint

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
            for offsets, piece in self._blocks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=at, sizes=piece.size()) for at, piece in self._blocks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, piece in self._blocks():
            if offsets == index.offset:
                return piece
        raise ValueError(f"This rank holds nothing of {index.fqn} that begins at {index.offset}.")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SAME_ROWS:
            return args[0].like(func(args[0]._local_tensor, *args[1:], **kwargs))
        if func is aten.copy_.default and isinstance(args[0], BlocksDTensor):
            return _copy(*args[:2])
        if func._schema.is_mutable and isinstance(args[0], BlocksDTensor):
            raise ValueError(
                f"{func} would write into {args[0].part.key} of a state dict, of which this rank holds "
                "blocks; use copy_() of a full tensor, load_state_dict(), or write into the parameter."
            )
        args, kwargs = tree_map_only(BlocksDTensor, BlocksDTensor.full_tensor, (args, kwargs))
        return func(*args, **kwargs)


def _in_full(
    offsets: Sequence[int], memory: Tensor, dim: int, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[list[int], Tensor]]:
    """Yields what a block of a shard is in the full tensor, along `dim`, of which the shard has `ranges`."""
    held, at = offsets[dim], 0
    for start, stop in ranges:
        low, high = max(at, held), min(at + stop - start, held + memory.shape[dim])
        if low < high:
            moved = list(offsets)
            moved[dim] = start + low - at
            yield moved, memory.narrow(dim, low - held, high - low)
        at += stop - start


def _copy(target: BlocksDTensor, source: Tensor) -> BlocksDTensor:
    """Writes another tensor of the same shape; if it is not cut in the same way, every rank must call it."""
    if isinstance(source, BlocksDTensor) and target.is_cut_like(source):
        target._local_tensor.copy_(source._local_tensor)
        return target
    whole = source.full_tensor() if isinstance(source, DTensor) else source
    if whole.shape != target.shape:
        raise ValueError(
            f"{target.part.key} is {list(target.shape)}, and a tensor of {list(whole.shape)} was copied into "
            "it; copy one of the same shape."
        )
    for offsets, memory in target._blocks():
        memory.copy_(whole[tuple(slice(at, at + n) for at, n in zip(offsets, memory.shape, strict=True))])
    return target


@dataclass(frozen=True)
class Layout(Cut):
    """A `Cut` that converts tensors of state dicts into this rank's shards, and back."""

    def to_dtensors(self, local: Tensor) -> dict[str, Tensor]:
        """Returns a DTensor for each part, {key: DTensor}, over the storage of `local`. local: a plain tensor
        of the parameter's shape (its value, a gradient, a moment). No communication. Without a group the
        results are plain tensors."""
        shards = dict(zip(self.parts, self.split(local), strict=True))
        if not self.group.name:
            return {part.key: shard for part, shard in shards.items()}
        return {part.key: self.to_dtensor(part, shard) for part, shard in shards.items()}

    def to_dtensor(self, part: Part, shard: Tensor) -> DTensor:
        """Makes the DTensor of one part over the storage of this rank's shard."""
        mesh = self.group.mesh(shard.device.type)
        if part.is_in_blocks:
            return BlocksDTensor.of(shard, self, part, mesh, self.placements)
        return dtensor(shard, mesh, self.placements, part.shape)

    def local_part(self, part: Part, value: Tensor) -> Tensor:
        """Returns this rank's shard of `part`, taken from a DTensor (any placement, any mesh that holds this
        rank), a full tensor, or a plain tensor that is already the shard. Communicates for a DTensor that is
        placed differently. Raises ValueError for any other shape."""
        local_shape = self.local_shape_of(part)
        if isinstance(value, DTensor):
            if isinstance(value, BlocksDTensor) or part.is_in_blocks:
                return self._part_in_blocks(part, value)
            mesh = self.group.mesh(value.device_mesh.device_type) if self.group.name else None
            if tuple(value.shape) == part.shape and value.device_mesh == mesh:
                return value.redistribute(mesh, self.placements).to_local()
            value = value.full_tensor()
        if tuple(value.shape) == part.shape:
            for dim, ranges in self.ranges(part).items():
                value = own_of(value, dim, ranges)
            return value
        if tuple(value.shape) == local_shape:
            return value
        raise ValueError(
            f"{part.key} has full shape {list(part.shape)} and shard {list(local_shape)} on this "
            f"process, group {self.group}, but the tensor to load has shape {list(value.shape)}; "
            "pass a DTensor, the full tensor or this rank's shard."
        )

    def _part_in_blocks(self, part: Part, value: DTensor) -> Tensor:
        """Does the same for a DTensor, where it or the part is in blocks."""
        if isinstance(value, BlocksDTensor) and value.shard_mesh is None:
            theirs = value.tp_layout
            if (value.part, theirs.dim, theirs.group.name) == (part, self.dim, self.group.name):
                return value.to_local()
        return self.local_part(part, value.full_tensor())

    def gather_parts(self, source: Mapping[str, Tensor]) -> Tensor:
        """Builds the local tensor from `source[part.key]` of every part."""
        shards = [self.local_part(part, source[part.key]) for part in self.parts]
        return shards[0] if len(shards) == 1 else torch.cat(shards, dim=self.dim or 0)
