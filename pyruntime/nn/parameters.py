"""How a parameter is cut over a tensor-parallel group.

Inside a module a parameter is a plain local tensor, so that a forward pays nothing for being distributed.
What a rank holds of the full tensor is written in a `Layout` (layout.py), kept by the module and hung on the
parameter itself:

    p.tp_layout       the Layout
    p.tp_dim          the dimension that is cut, or None where every rank holds the whole tensor
    p.tp_group_name   the name of the group it is cut over

A group may have a second axis, y, over which another dimension is cut (docs/explanation/primitives.md):
`Layout.dim_y` says which.

Only state dicts speak DTensor, the model's and those of torch's optimizers (optimizer_states.py).
**Parameters are cut as DTensor's `Shard` cuts (`torch.chunk`: every rank ceil(n / P), the last ones less)**,
because `full_tensor()` and `torch.distributed.checkpoint` know no other cut. Rows of activations are cut as
`torch.tensor_split` cuts. The two agree wherever P divides n, and the largest shard is ceil(n / P) in
both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from pyruntime import comm
from pyruntime.comm import Axis, Group
from pyruntime.comm.runtime import AXES
from pyruntime.nn.packed import ranges_of


class TensorGroup:
    """The ranks that share a layer: name, rank and size, looked up once when a layer is built.

    `mesh(device_type)` is the DeviceMesh that state dicts are stated in: the one the caller gave, else one
    made from the process group when it is first needed. Copying a model shares the group; a pickle carries
    only its name, and is refused by any other rank.

    `y` is the group of a second axis, where there is one: made of a mesh of two dimensions (x, y), and then
    name, rank and size are those of x, and `mesh` has both."""

    __slots__ = ("_meshes", "name", "rank", "size", "y")

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        mesh: DeviceMesh | None = None,
        y: TensorGroup | None = None,
    ):
        self.name, self.rank, self.size, self.y = name, rank, size, y
        self._meshes = {} if mesh is None else {mesh.device_type: mesh}

    @classmethod
    def of(cls, group: Group | TensorGroup | None) -> TensorGroup:
        """The TensorGroup of any way to name a group; None stands for this rank alone, without
        torch.distributed. A mesh of two dimensions is (x, y).

        Raises ValueError where one of the two has the name of another axis than a tensor-parallel one."""
        if isinstance(group, TensorGroup):
            return group
        if isinstance(group, Axis):
            group = group.mesh
        if group is None:
            return cls("", 0, 1)
        mesh = group if isinstance(group, DeviceMesh) else None
        if mesh is not None and mesh.ndim == 2:
            names = mesh.mesh_dim_names or ()
            if others := [name for axis in AXES[:-1] for name in axis if name in names]:
                raise ValueError(
                    f"The mesh has axes {names}, and tensor parallelism cuts nothing over {others[0]}; pass "
                    'the axis to cut over, as in mesh["tp"].'
                )
            x, y = (cls.of(mesh.get_group(axis)) for axis in (0, 1))
            if y.size > 1:
                return cls(x.name, x.rank, x.size, mesh, y)
            return cls(x.name, x.rank, x.size, mesh[names[0]] if names else None)
        return cls(comm.group_name(group), comm.group_rank(group), comm.group_size(group), mesh)

    @property
    def axes(self) -> tuple[TensorGroup, ...]:
        """This group, and y where there is one."""
        return (self,) if self.y is None else (self, self.y)

    @property
    def ranks(self) -> int:
        """Of all axes together."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of every axis."""
        return all(axis.rank == 0 for axis in self.axes)

    @property
    def process_group(self) -> ProcessGroup:
        return comm.process_group(self.name)

    def mesh(self, device_type: str) -> DeviceMesh:
        if device_type not in self._meshes:
            if self.y is not None:
                raise ValueError(
                    f"Tensors on {device_type} were asked for of a mesh (x, y) on {', '.join(self._meshes)}; "
                    "make the mesh for that device."
                )
            self._meshes[device_type] = DeviceMesh.from_group(self.process_group, device_type)
        return self._meshes[device_type]

    def __deepcopy__(self, memo: dict) -> TensorGroup:
        return self

    def __reduce__(self):
        if self.y is not None:
            raise ValueError(
                "A model over two axes is not pickled; save state_dict() by torch.distributed.checkpoint."
            )
        return _unpickled, (self.name, self.rank, self.size)

    def __repr__(self) -> str:
        second = "" if self.y is None else f"; y {self.y}"
        return f"{self.name!r}, rank {self.rank} of {self.size}{second}"


