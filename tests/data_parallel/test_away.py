"""At stage 3 a weight that is not gathered is right for whoever reads it, or its write is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime.data_parallel.away import AwayWeight
from tests.transports import take

VOCAB, WIDTH = 29, 12


class TiedByHand(nn.Module):
    """Its head reads the weight of the embedding without calling it."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        return F.linear(torch.tanh(self.body(self.embed(ids))), self.embed.weight)


def made():
    torch.manual_seed(5)
    return TiedByHand()


def batches(rank):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(VOCAB, (3, 7), generator=generator) for _ in range(4)]


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def sharded(group, model):
    take(group, "symmetric_memory")
    return pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=3, bucket_bytes=0)


def train_tied_by_hand(group):
    model = made()
    handle = sharded(group, model)
    optimizer = handle.adamw(lr=1e-2, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    for ids in batches(group.rank()):
        loss_of(model, ids).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(batches(0)[0])
    handle.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
def test_a_head_that_reads_the_embedding_trains_as_on_one_rank(ranks, world):
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in zip(*(batches(rank) for rank in range(world)), strict=True):
        optimizer.zero_grad()
        (sum(loss_of(model, ids) for ids in step) / world).backward()
        optimizer.step()
    for result in ranks.run(train_tied_by_hand, world):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-4, atol=1e-5)


READS = {
    "norm": lambda m, p: p.norm(),
    "isnan": lambda m, p: p.isnan().any(),
    "get_total_norm": lambda m, p: nn.utils.get_total_norm([p, m.body.weight]),
    "deepcopy": lambda m, p: copy.deepcopy(p),
    "data": lambda m, p: p.data.sum(),
    "detach": lambda m, p: p.detach().clone(),
    "sum of squares": lambda m, p: (p**2).sum(),
    "stack": lambda m, p: torch.stack([p, p]),
    "item": lambda m, p: torch.tensor(p[1, 2].item()),
    "numpy": lambda m, p: torch.from_numpy(p.detach().numpy().copy()),
    "vector": lambda m, p: nn.utils.parameters_to_vector([p]),
}
WRITES = {
    "fill_": lambda p: p.fill_(0),
    "*=": lambda p: p.__imul__(2),
    "[0] =": lambda p: p.__setitem__(0, 1.0),
    "init": lambda p: nn.init.normal_(p),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "out": lambda p: torch.add(torch.ones(VOCAB, WIDTH), 1, out=p),
    "data =": lambda p: setattr(p, "data", torch.zeros(VOCAB, WIDTH)),
}
SHAPES = {
    "shape": lambda p: (tuple(p.shape), p.numel(), p.dim(), len(p), p.dtype, p.is_floating_point()),
    "grad": lambda p: (p.grad, p.requires_grad, p.is_leaf),
    "empty_like": lambda p: torch.empty_like(p).shape,
    "repr": repr,
    "dict": lambda p: {p: 1}[p],
}


def away_after_a_step(group):
    model = made()
    handle = sharded(group, model)
    optimizer = handle.adamw(lr=1e-2)
    for ids in batches(group.rank())[:2]:
        loss_of(model, ids).backward()
        optimizer.step()
        model.embed(ids)
    return model, handle


def what_is_read(group, name):
    model, handle = away_after_a_step(group)
    with torch.no_grad():
        model.embed(torch.arange(3))
        was_away = type(model.embed.weight) is AwayWeight
        got = READS[name](model, model.embed.weight)
        handle.complete()
        wanted = READS[name](model, model.embed.weight)
    handle.close()
    return was_away, got.detach(), wanted.detach()


@pytest.mark.parametrize("name", READS)
def test_what_reads_a_weight_gets_all_of_it(ranks, name):
    results = ranks.run(what_is_read, 2, name)
    for was_away, got, wanted in results:
        assert was_away
        assert torch.equal(got, wanted)
        assert torch.equal(got, results[0][1])


