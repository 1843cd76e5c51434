"""torch's own optimizers, clipping, scaler, checkpoints and wrappers, on models that are cut over ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

import pyruntime
from pyruntime import parallelize
from pyruntime.nn import MergedColumnParallelLinear, RowParallelLinear
from pyruntime.nn.cut import CutTensor
from tests.nn.cases import assert_near, in_double, same_on_all_ranks

PLAN = {"up": "column", "down": "row", "head": "column_gather"}


class Net(nn.Module):
    """Widths that 4 does not divide; a norm that no plan names."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 15), nn.Linear(15, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.more = nn.Identity()

    def forward(self, x):
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(self.more(x))


def built(group, *, merged: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = parallelize(Net(), group, PLAN, tier="chunked")
    if merged:  # a parameter that is two tensors of the state dict
        options = {"group": group, "sequence_parallel": False}
        model.more = nn.Sequential(
            MergedColumnParallelLinear(6, {"q": 7, "k": 8}, bias=True, **options),
            RowParallelLinear(15, 6, **options),
        )
    return model


def batch(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(batch(step).to(model.norm.weight.dtype)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def trains_as_one_rank_does(group, kind: str) -> None:
    torch.manual_seed(0)
    whole = in_double(Net())
    model = built(group).double()
    train(whole, OPTIMIZERS[kind](whole.parameters()), range(3))
    train(model, OPTIMIZERS[kind](model.parameters()), range(3))
    state = model.state_dict()
    for name, expected in whole.state_dict().items():
        found = state[name]
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert_near(found, expected, name, 1e-9)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.second_tier("adamw")
def test_torchs_optimizers_and_clipping_train_as_on_one_rank(ranks, kind):
    ranks.run(trains_as_one_rank_does, 3, kind)


# -- checkpoints


def whole_state(optimizer: torch.optim.Optimizer) -> dict:
    """{(index, name): full tensor} of an optimizer's state dict."""
    return {
        (index, name, key): part.full_tensor() if hasattr(part, "full_tensor") else part
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        for key, part in (value.items() if isinstance(value, dict) else [("", value)])
    }


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> dict:
    if how == "plain":
        return optimizer.state_dict()
    return (
        get_optimizer_state_dict(model, optimizer)
        if how == "optimizer"
        else get_state_dict(model, optimizer)[1]
    )


def save(group, folder: str, how: str) -> dict:
    model = built(group, merged=how != "both")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer, how), checkpoint_id=folder, process_group=group)
    return whole_state(optimizer)


def load_and_save(group, folder: str, how: str, again: str) -> dict:
    model = built(group, merged=how != "both")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    if how == "plain":
        train(model, optimizer, range(5, 6))  # other values, to be replaced
    state = state_of(model, optimizer, how)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    if how == "plain":
        optimizer.load_state_dict(state)
    elif how == "optimizer":
        set_optimizer_state_dict(model, optimizer, state)
    else:
        set_state_dict(model, optimizer, model_state_dict=model.state_dict(), optim_state_dict=state)
    for parameter, moments in optimizer.state.items():
        kind = CutTensor if isinstance(parameter, CutTensor) else Tensor
        assert type(moments["exp_avg"]) is kind and moments["exp_avg"].shape == parameter.shape
    dcp.save(state_of(model, optimizer, how), checkpoint_id=again, process_group=group)
    loaded = copy.deepcopy(whole_state(optimizer))
    train(model, optimizer, range(2, 3))
    return loaded


@pytest.mark.parametrize("how", ["plain", "optimizer", "both"])
@pytest.mark.second_tier(but=["both"])
def test_moments_of_two_ranks_load_bitwise_at_one_and_four_and_back(ranks, tmp_path, how):
    saved = ranks.run(save, 2, f"{tmp_path}/2", how)[0]
    assert len({key[0] for key in saved}) == (7 if how == "both" else 10) and any(
        value.any() for value in saved.values()
    )
    for size in (1, 4):
        there = ranks.run(load_and_save, size, f"{tmp_path}/2", how, f"{tmp_path}/{size}")
        back = ranks.run(load_and_save, 2, f"{tmp_path}/{size}", how, f"{tmp_path}/back{size}")
        for loaded in (*there, *back):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[key], saved[key]) for key in saved)


