"""What people do to a model by habit, after shard(): as with plain torch, or refused in a sentence."""

from __future__ import annotations

import copy
import io
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import weight_norm

import pyruntime
from tests.transports import take

WIDTH, STEPS, WORLD = 13, 3, 2
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def made(seed=7, dtype=torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 19), nn.Tanh(), nn.BatchNorm1d(19, track_running_stats=True).eval()]
    return nn.Sequential(*layers, nn.Linear(19, WIDTH, bias=False)).to(dtype)


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, rank, step):
    x = data(rank, step)
    dtype = next(p.dtype for p in model.parameters())
    return F.mse_loss(model(x.to(dtype)).float(), x.flip(1))


class Plain:
    """One process over the batches of all ranks."""

    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), **ADAMW)

    def backward(self, step):
        (sum(loss_of(self.model, rank, step) for rank in range(WORLD)) / WORLD).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def writes(self):
        return torch.no_grad()


class Ours:
    def __init__(self, model, rank, mesh, stage):
        self.model, self.rank = model, rank
        self.group = mesh.get_group()
        self.handle = pyruntime.shard(model, mesh, stage=stage, bucket_bytes=64)
        self.optimizer = self.handle.adamw(**ADAMW)

    def backward(self, step):
        loss_of(self.model, self.rank, step).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def writes(self):
        return self.handle.writes()


# -- habits that train on: what is done between two steps


def load_state_dict(run):
    run.model.load_state_dict(made(seed=11).state_dict())


def write_within(run):
    with run.writes(), torch.no_grad():
        nn.init.constant_(run.model[0].weight, 0.25)
        run.model[2].running_mean.fill_(0.5)


def a_vector_within(run):
    with run.writes(), torch.no_grad():
        vector_to_parameters(parameters_to_vector(run.model.parameters()) / 2, run.model.parameters())


def gradients_dropped(run):
    run.backward(5)
    run.model.zero_grad()


def gradients_dropped_by_the_optimizer(run):
    run.backward(5)
    run.optimizer.zero_grad()


def accumulated_and_dropped(run):
    if isinstance(run, Ours):
        with run.handle.accumulate():
            run.backward(5)
    else:
        run.backward(5)
    run.model.zero_grad()


def a_scheduler(run):
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.1 if step else 1.0)
    run.backward(4)
    run.step()
    scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def a_copy_for_averages(run):
    copied = copy.deepcopy(run.model)
    copied.zero_grad()
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(0.5)


def of_a_checkpoint(run, load_plain, state_of):
    """Saved by torch.distributed.checkpoint, and loaded in place after another step."""
    if isinstance(run, Plain):
        saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        run.backward(6)
        run.step()
        load_plain(run, *saved)
        return
    group = run.group
    with tempfile.TemporaryDirectory() as folder:
        box = [folder]
        dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group=group)
        dcp.save(state_of(run), checkpoint_id=box[0], process_group=group)
        run.backward(6)
        run.step()
        dcp.load(state_of(run), checkpoint_id=box[0], process_group=group)
        dist.barrier(group)


def load_both(run, weights, states):
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(states)


def a_checkpoint_of_torchs(run):
    of_a_checkpoint(
        run, load_both, lambda run: {"model": run.handle.state_dict(), "opt": run.optimizer.state_dict()}
    )


def weights_of_a_checkpoint_of_torchs(run):
    of_a_checkpoint(
        run, lambda run, weights, _: run.model.load_state_dict(weights), lambda run: run.handle.state_dict()
    )


def a_checkpoint_of_stateful_objects(run):
    of_a_checkpoint(run, load_both, lambda run: {"model": run.handle, "opt": run.optimizer})


def a_hook_on_a_weight(run):
    seen = []
    hook = run.model[3].weight.register_hook(lambda gradient: seen.append(gradient.shape) or gradient * 0.5)
    run.backward(8)
    run.step()
    hook.remove()
    assert seen and all(shape == run.model[3].weight.shape for shape in seen)


def a_gradient_that_is_asked_for(run):
    weights = [run.model[0].weight, run.model[3].weight]
    gradients = torch.autograd.grad(loss_of(run.model, 0, 9), weights)
    assert all(g.shape == w.shape and g.abs().sum() > 0 for g, w in zip(gradients, weights, strict=True))


def a_backward_for_some(run):
    if isinstance(run, Ours):
        loss_of(run.model, run.rank, 9).backward(inputs=[run.model[3].weight])
    else:
        loss = sum(loss_of(run.model, rank, 9) for rank in range(WORLD)) / WORLD
        loss.backward(inputs=[run.model[3].weight])
    run.step()


def states_saved_and_loaded(run):
    saved = copy.deepcopy(run.optimizer.state_dict())
    weights = copy.deepcopy(run.model.state_dict())
    run.backward(6)
    run.step()
    run.optimizer.load_state_dict(saved)
    run.model.load_state_dict(weights)


