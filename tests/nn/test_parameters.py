"""State dicts of parallel modules: DTensors out, anything in, from any tp to any other."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pyruntime.nn import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    TensorGroup,
    VocabParallelEmbedding,
    explain,
    grad_norm,
    shard_bounds,
    vocab_parallel_cross_entropy,
)
from pyruntime.nn.cut import shard_of
from tests.nn.cases import assert_near

FULL = {
    "embed.weight": (15, 6),
    "norm.weight": (6,),
    "qkv.q.weight": (8, 6),
    "qkv.q.bias": (8,),
    "qkv.kv.weight": (7, 6),
    "qkv.kv.bias": (7,),
    "up.weight": (10, 6),
    "down.weight": (6, 10),
    "down.bias": (6,),
}


class Net(nn.Module):
    """One of each: cut along 0 (ragged), along 1, merged, replicated."""

    def __init__(self, group, device=None):
        super().__init__()
        options = {"group": group, "device": device}
        self.embed = VocabParallelEmbedding(15, 6, **options)
        self.norm = RMSNorm(6, **options)
        self.qkv = MergedColumnParallelLinear(6, {"q": 8, "kv": 7}, bias=True, **options)
        self.up = ColumnParallelLinear(6, 10, **options)
        self.down = RowParallelLinear(10, 6, bias=True, **options)


def full_state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in FULL.items()}


def holds(net: Net, full: dict[str, torch.Tensor]) -> bool:
    """Whether the state dict, made whole by DTensor itself, is `full`."""
    state = net.state_dict()
    whole = {key: value.full_tensor() for key, value in state.items()}
    return set(state) == set(FULL) and all(torch.equal(whole[key], full[key]) for key in FULL)


def loads_all_that_names_a_tensor(group) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for seed, place in enumerate(
        (
            lambda key, t: t,  # the full tensor
            lambda key, t: distribute_tensor(t, mesh, [Replicate()]),
            lambda key, t: distribute_tensor(t, mesh, [Shard(0)]),
            lambda key, t: distribute_tensor(t, mesh, [Shard(t.dim() - 1)]),
            lambda key, t: plain_shard(key, t, rank, size),
        )
    ):
        full = full_state(seed)
        net = Net(group)
        result = net.load_state_dict({key: place(key, value) for key, value in full.items()})
        assert not result.missing_keys and not result.unexpected_keys
        assert holds(net, full)


def plain_shard(key: str, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    if key in ("norm.weight", "down.bias"):
        return full
    dim = 1 if key == "down.weight" else 0
    start, stop = shard_bounds(full.shape[dim], size, rank)
    return full.narrow(dim, start, stop - start)


def state_is_a_view_of_the_parameters(group) -> None:
    net = Net(group)
    state = net.state_dict()
    assert state["up.weight"].to_local().data_ptr() == net.up.weight.data_ptr()
    assert state["qkv.q.weight"].to_local().data_ptr() == net.qkv.weight.data_ptr()
    assert not state["up.weight"].requires_grad
    assert [state[key].placements[0] for key in FULL] == [
        *(Shard(0), Replicate(), Shard(0), Shard(0), Shard(0), Shard(0), Shard(0), Shard(1), Replicate()),
    ]
    assert [tuple(state[key].shape) for key in FULL] == list(FULL.values())


def marks_survive(group) -> None:
    """...what makes new Parameter objects."""
    net = Net(group)
    on_meta = Net(group, device="meta")
    assert next(on_meta.parameters()).is_meta
    for other in (
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        copy.deepcopy(net).to(torch.bfloat16),
        on_meta.to_empty(device="cpu"),
    ):
        dims = {name: p.tp_dim for name, p in other.named_parameters()}
        assert dims == {
            **{"embed.weight": 0, "norm.weight": None, "qkv.weight": 0, "qkv.bias": 0, "up.weight": 0},
            **{"down.weight": 1, "down.bias": None},
        }
        assert all(p.tp_group_name == group.group_name for p in other.parameters())
        full = {key: value.to(other.norm.weight.dtype) for key, value in full_state().items()}
        other.load_state_dict(full)
        assert holds(other, full)


def assigning_fills_a_model_on_meta(group) -> None:
    net, full = Net(group, device="meta"), full_state()
    net.load_state_dict(full, assign=True)
    assert holds(net, full)
    assert net.up.weight.requires_grad and net.up.weight.tp_dim == 0
    assert net.up.weight.untyped_storage().nbytes() == net.up.weight.nbytes, "keeps the full tensor alive"


def save(group, folder: str) -> None:
    net = Net(group)
    net.load_state_dict(full_state(7))
    moments = {name: torch.full_like(p, dist.get_rank(group)) for name, p in net.named_parameters()}
    moments = net.qkv.weight.tp_layout.to_dtensors(shard_of(moments["qkv.weight"]))
    dcp.save({"model": net.state_dict(), "moments": moments}, checkpoint_id=folder, process_group=group)


def load(group, folder: str) -> torch.Tensor:
    net = Net(group)
    moments = net.qkv.weight.tp_layout.to_dtensors(shard_of(torch.zeros_like(net.qkv.weight)))
    state = {"model": net.state_dict(), "moments": moments}
    dcp.load(state, checkpoint_id=folder, process_group=group)  # in place: nothing is left to be loaded
    assert holds(net, full_state(7))
    return moments["q.weight"].full_tensor()[:, 0]


def bad_states(group) -> list[str]:
    net, messages = Net(group), []
    shapes = full_state()
    shapes["qkv.kv.weight"] = torch.zeros(9, 6)
    missing = full_state()
    del missing["qkv.kv.bias"]
    unexpected = {**full_state(), "up.scale": torch.ones(1)}
    for state in (shapes, missing, unexpected):
        with pytest.raises(RuntimeError) as caught:
            net.load_state_dict(state)
        messages.append(str(caught.value))
    return messages


def groups_by_any_name(group) -> None:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    for name in (group, mesh, group.group_name, TensorGroup.of(group)):
        layer = ColumnParallelLinear(4, 8, group=name)
        assert (layer.group.rank, layer.group.size) == (dist.get_rank(group), dist.get_world_size(group))
        assert torch.equal(layer.state_dict()["weight"].device_mesh.mesh, mesh.mesh)
    named = ColumnParallelLinear(4, 8, group=mesh).state_dict()["weight"]
    assert named.device_mesh is mesh  # the caller's own, so that other axes of its mesh stay known


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
class TestStateDict:
    @pytest.mark.parametrize(
        "check",
        [
            loads_all_that_names_a_tensor,
            state_is_a_view_of_the_parameters,
            marks_survive,
            assigning_fills_a_model_on_meta,
            groups_by_any_name,
        ],
        ids=lambda check: check.__name__,
    )
    @pytest.mark.second_tier("loads_all_that_names_a_tensor-3", "loads_all_that_names_a_tensor-4")
    def test_state_dict(self, ranks, world_size, check):
        ranks.run(check, world_size)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 4), (1, 3), (4, 2)])
def test_a_checkpoint_loads_at_any_tp(ranks, tmp_path, saved, loaded):
    ranks.run(save, saved, str(tmp_path))
    chunk = -(-8 // saved)
    for rows in ranks.run(load, loaded, str(tmp_path)):
        assert rows.tolist() == [row // chunk for row in range(8)]  # each row by the rank that saved it


def test_bad_states_are_sentences(ranks):
    shape, missing, unexpected = ranks.run(bad_states, 2)[0]
    assert "kv.weight has full shape [7, 6] and shard [4, 6] on this process" in shape
    assert "[9, 6]" in shape
    assert "qkv.kv.bias" in missing
    assert "up.scale" in unexpected


@pytest.mark.parametrize("size", [4, 5, 7, 50257])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shard_bounds_are_those_of_chunk(size, world_size):
    chunks = torch.arange(size).chunk(world_size)
    if len(chunks) < world_size:
        with pytest.raises(ValueError, match=f"only {len(chunks)} of {world_size} ranks get one"):
            shard_bounds(size, world_size, 0)
        return
    for rank, chunk in enumerate(chunks):
        assert shard_bounds(size, world_size, rank) == (chunk[0], chunk[-1] + 1)


def test_without_a_group_modules_are_plain():
    """group=None: one rank, without torch.distributed."""
    torch.manual_seed(0)
    net, full = Net(None), full_state()
    net.load_state_dict(full)
    state = net.state_dict()
    assert all(type(state[key]) is torch.Tensor and torch.equal(state[key], full[key]) for key in FULL)
    assert all(p.tp_group_name == "" for p in net.parameters())
    ids = torch.arange(5)
    x = net.norm(net.embed(ids))
    hidden = net.qkv(x)
    assert_near(hidden[:, :8], F.linear(x, full["qkv.q.weight"], full["qkv.q.bias"]), "q")
    y = net.down(net.up(x))
    loss = vocab_parallel_cross_entropy(y, ids, None, vocab_start=0)
    assert_near(loss, F.cross_entropy(y.double(), ids, reduction="none"), "loss")
    loss.sum().backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert_near(grad_norm(net.parameters(), None), torch.cat([g.flatten() for g in grads]).norm(), "norm")
    assert {row.tier for row in explain(net).rows if not row.op.startswith("reduce_scatter")} == {"local"}
