"""How parameters are cut over a tensor-parallel group.

Inside a module a parameter is a plain local tensor, so a forward pass pays nothing for being distributed. A
`Layout` (layout.py) describes which part of the full tensor a rank holds. The module keeps it, and the
parameter has

    p.tp_layout       the Layout
    p.tp_dim          the dimension that is cut, or None where every rank holds the whole tensor
    p.tp_group_name   the name of the group over which it is cut

A group may have a second axis, y, over which another dimension, `Layout.dim_y`, is cut
(docs/explanation/primitives.md).

Only state dicts hold DTensors, those of the model and of torch's optimizers (optimizer_states.py).
**Parameters are cut as DTensor's `Shard` cuts (`torch.chunk`: every rank ceil(n / P), the last ones less)**,
because `full_tensor()` and `torch.distributed.checkpoint` support no other cut of a DTensor. Parts with
`shares` are cut into the sizes that these say, for ranks of unequal speed. Rows of activations are always
cut as `torch.tensor_split` cuts. It agrees with `Shard` where P divides n, and the largest shard is
ceil(n / P) in both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from pyruntime import comm
from pyruntime.comm import Axis, Group
from pyruntime.comm.runtime import AXES


class TensorGroup:
    """The ranks that share a layer: name, rank and size, looked up once when a layer is built.

    `mesh(device_type)` is the DeviceMesh of the DTensors in state dicts: the caller's, or one made from the
    process group when it is first needed. Copies of a model share the group. A pickle carries only its name,
    and only the same rank can load it.

    `y` is the group of the second axis, if any, of a mesh of two dimensions (x, y). Name, rank and size are
    then those of x, and `mesh` has both dimensions.

    `copies` is the mesh of the ranks that hold the same shards, for experts over a group of their own
    (`pyruntime.comm.Axis.copies`). None: these are the replicas of the model."""

    __slots__ = ("_meshes", "copies", "name", "rank", "size", "y")

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        mesh: DeviceMesh | None = None,
        y: TensorGroup | None = None,
        copies: DeviceMesh | None = None,
    ):
        self.name, self.rank, self.size, self.y, self.copies = name, rank, size, y, copies
        self._meshes = {} if mesh is None else {mesh.device_type: mesh}

    @classmethod
    def of(cls, group: Group | TensorGroup | None) -> TensorGroup:
        """Makes a TensorGroup from anything that names a group. None: only this rank, without
        torch.distributed. A mesh of two dimensions is (x, y).

        Raises ValueError where a dimension of the mesh is named after an axis that is not tensor-parallel."""
        if isinstance(group, TensorGroup):
            return group
        copies = group.copies if isinstance(group, Axis) else None
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
        name, rank, size = comm.group_name(group), comm.group_rank(group), comm.group_size(group)
        return cls(name, rank, size, mesh, copies=copies)

    @property
    def axes(self) -> tuple[TensorGroup, ...]:
        """This group, and y where there is one."""
        return (self,) if self.y is None else (self, self.y)

    @property
    def ranks(self) -> int:
        """The number of ranks of all axes together."""
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
                    f"The mesh (x, y) is on {', '.join(self._meshes)}, but the tensors are on {device_type}; "
                    "make the mesh for that device."
                )
            self._meshes[device_type] = DeviceMesh.from_group(self.process_group, device_type)
        return self._meshes[device_type]

    def __deepcopy__(self, memo: dict) -> TensorGroup:
        return self

    def __reduce__(self):
        if self.y is not None or self.copies is not None:
            what = "A model over two axes" if self.copies is None else "A model with experts over runtime.ep"
            raise ValueError(f"{what} cannot be pickled; save state_dict() by torch.distributed.checkpoint.")
        return _unpickled, (self.name, self.rank, self.size)

    def __repr__(self) -> str:
        second = "" if self.y is None else f"; y {self.y}"
        return f"{self.name!r}, rank {self.rank} of {self.size}{second}"


def axis_names(groups: Iterable[TensorGroup]) -> list[str]:
    """Returns the names of the axes of these groups that have several ranks, each once."""
    axes = (axis for group in groups for axis in group.axes)
    return list(dict.fromkeys(axis.name for axis in axes if axis.size > 1))


def _unpickled(name: str, rank: int, size: int) -> TensorGroup:
    """Raises ValueError unless this process is that rank of the group: the pickle holds its shards."""
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
    """Returns [start, stop) that rank `rank` of `world_size` holds of a dimension of `size`, cut as DTensor's
    Shard cuts it. Raises ValueError, naming `what`, where a rank would hold nothing."""
    chunk = -(-size // world_size)
    if chunk * (world_size - 1) >= size:
        holders = -(-size // chunk) if chunk else 0
        raise ValueError(
            f"tp={world_size} cuts {what}, which is {size}, into chunks of {chunk}, and only {holders} of "
            f"{world_size} ranks get one; use a smaller tp or a larger size."
        )
    return rank * chunk, min(size, (rank + 1) * chunk)


def ranges_of(
    sizes: Sequence[int], world_size: int, rank: int, what: str = "features", shares: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Returns [start, stop), counted in the full dimension, that rank `rank` holds of each of its parts. A
    single part is cut by its `shares`, or without any by `shard_bounds`.

    Raises ValueError, naming `what`, where `world_size` does not divide one of several parts, or `shares` do
    not give every rank something and together the whole."""
    if shares:
        if len(sizes) > 1 or len(shares) != world_size or min(shares) < 1 or sum(shares) != sum(sizes):
            raise ValueError(
                f"The shares {list(shares)} do not cut {what}, which is {' + '.join(map(str, sizes))}, over "
                f"{world_size} ranks; give one tensor a number of at least 1 for each rank, with its size as "
                "their sum."
            )
        start = sum(shares[:rank])
        return [(start, start + shares[rank])]
    if len(sizes) == 1:
        return [shard_bounds(sizes[0], world_size, rank, what)]
    found, begin = [], 0
    for size in sizes:
        if size % world_size:
            raise ValueError(
                f"tp={world_size} does not divide {size}, a part of {what}, whose parts are {list(sizes)}; "
                "use a tp that divides each, or cut it as one."
            )
        share = size // world_size
        found.append((begin + rank * share, begin + (rank + 1) * share))
        begin += size
    return found


