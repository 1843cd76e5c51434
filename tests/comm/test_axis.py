"""The axes of a Runtime answer alike, be they there or not, and pass wherever a group or a mesh does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import pyruntime
from pyruntime.comm import Axis, Runtime, process_group
from pyruntime.nn import ColumnParallelLinear

NAMES = ("tp", "tp_y", "dp", "cp", "pp", "replicas")
ROOT = Path(__file__).resolve().parents[2]


def answers(_group, names: tuple[str, ...], sizes: tuple[int, ...]):
    runtime = Runtime(init_device_mesh("cpu", sizes, mesh_dim_names=names))
    axes = {name: getattr(runtime, name) for name in NAMES}
    members = {
        name: dist.get_process_group_ranks(axis.group)
        for name, axis in axes.items()
        if axis.mesh is not None and axis.mesh.ndim == 1
    }
    refused = {}
    for name in set(axes) - set(members):
        with pytest.raises(ValueError) as error:
            process_group(axes[name])
        refused[name] = str(error.value)
    found = {name: (axis.rank, axis.size) for name, axis in axes.items()}
    return found, members, refused, runtime.coordinate._asdict()


@pytest.mark.parametrize(
    ("names", "sizes"),
    [(("dp", "tp"), (2, 2)), (("pp", "dp", "tp"), (2, 2, 1)), (("dp", "cp", "tp"), (2, 2, 1))],
)
def test_every_axis_answers_alike(ranks, names, sizes):
    expected = dict(zip(names, sizes, strict=True))
    for rank, (found, members, refused, coordinate) in enumerate(ranks.run(answers, 4, names, sizes)):
        for name in ("tp", "dp", "cp", "pp"):
            assert found[name] == (coordinate[name], expected.get(name, 1))
        assert found["tp_y"] == (0, 1) and refused["tp_y"].startswith("The mesh has no axis tp_y")
        assert found["replicas"][1] == expected.get("dp", 1) * expected.get("cp", 1)
        for name, others in members.items():
            assert others[found[name][0]] == rank and len(others) == found[name][1]


def two_levels(_group):
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    axis = Runtime(mesh).dp
    with pytest.raises(ValueError, match=r"each with a process group of its own; pass one of them, as in "):
        process_group(axis)
    return axis.rank, axis.size


def test_an_axis_of_two_dimensions_counts_both(ranks):
    assert ranks.run(two_levels, 4) == [(rank, 4) for rank in range(4)]


def doors(group):
    runtime = Runtime(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    torch.manual_seed(0)
    column = ColumnParallelLinear(4, 6, group=runtime.tp)
    model = pyruntime.parallelize(nn.Sequential(nn.Linear(4, 4)), runtime.tp, {"0": "column"})
    handles = [pyruntime.shard(model, axis, stage=0) for axis in (runtime.pp,)]
    handles[0].close()
    pyruntime.shard(nn.Linear(2, 2), runtime.tp, stage=1).close()
    outer = pyruntime.OuterOptimizer(nn.Linear(2, 2), runtime.cp, pyruntime.replicas.co2(tau=2))
    whole = DTensor.from_local(torch.ones(1, 2), runtime.tp.mesh, [Shard(0)]).full_tensor()
    total = pyruntime.all_reduce(torch.ones(2), runtime.tp)
    return column.weight.shape, outer is not None, whole.shape, total.tolist(), Axis("cp", None) == runtime.cp


def test_an_axis_passes_wherever_a_group_or_a_mesh_does(ranks):
    for found in ranks.run(doors, 4):
        assert found == ((3, 4), True, (2, 2), [2.0, 2.0], True)


def test_nobody_asks_whether_an_axis_is_none():
    """It never is: what an axis that is not there lacks is its mesh."""
    asks = re.compile(r"\bruntime\.(tp|tp_y|dp|cp|pp|replicas) is (not )?None")
    for folder in ("pyruntime", "bench", "tests", "examples", "tools", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                assert not asks.search(path.read_text()), path