def loads_before_the_first_step(group, folder: str) -> list[dict]:
    """...of states that DTensors, full tensors and shards name."""
    model = built(group)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(2))
    expected = whole_state(optimizer)
    dtensors = copy.deepcopy(optimizer.state_dict())
    full = {**dtensors, "state": {i: dict(s) for i, s in dtensors["state"].items()}}
    shards = {**dtensors, "state": {i: dict(s) for i, s in dtensors["state"].items()}}
    for (index, name, _), value in expected.items():
        full["state"][index][name] = value.clone()
        shards["state"][index][name] = list(optimizer.state.values())[index][name].clone()
    train(model, optimizer, range(2, 3))
    after = [p.detach().clone() for p in model.parameters()]
    for state in (dtensors, full, shards):
        again = built(group)
        fresh = OPTIMIZERS["adamw"](again.parameters())
        train(again, OPTIMIZERS["adamw"](again.parameters()), range(2))
        fresh.load_state_dict(state)
        train(again, fresh, range(2, 3))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again.parameters(), after, strict=True))


def test_a_state_that_is_loaded_before_the_first_step_is_cut_in_it(ranks, tmp_path):
    ranks.run(loads_before_the_first_step, 2, str(tmp_path))


def full_state_goes_through_rank_0(group) -> None:
    """get and set with full_state_dict, as a user does who wants one file."""
    model = built(group)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    assert full["state"]["up.weight"]["exp_avg"].shape == (15, 6)
    again = built(group)
    fresh = OPTIMIZERS["adamw"](again.parameters())
    set_optimizer_state_dict(again, fresh, copy.deepcopy(full), options=options)
    expected, found = whole_state(optimizer), whole_state(fresh)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_full_state_dict_is_that_of_the_whole_model(ranks):
    ranks.run(full_state_goes_through_rank_0, 2)


# -- the gradient, looked at as a whole


def looks_at_gradients(group) -> list[float]:
    torch.manual_seed(0)
    whole, model = in_double(Net()), built(group)
    for each in (whole, model):
        each(batch(0).to(each.norm.weight.dtype)).square().mean().backward()
    for order in (2.0, 1.0, 3.0, 0.0, float("inf"), -float("inf")):
        for foreach in (True, False):
            total = nn.utils.get_total_norm([p.grad for p in model.parameters()], order, foreach=foreach)
            expected = nn.utils.get_total_norm([p.grad for p in whole.parameters()], order, foreach=foreach)
            assert_near(total, expected, f"norm of order {order}", 1e-5)
            assert same_on_all_ranks(total, group)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert_near(mine.grad.norm(), theirs.grad.norm(), "Tensor.norm")
        assert_near(torch.norm(mine.grad, 1), torch.norm(theirs.grad, 1), "torch.norm")
        kept = torch.linalg.vector_norm(mine.grad, 2, None, True)
        assert kept.dim() == mine.dim(), "keepdim"
        assert_near(
            torch.linalg.vector_norm(mine.grad, keepdim=True), theirs.grad.norm().expand([1] * mine.dim()), ""
        )
    first = model.up.weight.grad.clone()
    model(batch(0)).square().mean().backward()
    assert_near(model.up.weight.grad.norm(), whole.up.weight.grad.norm() * 2, "accumulated")
    assert torch.equal(model.up.weight.grad, first * 2)
    with pytest.raises(RuntimeError, match="norm was called") as caught:
        model.up.weight.grad.norm(dim=0)
    return str(caught.value)


@pytest.mark.parametrize("size", [2, 4])
def test_norms_of_gradients_are_those_of_the_whole_model(ranks, size):
    ranks.run(looks_at_gradients, size)


