"""Shards as DTensors, for state dicts and checkpoints that load at any other stage and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from pyruntime.data_parallel.axes import Axes
from pyruntime.data_parallel.bucket_weights import BucketWeights
from pyruntime.data_parallel.buckets import BucketPart
from pyruntime.nn.layout import BlocksDTensor, Layout, dtensor
from pyruntime.nn.parameters import Part, TensorGroup


def weights_state(weights: Sequence[BucketWeights]) -> dict[str, Tensor]:
    """Returns this rank's rows of all weights as DTensors, by their names in a state dict."""
    return {
        part.key: as_dtensor(rows, each.bucket.parameters[part.owner], part, each.bucket.axes)
        for each in weights
        for part, rows in zip(each.bucket.parts, each.rows, strict=True)
    }


def part_of(layout: Layout, key: str) -> Part:
    """Returns the part of a parameter's layout that has this name in the model's state dict."""
    return next(each for each in layout.parts if f".{key}".endswith(f".{each.key}"))


def as_dtensor(rows: Tensor, parameter: Tensor, part: BucketPart, axes: Axes) -> Tensor:
    """Returns this rank's rows of a part as a DTensor of the whole, or as a plain tensor without a mesh."""
    layout = getattr(parameter, "tp_layout", None)
    if layout is not None and (layout.group.ranks > 1 or (axes.size == 1 and layout.group.name)):
        whole = part_of(layout, part.key)
        if axes.shard.size == 1:
            return layout.to_dtensor(whole, rows.view(part.shape))
        mesh = _tp_and_shard(layout.group.mesh(parameter.device.type), axes.shard.mesh)
    else:
        if axes.shard.size == 1:
            mesh, rows = axes.replicate.mesh, rows.view(part.shape)
            return rows if mesh is None else dtensor(rows, mesh, [Replicate()], part.shape)
        whole, mesh = Part(part.key, part.shape or (1,)), axes.shard.mesh
        layout = Layout(TensorGroup.of(None), None, (whole,))
    placements = [*(layout.placements if layout.group.name else ()), Shard(0)]
    if whole.is_in_blocks or len(whole.shape) == 3:
        return BlocksDTensor.of(rows, layout, whole, mesh, placements, axes.shard.mesh)
    return dtensor(rows, mesh, placements, whole.shape)


def _tp_and_shard(tp: DeviceMesh, shard: DeviceMesh) -> DeviceMesh:
    """Returns the mesh (tp, shard) that holds this rank; tp has one dimension or two. Rows are cut over tp
    first. It uses existing groups, so no rank waits for another."""
    known = vars(shard).setdefault("_pyruntime_with_tp", {})  # a save needs it for every tensor
    last = (*tp.mesh_dim_names, shard.mesh_dim_names[0])
    if last not in known:
        root = shard._get_root_mesh()
        names = (*(name for name in root.mesh_dim_names if name not in last), *last)
        turned = root.mesh.permute([root.mesh_dim_names.index(name) for name in names])
        parts = turned.reshape(-1, *turned.shape[-len(last) :])
        own = next(part for part in parts if root.get_rank() in part)
        groups = [root.get_group(name) for name in last]
        known[last] = DeviceMesh.from_group(groups, root.device_type, mesh=own, mesh_dim_names=last)
    return known[last]
