"""ZeRO cuts stacks of experts by rows, wherever in an expert a cut falls: no rank holds more than its share,
and on every number of ranks they train as on one."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import Shard

import pyruntime
from pyruntime.data_parallel import Muon
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.nn import ParallelExperts, Router
from pyruntime.nn.layout import BlocksDTensor, dtensor
from pyruntime.nn.rows import blocks_of, row_count, rows_of
from tests.data_parallel import cases
from tests.nn.test_expert_groups import WIDTH, D, K, batch, loss_of, runtime_of

LR, STEPS, BUCKET = 1e-2, 3, 64


@pytest.mark.parametrize(
    ("shape", "ranks"), [((1, 10, 3), 4), ((2, 7, 3), 3), ((5, 4, 2), 2), ((9, 3), 2), ((6, 64, 3), 4)]
)
def test_no_rank_has_more_rows_than_its_share(shape, ranks):
    (part,) = Bucket([("weight", nn.Parameter(torch.zeros(shape)))], ranks).parts
    held = [part.local_rows(rank) for rank in range(ranks)]
    assert max(held) == -(-row_count(shape) // ranks) and sum(held) == row_count(shape)


@pytest.mark.parametrize(
    "shape", [(), (5,), (4, 3), (3, 4, 2), (1, 5, 2), (2, 3, 2, 2), (3, 0, 2), (4, 64, 3)]
)
def test_the_blocks_of_a_run_are_its_rows_in_their_order(shape):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    every = rows_of(tensor)
    assert len(every) == row_count(shape)
    for first in range(len(every) + 1):
        for last in range(first, len(every) + 1):
            blocks = list(blocks_of(shape, first, last - first))
            found = [tensor[each.place].reshape(each.rows, *every.shape[1:]) for each in blocks]
            assert torch.equal(torch.cat([every[:0], *found]), every[first:last])
            begins = itertools.accumulate((each.rows for each in blocks), initial=0)
            assert [each.first for each in blocks] == list(begins)[:-1]
            assert len(blocks) <= 3


class Mixed(nn.Module):
    """A router and some experts."""

    def __init__(self, tp, ep, experts: int, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(4)
        self.router = Router(D, experts, min(K, experts), group=tp, dtype=dtype)
        self.experts = ParallelExperts(experts, D, WIDTH, group=ep, dtype=dtype)

    def forward(self, x):
        return x + self.experts(x, *self.router(x))


def muon_of(model: Mixed) -> Muon:
    return Muon(stacks={model.experts.gate_up_proj: 2, model.experts.down_proj: 1})


def made(name, ep, stage, experts, kind, max_norm=1e9):
    runtime = runtime_of(name, ep)
    model = Mixed(runtime.tp, runtime.ep, experts)
    handle = pyruntime.shard(model, runtime.replicas, stage=stage, bucket_bytes=BUCKET)
    options = {"muon": muon_of(model)} if kind == "muon" else {}
    return runtime, model, handle, handle.adamw(lr=LR, max_norm=max_norm, **options)


def steps_of(runtime, model, optimizer, steps):
    """Norms of steps with these numbers."""
    norms, data = [], runtime.replicas.rank
    for step in steps:
        x, wanted = (each.tensor_split(runtime.tp.size)[runtime.tp.rank] for each in batch(4 * step + data))
        loss_of(model(x), wanted, len(batch(4 * step + data)[0])).backward()
        norms.append(optimizer.step().grad_norm)
    return norms


def whole(states):
    return {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each.clone()
        for name, each in states.items()
    }


def trained(_group, name, ep, stage, experts, kind, max_norm):
    """Norms, weights, and the elements of the experts that this rank holds states of."""
    runtime, model, handle, optimizer = made(name, ep, stage, experts, kind, max_norm)
    norms = steps_of(runtime, model, optimizer, range(STEPS))
    states = [each for each in optimizer.current() if each.parameter.dim() == 3]
    held = {each.part.key: each.rows.numel() for each in states}
    assert all(m.numel() == each.rows.numel() for each in states for m in each.moments.values())
    found = {"norms": norms, "held": held, "weights": whole(handle.state_dict())}
    handle.close()
    found["closed"] = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() < 3}
    return found


def alone(group, data, experts, kind, max_norm):
    """The same of one rank that has the rows of all."""
    model = Mixed(group, group, experts)
    optimizer = pyruntime.shard(model, None).adamw(lr=LR, max_norm=max_norm, muon=muon_of(model))
    others = None
    if kind == "adamw":
        model = Mixed(group, group, experts)
        groups = [{"params": [p], "weight_decay": 0.1 if p.dim() >= 2 else 0.0} for p in model.parameters()]
        others = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    norms = []
    for step in range(STEPS):
        for number in range(data):
            x, wanted = batch(4 * step + number)
            (loss_of(model(x), wanted, len(x)) / data).backward()
        if others is None:
            norms.append(optimizer.step().grad_norm)
        else:
            norms.append(float(nn.utils.clip_grad_norm_(list(model.parameters()), max_norm)))
            others.step()
            others.zero_grad()
    return {"norms": norms, "weights": {name: p.detach().clone() for name, p in model.named_parameters()}}


CASES = [
    ("dp4", 1, 1, 1), ("dp4", 1, 2, 3), ("dp4", 2, 3, 2), ("dp4", 2, 1, 3), ("dp2 tp2", 1, 3, 2),
    ("tp4", 2, 2, 2), ("replicate2 dp2", 1, 3, 1), ("dp4", 1, 0, 2), ("dp2 tp2", 2, 3, 3),
]  # fmt: skip
"""Folding, expert-parallel ranks, ZeRO stage, experts: one of a rank, or as many as do not divide."""


@pytest.mark.parametrize(("name", "ep", "stage", "experts"), CASES)
@pytest.mark.parametrize(("kind", "max_norm"), [("adamw", 1e9), ("adamw", 0.3), ("muon", 0.3)])
@pytest.mark.second_tier(
    but=[
        "adamw-1000000000.0-dp4-1-2-3",
        "muon-0.3-dp4-2-3-2",
        "adamw-0.3-dp2 tp2-2-3-3",
        "muon-0.3-dp4-1-1-1",
    ]
)
def test_they_train_as_on_one_rank(ranks, name, ep, stage, experts, kind, max_norm):
    data = {"dp4": 4, "tp4": 1, "dp2 tp2": 2, "replicate2 dp2": 4}[name]
    (exact,) = ranks.run(alone, 1, data, experts, kind, max_norm)
    found = ranks.run(trained, 4, name, ep, stage, experts, kind, max_norm)
    for of_rank in found:
        assert of_rank["norms"] == pytest.approx(exact["norms"], rel=1e-9)
        for key, value in exact["weights"].items():
            torch.testing.assert_close(of_rank["weights"][key], value, rtol=0, atol=1e-9, msg=key)
    again = ranks.run(trained, 4, name, ep, stage, experts, kind, max_norm)
    for one, other in zip(found, again, strict=True):
        assert one["norms"] == other["norms"]
        assert all(torch.equal(other["weights"][key], value) for key, value in one["weights"].items())


@pytest.mark.parametrize(("ep", "experts"), [(1, 1), (2, 2), (1, 3)])
def test_ranks_hold_as_many_rows_within_one(ranks, ep, experts):
    found = ranks.run(trained, 4, "dp4", ep, 1, experts, "adamw", 1e9)
    share = 4 // ep
    for key, rows, columns in (("gate_up_proj", 2 * WIDTH, D), ("down_proj", D, WIDTH)):
        held = [of_rank["held"][f"experts.{key}"] for of_rank in found]
        mean = experts // ep * rows * columns / share
        assert max(held) < mean + columns and sum(held) == experts * rows * columns


def saved(_group, folder, name, ep, stage, experts, kind):
    runtime, model, handle, optimizer = made(name, ep, stage, experts, kind)
    steps_of(runtime, model, optimizer, range(2))
    dcp.save({"model": handle, "optimizer": optimizer}, checkpoint_id=folder)
    found = whole({**handle.state_dict(), **optimizer.state_dict()})
    steps_of(runtime, model, optimizer, range(2, 4))
    last = whole(handle.state_dict())
    handle.close()
    return found, last


def resumed(_group, folder, again, name, ep, stage, experts, kind):
    runtime, model, handle, optimizer = made(name, ep, stage, experts, kind)
    steps_of(runtime, model, optimizer, range(5, 6))
    dcp.load({"model": handle, "optimizer": optimizer}, checkpoint_id=folder)
    found = whole({**handle.state_dict(), **optimizer.state_dict()})
    dcp.save({"model": handle, "optimizer": optimizer}, checkpoint_id=again)
    steps_of(runtime, model, optimizer, range(2, 4))
    last = whole(handle.state_dict())
    handle.close()
    return found, last


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_checkpoint_loads_with_other_groups_and_back(ranks, tmp_path, kind):
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    expected, last = ranks.run(saved, 4, first, "dp4", 2, 1, 2, kind)[0]
    for before, after, mesh in ((first, second, ("dp4", 1, 3)), (second, third, ("dp2 tp2", 2, 2))):
        for found, end in ranks.run(resumed, 4, before, after, *mesh, 2, kind):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], value) for key, value in expected.items())
            if mesh[0] == "dp4":  # the same data
                for key, value in last.items():
                    torch.testing.assert_close(end[key], value, rtol=0, atol=1e-9, msg=key)


def of_whole_experts(group, folder):
    """A checkpoint in which every rank has written whole experts, and what it holds."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "experts.gate_up_proj": torch.randn(3, 2 * WIDTH, D, generator=generator, dtype=torch.float64),
        "experts.down_proj": torch.randn(3, D, WIDTH, generator=generator, dtype=torch.float64),
    }
    mesh, rank, size = cases.mesh_of(group, "dp")
    parts = {name: [*each.chunk(size), each[:0]][min(rank, 3)] for name, each in tensors.items()}
    states = {name: dtensor(each, mesh, [Shard(0)], tensors[name].shape) for name, each in parts.items()}
    dcp.save({"model": states}, checkpoint_id=folder, process_group=group)
    model = Mixed(runtime_of("dp4", 1).tp, runtime_of("dp4", 1).ep, 3)
    handle = pyruntime.shard(model, runtime_of("dp4", 1).replicas, stage=3, bucket_bytes=BUCKET)
    own = handle.state_dict()
    assert all(isinstance(own[name], BlocksDTensor) for name in tensors)
    dcp.load({"model": {name: own[name] for name in tensors}}, checkpoint_id=folder, process_group=group)
    found = whole({name: own[name] for name in tensors})
    copies = {name: own[name].clone() for name in tensors}
    for name in tensors:
        own[name].copy_(tensors[name] + 1)
    written = whole({name: own[name] for name in tensors})
    for name in tensors:
        own[name].copy_(copies[name])
    back = whole({name: own[name] for name in tensors})
    for name in tensors:
        own[name].copy_(tensors[name] + 2)
    handle.load_state_dict({name: copies.get(name, each).clone() for name, each in own.items()})
    loaded = whole({name: handle.state_dict()[name] for name in tensors})
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())
    with pytest.raises(ValueError, match="copy one of the same shape"):
        own["experts.down_proj"].copy_(tensors["experts.gate_up_proj"])
    with pytest.raises(ValueError, match="of which this rank holds blocks"):
        own["experts.down_proj"].add_(1)
    handle.close()
    return tensors, found, written, back


