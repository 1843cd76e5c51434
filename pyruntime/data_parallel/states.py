"""Shards as DTensors, for state dicts and checkpoints that load at any other stage and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from pyruntime.data_parallel.axes import Axes
from pyruntime.data_parallel.units import Part
from pyruntime.data_parallel.weights import UnitWeights
from pyruntime.nn.parameters import dtensor


def weights_state(weights: Sequence[UnitWeights], axes: Axes) -> dict[str, Tensor]:
    """This rank's rows of all weights, by their names in a state dict."""
    return {
        part.key: as_dtensor(rows, each.unit.parameters[part.owner], part, axes)
        for each in weights
        for part, rows in zip(each.unit.parts, each.local_views(), strict=True)
    }


def as_dtensor(rows: Tensor, parameter: Tensor, part: Part, axes: Axes) -> Tensor:
    """This rank's rows of a part as what they are of the whole tensor."""
    cut_by_tp = getattr(parameter, "tp_dim", None)
    layout = getattr(parameter, "tp_layout", None)
    if layout is not None and layout.group.size > 1:
        whole = next(each.shape for each in layout.parts if f".{part.key}".endswith(f".{each.key}"))
        tp_mesh = layout.group.mesh(parameter.device.type)
        tp = Replicate() if cut_by_tp is None else Shard(cut_by_tp)
        if axes.shard.size == 1:
            return dtensor(rows, tp_mesh, [tp], whole)
        return dtensor(rows, _tp_and_shard(tp_mesh, axes.shard.mesh), [tp, Shard(0)], whole)
    shape = (part.rows, *parameter.shape[1:]) if parameter.dim() else ()
    if axes.shard.size == 1:
        mesh = axes.replicate.mesh
        return dtensor(rows.view(shape), mesh, [Replicate()], shape) if mesh is not None else rows.view(shape)
    return dtensor(rows, axes.shard.mesh, [Shard(0)], shape or (1,))


_meshes: dict[tuple[DeviceMesh, DeviceMesh], DeviceMesh] = {}


def _tp_and_shard(tp: DeviceMesh, shard: DeviceMesh) -> DeviceMesh:
    """The mesh (tp, shard) that holds this rank: rows are cut over tp first. Collective when first asked
    for."""
    if (tp, shard) not in _meshes:
        root = shard._get_root_mesh()
        names = list(root.mesh_dim_names)
        last = [tp.mesh_dim_names[0], shard.mesh_dim_names[0]]
        order = [names.index(name) for name in names if name not in last] + [
            names.index(name) for name in last
        ]
        turned = DeviceMesh(
            root.device_type, root.mesh.permute(order), mesh_dim_names=tuple(names[index] for index in order)
        )
        _meshes[tp, shard] = turned[tuple(last)]
    return _meshes[tp, shard]