def own_of(whole: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Joins these ranges of a whole tensor along `dim`. The result of a single range is a view."""
    own = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(own, dim) if len(own) > 1 else own[0]


def padding_of(size: int, world_size: int, held: int, shares: Sequence[int] = ()) -> int:
    """Returns by how much a shard that holds `held` of `size` elements is shorter than the largest."""
    return (max(shares) if shares else -(-size // world_size)) - held


def in_order(
    gathered: Tensor, dim: int, world_size: int, sizes: Sequence[int], shares: Sequence[int] = ()
) -> Tensor:
    """Returns the full tensor, part after part. `gathered` holds the shards [part0_r | part1_r | ..] of all
    ranks, one rank after the other along `dim`, each padded at its end to the size of the largest."""
    dim %= gathered.dim()
    if shares:
        of_ranks = gathered.unflatten(dim, (world_size, -1)).unbind(dim)
        return torch.cat([each.narrow(dim, 0, n) for each, n in zip(of_ranks, shares, strict=True)], dim)
    if len(sizes) == 1:
        return gathered.narrow(dim, 0, sizes[0])  # only the last ranks hold less
    of_parts = gathered.unflatten(dim, (world_size, -1)).split([n // world_size for n in sizes], dim + 1)
    return torch.cat([part.flatten(dim, dim + 1) for part in of_parts], dim)


@dataclass(frozen=True)
class Part:
    """One full tensor of a state dict: its key inside the module, and its full shape.

    packed: sizes of the parts (q, k and v in one linear) that follow each other along the dimension that is
    cut, where each part is cut by itself; () where the tensor is cut as one. shares: what each rank holds of
    the dimension that is cut over the group's first axis; () where `Shard` says it."""

    key: str
    shape: tuple[int, ...]
    packed: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    @property
    def is_in_blocks(self) -> bool:
        """Whether no placement of torch describes what a rank holds."""
        return bool(self.packed or self.shares)


@dataclass(frozen=True)
class Cut:
    """Describes which shards of one or several full tensors a rank's local parameter holds.

    With several parts (q, k, v in one weight), each is cut along `dim` by itself. The local parameter is the
    concatenation along `dim` of this rank's shards: [part0_r | part1_r | ...]. dim=None: every rank of the
    group holds it whole, parts one after the other along dimension 0. dim_y: another dimension, which is cut
    over the group's second axis; None: all ranks of that axis hold the same."""

    group: TensorGroup
    dim: int | None
    parts: tuple[Part, ...]
    dim_y: int | None = None

    @property
    def cuts(self) -> list[tuple[TensorGroup, int | None]]:
        """Each axis, and the dimension that is cut over it (None: not cut)."""
        return list(zip(self.group.axes, (self.dim, self.dim_y), strict=False))

    @property
    def cut_over(self) -> tuple[str, ...]:
        """Names of the groups of several ranks over which the parameter is cut."""
        return tuple(axis.name for axis, dim in self.cuts if dim is not None and axis.size > 1)

    @property
    def is_first(self) -> bool:
        """Whether no rank before this one holds the same shard."""
        return all(axis.rank == 0 for axis, dim in self.cuts if dim is None)

    @property
    def placements(self) -> list[Placement]:
        """The placements of its DTensors over the axes of the group."""
        return [Replicate() if dim is None else Shard(dim) for _, dim in self.cuts]

    def cuts_of(self, part: Part) -> list[tuple[TensorGroup, int, tuple[int, ...], tuple[int, ...]]]:
        """Returns (axis, dimension, sizes, shares) for each axis over which `part` is cut. Each of the sizes
        along the dimension is cut by itself."""
        packed = {self.dim: part.packed} if part.packed else {}
        return [
            (axis, dim, packed.get(dim, (part.shape[dim],)), part.shares if dim == self.dim else ())
            for axis, dim in self.cuts
            if dim is not None
        ]

    def ranges(self, part: Part) -> dict[int, list[tuple[int, int]]]:
        """Returns {dimension of `part` that is cut: ranges [start, stop) that this rank holds}: one range, or
        one for each packed part."""
        return {
            dim: ranges_of(
                sizes,
                axis.size,
                axis.rank,
                part.key if len(sizes) > 1 else f"dimension {dim} of {part.key}",
                shares,
            )
            for axis, dim, sizes, shares in self.cuts_of(part)
        }

    def largest(self, part: Part) -> int:
        """Returns the most that a rank of the first axis holds of the dimension that is cut over it."""
        assert self.dim is not None
        return padding_of(part.shape[self.dim], self.group.size, 0, part.shares)

    def local_shape_of(self, part: Part) -> tuple[int, ...]:
        shape = list(part.shape)
        for dim, ranges in self.ranges(part).items():
            shape[dim] = sum(stop - start for start, stop in ranges)
        return tuple(shape)

    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local parameter: all parts together."""
        shapes = [self.local_shape_of(part) for part in self.parts]
        if len(shapes) == 1:
            return shapes[0]
        dim = self.dim or 0
        return (*shapes[0][:dim], sum(s[dim] for s in shapes), *shapes[0][dim + 1 :])

    def split(self, local: Tensor) -> list[Tensor]:
        """Splits a tensor of the local shape into views, one for each part."""
        if len(self.parts) == 1:
            return [local]
        dim = self.dim or 0
        return list(local.split([self.local_shape_of(part)[dim] for part in self.parts], dim))