def thaws_a_weight(group) -> None:
    model = built(group)
    model.requires_grad_(False)
    model = copy.deepcopy(model)
    model.up.weight.requires_grad_(True)
    model(batch(0)).square().mean().backward()
    assert same_on_all_ranks(nn.utils.clip_grad_norm_(model.parameters(), 1e-3), group)


def test_a_weight_that_was_frozen_when_it_was_cut_is_clipped_too(ranks):
    ranks.run(thaws_a_weight, 2)


def scales(group) -> list[bool]:
    """Whether each rank steps, where one rank's shard alone holds an infinity; and where none does."""
    stepped = []
    for infinity in (True, False):
        model = built(group)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.up.weight.detach().clone()
        scaler.scale(model(batch(0)).square().mean()).backward()
        if infinity and dist.get_rank(group) == 1:
            model.up.weight.grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        stepped.append(not torch.equal(before, model.up.weight))
    return stepped


def test_an_infinity_on_one_rank_skips_the_step_of_all(ranks):
    assert ranks.run(scales, 2) == [[False, True]] * 2


# -- what cannot be right is refused


def refusals(group) -> dict[str, str]:
    model, other, third, whole = built(group), built(group), built(group), Net()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    before = [p.detach().clone() for p in model.parameters()]
    plain = nn.Sequential(nn.Linear(6, 6))
    attempts = {
        "ddp": lambda: DistributedDataParallel(model, process_group=group),
        "inside": lambda: DistributedDataParallel(nn.Sequential(plain, model), process_group=group),
        "fully_shard": lambda: fully_shard(other, mesh=mesh),
        "fsdp": lambda: FullyShardedDataParallel(third, process_group=group, device_id=torch.device("cpu")),
        "assigned": lambda: setattr(model.up, "weight", whole.up.weight),
        "spectral_norm": lambda: spectral_norm(built(group).up),
        "shard": lambda: pyruntime.shard(model, mesh),
        "adafactor": lambda: train(model, torch.optim.Adafactor(model.parameters()), range(1)),
        "muon": lambda: train(model, torch.optim.Muon([model.up.weight]), range(1)),
    }
    said = {}
    for name, attempt in attempts.items():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            attempt()
        said[name] = str(caught.value)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), "left as it was"
    DistributedDataParallel(plain, process_group=group)  # other models are nobody's business
    return said


def test_what_takes_a_shard_for_the_whole_is_refused(ranks):
    said = ranks.run(refusals, 2)
    assert said[0].keys() == said[1].keys()
    for name in ("ddp", "inside"):
        assert "DistributedDataParallel was asked to wrap a tensor-parallel model" in said[0][name]
        assert "pyruntime.shard(model, runtime.dp)" in said[0][name]
    for name in ("fully_shard", "fsdp", "spectral_norm"):
        assert f"{name} cannot be used" in said[0][name] or "fully_shard" in said[0][name]
        assert "pyruntime.shard(model, runtime.dp)" in said[0][name]
    assert (
        "up.weight belongs to tensor-parallel" in said[0]["assigned"]
        and "Parameter [15, 6]" in said[0]["assigned"]
    )
    assert (
        "ranks [0, 1] train one model on different data, but up.weight is cut over them" in said[0]["shard"]
    )
    assert "Adafactor computes the update of an element from others" in said[0]["adafactor"]
    assert "Muon computes" in said[0]["muon"] and "torch.optim.AdamW" in said[0]["muon"]


def step_of_what_was_there_before(group):
    torch.manual_seed(0)
    model = Net()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    norm_alone = torch.optim.SGD(model.norm.parameters(), lr=0.1)
    parallelize(model, group, PLAN)
    model(batch(1)).sum().backward()
    norm_alone.step()  # it holds nothing that was replaced
    with pytest.raises(
        ValueError, match=r"This SGD was made before .* its up\.weight \[15, 6\] is no longer part"
    ):
        before.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_an_optimizer_that_was_made_before_the_cut_is_refused(ranks):
    ranks.run(step_of_what_was_there_before, 2)