TRAIN_ON = [
    load_state_dict,
    write_within,
    a_vector_within,
    gradients_dropped,
    gradients_dropped_by_the_optimizer,
    accumulated_and_dropped,
    a_scheduler,
    a_copy_for_averages,
    a_checkpoint_of_torchs,
    weights_of_a_checkpoint_of_torchs,
    a_checkpoint_of_stateful_objects,
    a_hook_on_a_weight,
    a_gradient_that_is_asked_for,
    a_backward_for_some,
    states_saved_and_loaded,
]


def trained(run, habit):
    for step in range(STEPS):
        run.backward(step)
        run.step()
        if step == 1:
            habit(run)
    return run


def weights(model):
    return {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}


def trained_by_ranks(group, stage, number, apart=False):
    take(group, "symmetric_memory")
    model = made(7 + (100 * group.rank() if apart else 0))
    run = Ours(model, group.rank(), DeviceMesh.from_group(group, "cpu"), stage)
    trained(run, TRAIN_ON[number] if number is not None else lambda _: None)
    result = weights(run.model)
    run.handle.close()
    return result


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("number", range(len(TRAIN_ON)), ids=[habit.__name__ for habit in TRAIN_ON])
def test_training_goes_on_as_in_one_process(ranks, number, stage):
    wanted = weights(trained(Plain(made()), TRAIN_ON[number]).model)
    for result in ranks.run(trained_by_ranks, WORLD, stage, number):
        for name, tensor in wanted.items():
            torch.testing.assert_close(result[name], tensor, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_replicas_that_are_seeded_apart_begin_with_the_first_ones(ranks, stage):
    wanted = weights(trained(Plain(made()), lambda _: None).model)
    for result in ranks.run(trained_by_ranks, WORLD, stage, None, True):
        for name, tensor in wanted.items():
            torch.testing.assert_close(result[name], tensor, rtol=2e-4, atol=2e-5)


def loaded_in_bf16(group, stage):
    """Masters follow what is loaded, so that the next steps start there."""
    take(group, "symmetric_memory")
    model = made(dtype=torch.bfloat16)
    run = Ours(model, group.rank(), DeviceMesh.from_group(group, "cpu"), stage)
    run.backward(0)
    run.step()
    other = made(seed=11, dtype=torch.bfloat16).state_dict()
    model.load_state_dict(other)
    run.optimizer.lr = 0.0
    run.backward(1)
    run.step()
    kept = weights(model)
    run.handle.close()
    return kept, {name: tensor.float() for name, tensor in other.items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_loaded_stays_loaded_in_bf16(ranks, stage):
    for kept, other in ranks.run(loaded_in_bf16, WORLD, stage):
        assert all(torch.equal(kept[name], tensor) for name, tensor in other.items())


# -- habits that are refused: what is done, and what the next step says


def in_place(model):
    model[0].weight.data.add_(0)  # a write that autograd does not see is as lost
    with torch.no_grad():
        model[3].weight.mul_(0.5)


def other_memory(model):
    model[3].weight.data = torch.zeros(WIDTH, 19)


def another_dtype(model):
    model.double()


def frozen(model):
    model[0].bias.requires_grad_(False)


def thawed(model):
    model[2].weight.requires_grad_(True)


def another_head(model):
    model[3] = nn.Linear(19, WIDTH, bias=False)


def one_more(model):
    model.append(nn.Linear(WIDTH, WIDTH))


def one_less(model):
    del model[3]


REFUSED = {
    in_place: "3.weight was written since the last step",
    other_memory: "3.weight was written since the last step",
    another_dtype: "0.weight was torch.float32 when the model was sharded and is torch.float64 now",
    frozen: "0.bias was trainable when the model was sharded and is frozen now",
    thawed: "2.weight was frozen when the model was sharded and is trainable now",
    another_head: "3.weight is new since the model was sharded",
    one_more: "4.weight is new since the model was sharded",
    one_less: "3.weight, which shard() found, is no parameter of the model any more",
}


def refused_by_ranks(group, stage, number):
    take(group, "symmetric_memory")
    model = made()
    model[2].weight.requires_grad_(False)
    run = Ours(model, group.rank(), DeviceMesh.from_group(group, "cpu"), stage)
    run.backward(0)
    run.step()
    run.handle.complete()
    list(REFUSED)[number](model)
    with pytest.raises(RuntimeError) as said:
        run.optimizer.step()
    return str(said.value)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[habit.__name__ for habit in REFUSED])
def test_the_next_step_refuses(ranks, number, stage):
    for said in ranks.run(refused_by_ranks, WORLD, stage, number):
        assert said.startswith(list(REFUSED.values())[number])


def of_the_optimizer(group):
    take(group, "symmetric_memory")
    mesh = DeviceMesh.from_group(group, "cpu")
    model = made()
    handle = pyruntime.shard(model, mesh, stage=2)
    with pytest.raises(ValueError, match=r"weight_decay names 0\.wait, .* its first ones are 0\.weight"):
        handle.adamw(weight_decay={"_orig_mod.0.weight": 0.1, "0.wait": 0.1})
    optimizer = handle.adamw(weight_decay={"_orig_mod.0.weight": 0.1})
    decays = {state.part.key: state.decay for state in optimizer.current()}
    assert decays["0.weight"] == 0.1 and not any(decays[key] for key in decays if key != "0.weight")
    loss_of(model, group.rank(), 0).backward()
    with pytest.raises(TypeError, match="takes no closure"):
        optimizer.step(lambda: None)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="train in bf16 without it"):
        scaler.step(optimizer)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    with pytest.raises(RuntimeError, match=r"betas was set to \(0\.5, 0\.9\)"):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.95)
    with pytest.raises(RuntimeError, match="has one group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="what is loaded lacks"):
        optimizer.load_state_dict({})
    loss_of(model, group.rank(), 1).backward()
    optimizer.step()
    handle.close()
    torch.optim.SGD(model.parameters(), lr=0.1)
    assert "zero_grad" not in vars(model)


def test_the_optimizer_is_one_of_torchs_and_says_what_it_is_not(ranks):
    ranks.run(of_the_optimizer, WORLD)


def other_models(group):
    take(group, "symmetric_memory")
    model = nn.Linear(4, 3 + group.rank())
    with pytest.raises(
        ValueError, match=r"has weight \[3, 4\] torch\.float32, .* has weight \[4, 4\]"
    ) as said:
        pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"))
    return str(said.value)


def test_replicas_of_other_shapes_are_refused_on_every_rank(ranks):
    one, other = ranks.run(other_models, WORLD)
    assert one == other


def beside_others(group):
    take(group, "symmetric_memory")
    mesh = DeviceMesh.from_group(group, "cpu")
    model = made()
    torchs = torch.optim.SGD(model.parameters(), lr=0.1)
    block = pyruntime.shard(model[0], mesh)
    with pytest.raises(ValueError, match=r"0\.weight is sharded already, as weight of the model"):
        pyruntime.shard(model, mesh)
    block.close()
    handle = pyruntime.shard(model, mesh, stage=3)
    with pytest.raises(ValueError, match=r"weight is sharded already, as 0\.weight of the model"):
        pyruntime.shard(model[0], mesh)
    with pytest.raises(ValueError, match=r"0\.weight is sharded over data-parallel ranks already"):
        pyruntime.parallelize(model, group, {"0": "column_gather"})
    handle.adamw()
    loss_of(model, group.rank(), 0).backward()
    with pytest.raises(ValueError, match=r"This SGD holds parameters of a sharded model, and their"):
        torchs.step()
    with pytest.raises(RuntimeError, match=r"gradient of 0\.weight \[19, 13\] was read"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="Creating a Parameter from an instance of type"):
        weight_norm(model[3])  # torch's words
    handle.zero_grad()
    assert model[0].weight.grad is None
    with handle.accumulate():
        loss_of(model, group.rank(), 0).backward()
    with pytest.raises(RuntimeError, match=r"Clip by handle\.adamw\(max_norm"):
        model[0].weight.grad  # noqa: B018
    model.zero_grad()
    torch.save(model.state_dict(), io.BytesIO())
    handle.close()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    loss_of(model, group.rank(), 0).backward()
    torchs.step()


def test_what_is_sharded_is_left_alone_by_others_or_they_say_so(ranks):
    ranks.run(beside_others, WORLD)


def compiled(group, stage):
    take(group, "symmetric_memory")
    mesh = DeviceMesh.from_group(group, "cpu")
    model = made()
    model[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"^0 is under torch\.compile, and the weights and gradients"):
        pyruntime.shard(model, mesh, stage=stage)
    model = made()
    model[1].compile(backend="eager")  # without weights
    handle = pyruntime.shard(model, mesh, stage=stage)
    for each in (model, model[0]):  # the whole, and a block
        with pytest.raises(RuntimeError, match=r"asked to trace a sharded module"):
            torch.compile(each, backend="eager")(torch.ones(2, 13))
    torch.compile(copy.deepcopy(model)[0], backend="eager")(torch.ones(2, 13))
    loss_of(model, group.rank(), 0).backward()
    handle.close()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.second_tier("0")
def test_a_sharded_model_under_compile_says_that_it_is_not_traced(ranks, stage):
    ranks.run(compiled, WORLD, stage)


def test_on_one_rank_a_write_in_place_is_right():
    models, results = (made(), made()), []
    for model, optimizer in zip(
        models,
        (torch.optim.AdamW(models[0].parameters(), **ADAMW), pyruntime.shard(models[1], None).adamw(**ADAMW)),
        strict=True,
    ):
        for step in range(STEPS):
            loss_of(model, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        results.append(weights(model))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=2e-4, atol=2e-5)