def what_writes_say(group):
    model, handle = away_after_a_step(group)
    said = {}
    with torch.no_grad():
        for name, write in WRITES.items():
            try:
                write(model.embed.weight)
                said[name] = "nothing"
            except RuntimeError as error:
                said[name] = str(error)
        seen = {name: str(look(model.embed.weight)) for name, look in SHAPES.items()}
    still_away = type(model.embed.weight) is AwayWeight
    handle.close()
    return said, seen, still_away


def test_writes_are_refused_and_shapes_are_known_without_a_gather(ranks):
    for said, seen, still_away in ranks.run(what_writes_say, 2):
        for name, sentence in said.items():
            assert "would write into embed.weight [29, 12]" in sentence, (name, sentence)
        assert still_away
        assert seen["repr"].startswith("Parameter embed.weight [29, 12]")


def train_from(group, memory, folder):
    """Weights whose memory is not a parameter's own: mapped from a file, or views of one buffer."""
    model = made()
    parameters = list(model.parameters())
    if memory == "file":
        for index, parameter in enumerate(parameters):
            path = f"{folder}/{index}.npy"
            if group.rank() == 0:
                np.save(path, parameter.detach().numpy())
            torch.distributed.barrier(group)
            parameter.data = torch.from_numpy(np.load(path, mmap_mode="c"))
    else:
        buffer = nn.utils.parameters_to_vector(parameters).detach()
        for view, parameter in zip(buffer.split([p.numel() for p in parameters]), parameters, strict=True):
            parameter.data = view.view_as(parameter)
    handle = sharded(group, model)
    optimizer = handle.adamw(lr=1e-2)
    for ids in batches(group.rank()):
        loss_of(model, ids).backward()
        optimizer.step()
    handle.close()
    return [p.detach().clone() for p in parameters]


def test_weights_that_lie_in_a_file_or_in_one_buffer_train_alike(ranks, tmp_path):
    of_file = ranks.run(train_from, 2, "file", str(tmp_path))
    of_buffer = ranks.run(train_from, 2, "buffer", str(tmp_path))
    for one, other in zip(of_file, of_buffer, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Scaled(nn.Parameter):
    """A class of somebody else."""


def refused(group):
    model = nn.Linear(40, 40)
    model.weight = Scaled(torch.ones(40, 40))
    with pytest.raises(ValueError, match=r"weight is a Scaled, not an nn\.Parameter; use stage 2"):
        sharded(group, model)


def test_parameters_of_another_class_are_refused(ranks):
    ranks.run(refused, 2)


FROZEN = ("0.weight", "3.weight")


def adapted(seed=2) -> nn.Sequential:
    """A model of which only small parts train, with a frozen matrix at both ends."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(13, 32), nn.Tanh(), nn.Linear(32, 2), nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 13)
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROZEN)
    return model.double()


def of_adapters(model, rank, step):
    x = torch.randn(3, 13, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return (model(x) - x).square().mean()


def trains_adapters(group, users):
    model = adapted()
    handle = pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=3, bucket_bytes=256)
    if users:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = handle.of_torch(torch.optim.SGD, lr=0.1)
    held = []
    for step in range(4):
        if step == 2:
            model.load_state_dict({**model.state_dict(), "0.weight": adapted(9).state_dict()["0.weight"]})
        of_adapters(model, group.rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        held.append(model[3].weight.untyped_storage().nbytes())
    found = {key: value.clone() for key, value in model.state_dict().items()}
    handle.close()
    return found, held


@pytest.mark.parametrize("users", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.second_tier("3-True")
def test_frozen_weights_are_cut_too(ranks, world_size, users):
    plain = adapted()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for step in range(4):
        if step == 2:
            plain.load_state_dict({**plain.state_dict(), "0.weight": adapted(9).state_dict()["0.weight"]})
        (sum(of_adapters(plain, rank, step) for rank in range(world_size)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, held in ranks.run(trains_adapters, world_size, users):
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
        assert held[-1] == 0