def test_a_checkpoint_of_whole_experts_loads_and_whole_tensors_are_taken(ranks, tmp_path):
    for tensors, found, written, back in ranks.run(of_whole_experts, 4, str(tmp_path / "saved")):
        for name, value in tensors.items():
            assert torch.equal(found[name], value) and torch.equal(written[name], value + 1)
            assert torch.equal(back[name], value)


class Stack(nn.Module):
    """Experts that no layer of ours holds, and that every row goes to."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(2, 7, 5, dtype=torch.float64))
        self.down = nn.Parameter(torch.empty(2, 5, 7, dtype=torch.float64))

    def forward(self, x):
        made = torch.einsum("emn,bn->ebm", self.up, x).tanh()
        return x + torch.einsum("enm,ebm->bn", self.down, made)


def weights_of_stack():
    generator = torch.Generator().manual_seed(2)
    return {
        "up": torch.randn(2, 7, 5, generator=generator, dtype=torch.float64),
        "down": torch.randn(2, 5, 7, generator=generator, dtype=torch.float64),
    }


def steps_of_stack(model, optimizer, ranks):
    """Steps on the rows of these ranks, of three; returns a copy of an optimizer's states midway."""
    copied = {}
    for step in range(3):
        for rank in ranks:
            generator = torch.Generator().manual_seed(7 * step + rank)
            x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
            (model(x).square().mean() / len(ranks)).backward()
        if type(optimizer) is torch.optim.AdamW:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            copied = copy.deepcopy(optimizer.state_dict())
    return copied


