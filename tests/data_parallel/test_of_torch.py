"""Optimizers of torch over shards: what they compute of the whole model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime.nn.cut import gradient_of
from tests.nn.test_cut import Lamb

WIDTH, STEPS = 7, 4
KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "lamb": (Lamb, {"lr": 0.02}),
}


def made() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, 19), nn.Tanh(), nn.Linear(19, WIDTH, bias=False), nn.LayerNorm(WIDTH)]
    return nn.Sequential(*layers).double()


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    return (model(x) - x.flip(1)).square().mean()


def trained_alone(kind, options, world_size, steps=STEPS, max_norm=0.0):
    model = made()
    optimizer = kind(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(steps):
        (sum(loss_of(model, rank, step) for rank in range(world_size)) / world_size).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return dict(model.named_parameters())


def mesh_of(group):
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))


def trained(group, name, stage, max_norm, resumes):
    kind, options = KINDS[name]
    rank, mesh = dist.get_rank(group), mesh_of(group)
    model, state = made(), None
    steps = iter(range(STEPS))
    for part in (STEPS // 2, STEPS - STEPS // 2) if resumes else (STEPS,):
        if state is not None:
            state = {who: {key: value.clone() for key, value in of.items()} for who, of in state.items()}
            model = made()
        handle = pyruntime.shard(model, mesh, stage=stage, bucket_bytes=64)
        optimizer = handle.of_torch(kind, max_norm=max_norm, **options)
        if state is not None:
            handle.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        done = STEPS - part if state is not None else 0
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, done=done: 1 / (1 + step + done))
        for _ in range(part):
            loss_of(model, rank, next(steps)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        state = {"model": handle.state_dict(), "optimizer": optimizer.state_dict()}
        handle.complete()
        found = {key: p.detach().clone() for key, p in model.named_parameters()}
        handle.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.second_tier("sgd-0")
def test_it_is_the_optimizer_of_one_process(ranks, name, stage):
    world_size = 3 if name in ("lamb", "sgd") else 2
    max_norm, resumes = (0.05, True) if name in ("adamw", "lamb", "sgd") else (0.0, False)
    plain = trained_alone(*KINDS[name], world_size, max_norm=max_norm)
    for found in ranks.run(trained, world_size, name, stage, max_norm, resumes):
        for key, value in found.items():
            torch.testing.assert_close(value, plain[key].detach(), rtol=1e-8, atol=1e-10)


def beside_tensor_parallelism(group, stage):
    mesh = DeviceMesh(
        "cpu", torch.tensor(dist.get_process_group_ranks(group)).view(2, 2), mesh_dim_names=("dp", "tp")
    )
    model = pyruntime.parallelize(made(), mesh["tp"], {"0": "column", "2": "row"})
    handle = pyruntime.shard(model, mesh["dp"], stage=stage, bucket_bytes=64)
    optimizer = handle.of_torch(Lamb, lr=0.02, max_norm=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        loss_of(model, mesh["dp"].get_local_rank(), step).backward()
        optimizer.step()
        schedule.step()
    handle.complete()
    found = {key: value.full_tensor().clone() for key, value in model.state_dict().items() if key[0] in "02"}
    handle.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.second_tier("0", "3")
def test_norms_are_of_whole_weights_beside_tensor_parallelism(ranks, stage):
    plain = trained_alone(*KINDS["lamb"], 2, max_norm=0.05)
    for found in ranks.run(beside_tensor_parallelism, 4, stage):
        assert len(found) == 3
        for key, value in found.items():
            torch.testing.assert_close(value, plain[key].detach(), rtol=1e-8, atol=1e-10)


def refused(group):
    said = []
    for kind, options, stage in (
        (torch.optim.Adafactor, {"lr": 0.01}, 1),
        (torch.optim.SGD, {"lr": 0.01}, 0),
        ("sgd", {}, 0),
    ):
        model = made()
        handle = pyruntime.shard(model, mesh_of(group), stage=stage, bucket_bytes=64)
        try:
            optimizer = handle.of_torch(kind, **options)
            loss_of(model, 0, 0).backward()
            optimizer.step(lambda: None) if stage == 0 else optimizer.step()
            said.append("nothing")
        except (ValueError, TypeError, RuntimeError) as error:
            said.append(str(error))
        handle.close()
    return said


def test_what_it_cannot_do_is_a_sentence(ranks):
    for adafactor, closure, text in ranks.run(refused, 2):
        assert "Adafactor computes the update of an element from others of the same weight" in adafactor
        assert "step() takes no closure" in closure
        assert "of_torch() takes an optimizer class, such as torch.optim.SGD; found: 'sgd'" in text


def rounded(group):
    model = made().bfloat16()
    handle = pyruntime.shard(model, mesh_of(group), stage=2)
    optimizer = handle.of_torch(torch.optim.SGD, lr=1e-3)
    before = model[0].weight.detach().clone()
    for step in range(50):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        (model(x).float() - x.flip(1).float()).square().mean().backward()
        optimizer.step()
    handle.complete()
    master = optimizer.state_dict()["master.0.weight"].full_tensor()
    return torch.equal(master.bfloat16(), model[0].weight), torch.equal(before, model[0].weight)


def test_weights_of_lower_precision_follow_their_masters(ranks):
    assert ranks.run(rounded, 2) == [(True, False)] * 2


def asked_by_torch(group):
    model = made()
    handle = pyruntime.shard(model, mesh_of(group), stage=1)
    optimizer = handle.adamw(lr=0.1)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    try:
        get_optimizer_state_dict(model, optimizer)
    except RuntimeError as error:
        return str(error), [p for p in model.parameters() if gradient_of(p) is not None]
    return "nothing", []


def test_torchs_state_of_an_optimizer_is_refused_with_what_to_do(ranks):
    for message, left in ranks.run(asked_by_torch, 2):
        assert 'save {"model": handle, "optimizer": optimizer} by DCP' in message
        assert not left
