"""A sharded model with the optimizer that its user made as for any model."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pyruntime
from pyruntime.nn.cut import memory_of
from tests.data_parallel.test_of_torch import KINDS, STEPS, loss_of, made, mesh_of

PLAN = {"0": "column", "2": "row"}


def halve(model):
    for p in model.parameters():
        p.grad = p.grad / 2


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_by_hand(model):
    total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(0.05 / total)


def loop(model, optimizers, backward, between=(), scaler=None):
    """The loop that everybody writes."""
    for step in range(STEPS):
        loss = backward(model, step)
        loss.backward() if scaler is None else scaler.scale(loss).backward()
        for optimizer in optimizers if scaler is not None else ():
            scaler.unscale_(optimizer)
        for each in between:
            each(model)
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
            optimizer.zero_grad()
        if scaler is not None:
            scaler.update()


def of_all(world_size):
    return lambda model, step: sum(loss_of(model, rank, step) for rank in range(world_size)) / world_size


def alone(name, world_size, between=(), make=None, scaler=False):
    kind, options = KINDS[name]
    model = made()
    optimizers = make(model) if make else [kind(model.parameters(), **options)]
    loop(model, optimizers, of_all(world_size), between, torch.amp.GradScaler("cpu") if scaler else None)
    return {key: p.detach() for key, p in model.named_parameters()}


def sharded(group, name, stage, between=(), make=None, scaler=False, before=False):
    kind, options = KINDS[name]
    rank, model = dist.get_rank(group), made()
    optimizers = [kind(model.parameters(), **options)] if before else []
    handle = pyruntime.shard(model, mesh_of(group), stage=stage, bucket_bytes=64)
    if not before:
        optimizers = make(model) if make else [kind(model.parameters(), **options)]
    scaler = torch.amp.GradScaler("cpu") if scaler else None
    loop(model, optimizers, lambda m, step: loss_of(m, rank, step), between, scaler)
    handle.complete()
    found = {key: p.detach().clone() for key, p in model.named_parameters()}
    handle.close()
    return found


def assert_alike(outcomes, plain):
    for found in outcomes:
        assert found.keys() == plain.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, plain[key], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.second_tier("sgd-0")
def test_the_loop_that_everybody_writes(ranks, name, stage):
    world_size = 3 if name in ("lamb", "sgd") else 2
    between = (clip,) if name in ("adamw", "lamb", "foreach") else ()
    plain = alone(name, world_size, between)
    assert_alike(ranks.run(sharded, world_size, name, stage, between), plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_are_read_scaled_and_clipped_by_hand(ranks, stage):
    between = (halve, clip_by_hand)
    assert_alike(ranks.run(sharded, 2, "adamw", stage, between), alone("adamw", 2, between))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_that_was_made_before(ranks, stage):
    assert_alike(ranks.run(sharded, 2, "adagrad", stage, (), None, False, True), alone("adagrad", 2))


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_are_scaled(ranks, stage):
    assert_alike(
        ranks.run(sharded, 2, "sgd", stage, (clip,), None, True), alone("sgd", 2, (clip,), None, True)
    )


def two(model):
    return [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.AdamW([*model[2].parameters(), *model[3].parameters()], lr=0.01),
    ]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_optimizers(ranks, stage):
    assert_alike(ranks.run(sharded, 2, "sgd", stage, (clip,), two), alone("sgd", 2, (clip,), two))


def accumulated(group, stage):
    """Micro-batches, a step that is dropped, and one that is read after it."""
    rank, model = dist.get_rank(group), made()
    handle = pyruntime.shard(model, mesh_of(group), stage=stage, bucket_bytes=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(0, 6, 2):
        with handle.accumulate():
            loss_of(model, rank, step).backward()
            try:
                clip(model)
                said = ""
            except RuntimeError as error:
                said = str(error)
        loss_of(model, rank, step + 1).backward()
        if step == 2:
            (optimizer if stage else model).zero_grad()
            continue
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    handle.complete()
    return said, {key: p.detach().clone() for key, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_micro_batches_and_gradients_that_are_dropped(ranks, stage):
    plain = made()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in (0, 4):
        (of_all(2)(plain, step) + of_all(2)(plain, step + 1)).backward()
        clip(plain)
        optimizer.step()
        optimizer.zero_grad()
    outcomes = ranks.run(accumulated, 2, stage)
    assert_alike([found for _, found in outcomes], {k: p.detach() for k, p in plain.named_parameters()})
    assert all("before the last backward pass of their step" in said for said, _ in outcomes)


def beside_tensor_parallelism(group, stage):
    mesh = DeviceMesh(
        "cpu", torch.tensor(dist.get_process_group_ranks(group)).view(2, 2), mesh_dim_names=("dp", "tp")
    )
    model = pyruntime.parallelize(made(), mesh["tp"], PLAN)
    handle = pyruntime.shard(model, mesh["dp"], stage=stage, bucket_bytes=64)
    kind, options = KINDS["lamb"]
    rank = mesh["dp"].get_local_rank()
    loop(model, [kind(model.parameters(), **options)], lambda m, step: loss_of(m, rank, step), (halve, clip))
    handle.complete()
    state = model.state_dict()
    found = {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}
    handle.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.second_tier("1", "3")
def test_it_is_of_whole_weights_beside_tensor_parallelism(ranks, stage):
    assert_alike(ranks.run(beside_tensor_parallelism, 4, stage), alone("lamb", 2, (halve, clip)))


def resumed(group, folder, stage):
    rank, mesh = dist.get_rank(group), mesh_of(group)
    kind, options = KINDS["adamw"]

    def one():
        model = made()
        handle = pyruntime.shard(model, mesh, stage=stage, bucket_bytes=64)
        return model, handle, kind(model.parameters(), **options)

    def steps(model, optimizer, some):
        for step in some:
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, handle, optimizer = one()
    steps(model, optimizer, range(2))
    state = {"model": handle.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder, process_group=group)
    handle.close()
    model, handle, optimizer = one()
    steps(model, optimizer, range(7, 8))  # other values, which are replaced
    state = {"model": handle.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    optimizer.load_state_dict(state["optimizer"])
    steps(model, optimizer, range(2, STEPS))
    handle.complete()
    found = {key: memory_of(p).clone() for key, p in model.named_parameters()}
    handle.close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.second_tier("1")
def test_its_states_are_saved_and_loaded_by_torch(ranks, tmp_path, stage):
    assert_alike(ranks.run(resumed, 2, str(tmp_path / "state"), stage), alone("adamw", 2))


def mixed(group):
    """Both the handle's optimizer and one of the user's."""
    said = []
    for first in ("handle", "user"):
        model = made()
        handle = pyruntime.shard(model, mesh_of(group), stage=1)
        try:
            if first == "handle":
                handle.adamw()
                loss_of(model, 0, 0).backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            else:
                loss_of(model, 0, 0).backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                handle.adamw()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
        handle.close()
    return said


def test_one_of_two_optimizers_is_refused(ranks):
    for step, adamw in ranks.run(mixed, 2):
        assert "their gradients go to the optimizer of its handle, ShardedAdamW; take one of the two" in step
        assert "has an optimizer already" in adamw


def closed(group):
    model = made()
    handle = pyruntime.shard(model, mesh_of(group), stage=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    handle.close()
    loss_of(model, 0, 1).backward()
    with pytest.raises(ValueError, match="holds rows of a model whose handle was closed"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_after_close_it_is_made_anew(ranks):
    ranks.run(closed, 2)


def script_of_fsdp2(group, shards, folder):
    """A script as it is written for transformers and FSDP2; `shards` is the line that differs."""
    transformers = importlib.import_module("transformers")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    LINES[shards](model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 10)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank(group))
        ids = torch.randint(0, 96, (2, 12), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(
            (float(loss.detach()), float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        )
    return losses


LINES = {
    "fully_shard": lambda model, mesh: fully_shard(model, mesh=mesh),
    **{
        f"shard {stage}": lambda model, mesh, s=stage: pyruntime.shard(model, mesh, stage=s)
        for stage in (0, 2, 3)
    },
}


def test_a_script_for_fsdp2_changes_one_line(ranks, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    expected = ranks.run(script_of_fsdp2, 2, "fully_shard", str(tmp_path))
    for line in LINES:
        for rank, losses in enumerate(ranks.run(script_of_fsdp2, 2, line, str(tmp_path))):
            assert torch.tensor(losses).allclose(torch.tensor(expected[rank]), rtol=2e-4), (
                line,
                losses,
                expected,
            )


def with_max_norm(group):
    with pytest.raises(ValueError, match=r"0 has max_norm=1.0, so its forward pass writes into its weight"):
        pyruntime.shard(nn.Sequential(nn.Embedding(7, 3, max_norm=1.0)), mesh_of(group))
    pyruntime.shard(nn.Sequential(nn.Embedding(7, 3, max_norm=1.0)), None)


def test_an_embedding_that_writes_into_its_weight_is_refused(ranks):
    ranks.run(with_max_norm, 2)


# -- what people do between the gradients and the next forward pass


def no_gradient_of_the_head(model, optimizer, step):
    if step < 2:
        model[2].weight.grad = None


def by_hand(model, optimizer, step):
    parameters = list(model.parameters())
    found = [p.grad * 2 for p in parameters]
    for p, gradient in zip(parameters, found, strict=True):
        p.grad = gradient


def clamped(model, optimizer, step):
    optimizer.step()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.2, 0.2)


def dropped_and_taken_again(model, optimizer, step):
    for p in model.parameters():
        p.grad = None


BETWEEN = (no_gradient_of_the_head, by_hand, clamped, dropped_and_taken_again)


def between(model, backward, handle=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(8):
        backward(model, step)
        BETWEEN[step % len(BETWEEN)](model, optimizer, step)
        if step % len(BETWEEN) < 2:
            optimizer.step()
        if step % len(BETWEEN) == 1 and handle is not None:
            backward(model, step)
            clip(model)
            handle.zero_grad()
        optimizer.zero_grad()
    return optimizer


def set_by_autograd(model, loss):
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient


def habits(group, stage):
    rank, model = dist.get_rank(group), made()
    handle = pyruntime.shard(model, mesh_of(group), stage=stage, bucket_bytes=64)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    set_by_autograd(model, loss_of(model, rank, 50))
    first.step()
    first.zero_grad()
    between(model, lambda m, step: loss_of(m, rank, step).backward(), handle)
    of_a_part = {f"2.{key}": value.clone() for key, value in model[2].state_dict().items()}
    copied = copy.deepcopy(model)
    handle.complete()
    found = {key: p.detach().clone() for key, p in model.named_parameters()}
    handle.close()
    same = all(torch.equal(found[key], value) for key, value in of_a_part.items())
    return found, same and all(torch.equal(found[key], p) for key, p in copied.named_parameters())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_and_weights_that_are_set_in_between(ranks, stage):
    plain = made()
    first = torch.optim.SGD(plain.parameters(), lr=0.1)
    set_by_autograd(plain, of_all(2)(plain, 50))
    first.step()
    first.zero_grad()
    between(plain, lambda m, step: of_all(2)(m, step).backward())
    outcomes = ranks.run(habits, 2, stage)
    assert_alike([found for found, _ in outcomes], {k: p.detach() for k, p in plain.named_parameters()})
    assert all(same for _, same in outcomes), "a part's state dict, and a copy"


class Scaled(nn.Module):
    """With a scalar, as CLIP has one, and a frozen teacher that follows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.student, self.teacher = (nn.Linear(7, 23).double() for _ in range(2))
        self.teacher.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x):
        return self.student(x) * self.scale - self.teacher(x)

    def follow(self):
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.data.mul_(0.8).add_(theirs.detach(), alpha=0.2)


def steps_of(model, optimizer, ranks):
    for step in range(4):
        for rank in ranks:
            x = torch.randn(
                3, 7, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
            )
            (model(x).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.follow()


def with_a_teacher(group, stage):
    model = Scaled()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(1, 7, dtype=torch.float64)).sum().backward()
    optimizer.step()  # it has states before the model is sharded
    optimizer.zero_grad()
    handle = pyruntime.shard(model, mesh_of(group), stage=stage, bucket_bytes=64)
    steps_of(model, optimizer, [dist.get_rank(group)])
    found = {key: value.clone() for key, value in model.state_dict().items()}
    handle.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.second_tier("3")
def test_a_scalar_and_a_frozen_part_that_is_written(ranks, stage):
    plain = Scaled()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    plain(torch.ones(1, 7, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps_of(plain, optimizer, [0, 1])
    assert_alike(ranks.run(with_a_teacher, 2, stage), plain.state_dict())