def stack_trained(group, stage, kind, folder):
    with pyruntime.on_meta() if folder else contextlib.nullcontext():
        model = Stack()
    if not folder:
        model.load_state_dict(weights_of_stack())
    mesh, rank, _ = cases.mesh_of(group, "dp")
    handle = pyruntime.shard(model, mesh, stage=stage, bucket_bytes=8)
    if folder:
        handle.load_pretrained(folder)
    if kind == "sgd":
        optimizer = handle.of_torch(torch.optim.SGD, lr=LR, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    copied = steps_of_stack(model, optimizer, [rank])
    states = whole({name: each for name, each in copied.items() if name.startswith("momentum")})
    found = whole(handle.state_dict())
    handle.close()
    return found, states, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("stage", "kind", "from_files"), [(1, "sgd", False), (2, "adamw", False), (3, "sgd", True)]
)
def test_stacks_of_any_module_train_with_any_optimizer(ranks, tmp_path, stage, kind, from_files):
    if from_files:
        save_file(weights_of_stack(), tmp_path / "model.safetensors")
    found = ranks.run(stack_trained, 3, stage, kind, str(tmp_path) if from_files else "")
    exact = Stack()
    exact.load_state_dict(weights_of_stack())
    of_one = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    optimizer = of_one(exact.parameters(), lr=LR, **({"momentum": 0.9} if kind == "sgd" else {}))
    steps_of_stack(exact, optimizer, range(3))
    for weights, states, closed in found:
        assert len(states) == (2 if kind == "sgd" else 0) and all(each.dim() == 3 for each in states.values())
        for name, value in exact.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=1e-12)
            assert torch.equal(closed[name], weights[name])