def _unpickled(name: str, rank: int, size: int) -> TensorGroup:
    """Raises ValueError where this process is not that rank of the group: what was pickled beside the group
    are that rank's shards."""
    if not name:
        return TensorGroup("", rank, size)
    try:
        group = comm.process_group(name)
    except (RuntimeError, ValueError):
        here = "not in it"
    else:
        if (group.rank(), group.size()) == (rank, size):
            return TensorGroup(name, rank, size)
        here = f"rank {group.rank()} of {group.size()} there"
    raise ValueError(
        f"This pickle has the shards of rank {rank} of {size} in group {name!r}, and this process is {here}; "
        "save state_dict() by torch.distributed.checkpoint, or save_pretrained(), which any ranks can load."
    )


def shard_bounds(size: int, world_size: int, rank: int, what: str = "a dimension") -> tuple[int, int]:
    """Rank `rank` of `world_size` holds [start, stop) of a dimension of `size`, cut as DTensor's Shard cuts
    it.

    Raises ValueError, naming `what`, where a rank would hold nothing.
    """
    chunk = -(-size // world_size)
    if chunk * (world_size - 1) >= size:
        holders = -(-size // chunk) if chunk else 0
        raise ValueError(
            f"tp={world_size} cuts {what}, which is {size}, into chunks of {chunk}, and only {holders} of "
            f"{world_size} ranks get one; use a smaller tp or a larger size."
        )
    return rank * chunk, min(size, (rank + 1) * chunk)


@dataclass(frozen=True)
class Part:
    """One full tensor of a state dict: its key inside the module, and its full shape.

    packed: sizes of what it holds one after the other along the dimension that is cut (q, k and v in one
    linear), each of which is cut by itself; () where it is cut as one."""

    key: str
    shape: tuple[int, ...]
    packed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cut:
    """What one rank's local parameter holds of one or several full tensors.

    With several parts (q, k, v in one weight) each is cut along `dim` by itself, and the local parameter is
    the concatenation along `dim` of this rank's shard of each: [part0_r | part1_r | ...]. dim=None: every
    rank of the group holds it whole. dim_y: the dimension, another one, that is cut over the group's second
    axis; None: every rank of that holds the same."""

    group: TensorGroup
    dim: int | None
    parts: tuple[Part, ...]
    dim_y: int | None = None

    @property
    def cuts(self) -> list[tuple[TensorGroup, int | None]]:
        """Each axis, and the dimension that is cut over it."""
        return list(zip(self.group.axes, (self.dim, self.dim_y), strict=False))

    @property
    def cut_over(self) -> tuple[str, ...]:
        """Names of the groups over whose several ranks it is cut."""
        return tuple(axis.name for axis, dim in self.cuts if dim is not None and axis.size > 1)

    @property
    def is_first(self) -> bool:
        """Whether no rank before this one holds the same shard."""
        return all(axis.rank == 0 for axis, dim in self.cuts if dim is None)

    @property
    def placements(self) -> list[Placement]:
        """Of the DTensors, over the axes of the group."""
        return [Replicate() if dim is None else Shard(dim) for _, dim in self.cuts]

    def bounds(self, part: Part) -> tuple[int, int]:
        """[start, stop) of `part` along `dim` that this rank holds."""
        assert self.dim is not None
        return self._bounds(part, self.group, self.dim)

    def places(self, part: Part) -> list[tuple[int, int, int]]:
        """[start, stop) that this rank holds of each dimension of `part` that is cut as one, as (dimension,
        start, stop); what is packed along one has `ranges`."""
        packed = self.dim if part.packed else None
        return [
            (dim, *self._bounds(part, axis, dim))
            for axis, dim in self.cuts
            if dim is not None and dim != packed
        ]

    def _bounds(self, part: Part, axis: TensorGroup, dim: int) -> tuple[int, int]:
        return shard_bounds(part.shape[dim], axis.size, axis.rank, f"dimension {dim} of {part.key}")

    def ranges(self, part: Part) -> list[tuple[int, int]]:
        """What of `part` along `dim` this rank holds, one after the other: one range, or one of each that is
        packed in it."""
        if not part.packed:
            return [self.bounds(part)]
        return ranges_of(part.packed, self.group.size, self.group.rank, part.key)

    def local_shape_of(self, part: Part) -> tuple[int, ...]:
        shape = list(part.shape)
        for dim, start, stop in self.places(part):
            shape[dim] = stop - start
        if part.packed and self.dim is not None:
            shape[self.dim] = sum(stop - start for start, stop in self.ranges(part))
        return tuple(shape)

    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local parameter: all parts together."""
        shapes = [self.local_shape_of(part) for part in self.parts]
        if self.dim is None:
            return shapes[0]
        return (*shapes[0][: self.dim], sum(s[self.dim] for s in shapes), *shapes[0][self.dim + 1 :])

    def split(self, local: Tensor) -> list[Tensor]:
        """The parts of a tensor of the local shape, as views."""
        if self.dim is None or len(self.parts) == 1:
            return [local]
        return list(local.split([self.local_shape_of(part)[self.dim] for part in self.parts], self.dim))
