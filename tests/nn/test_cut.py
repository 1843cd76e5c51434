"""What people do to the weights and gradients of a tensor-parallel model by habit: as with plain torch, or
refused in a sentence."""

from __future__ import annotations

import copy
import io
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pyruntime
from pyruntime import ops
from pyruntime.nn import ColumnParallelLinear
from pyruntime.nn.cut import CutParameter, CutTensor

IN, MIDDLE, STEPS = 6, 13, 3
PLAN = {"0": "column", "2": "row"}


def made() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(IN, MIDDLE), nn.Tanh(), nn.Linear(MIDDLE, IN)).double()


def loss_of(model, step):
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return (model(x) - x.flip(1)).square().mean()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, CutTensor | DTensor) else tensor


def both(habit, group):
    """What the habit gives with plain torch, and over the group."""
    parallel = pyruntime.parallelize(made(), group, PLAN)
    assert sum(isinstance(p, CutParameter) for p in parallel.parameters()) == 3
    return habit(made()), habit(parallel)


# -- habits of a training loop: functions of a model, which is trained


def train(model, optimizer, between=lambda model, step: None, scaler=None):
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward() if scaler is None else scaler.scale(loss).backward()
        between(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def halved_and_clipped(model, _):
    for p in model.parameters():
        p.grad = p.grad / 2
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clipped_by_hand(model, _):
    total = torch.stack([p.grad.data.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.data.mul_(0.01 / total)


def clipped_by_squares(model, _):
    total = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt()
    for p in model.parameters():
        p.grad.div_(total)


def clipped_by_value(model, _):
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def clipped_each(model, _):
    for p in model.parameters():
        torch.nn.utils.clip_grad_norm_(p, 0.02, foreach=True)


def normalised(model, _):
    for p in model.parameters():
        p.grad = (p.grad - p.grad.mean()) / (p.grad.std() + p.grad.abs().max() + 1e-8)


def noisy(model, step):
    torch.manual_seed(step)
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p), alpha=0.01)


def finite_alone(model, _):
    for p in model.parameters():
        if not torch.isfinite(p.grad).all() or torch.isnan(p.grad).any() or p.grad.abs().amax() > 1e9:
            p.grad.zero_()


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, as it is written everywhere."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p.data)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / state["v"].sqrt().add(1e-6) + 0.01 * p
                trust = torch.where(p.norm() > 0, p.norm() / update.norm(), 1.0)
                p.add_(update * trust, alpha=-group["lr"])


def by_hand(model, optimizer=None):
    for step in range(STEPS):
        loss_of(model, step).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad * (p.abs().max() / (1 + p.std()))
                p.grad = None
    return dict(model.named_parameters())


def penalised(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = loss_of(model, step) + 0.1 * sum(p.pow(2).sum() + p.abs().mean() for p in model.parameters())
        loss = loss + 0.01 * sum(p.norm() for p in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def averaged(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        for name, p in model.named_parameters():
            ema[name].lerp_(p.detach(), 0.2)
            ema[name] = 0.9 * ema[name] + 0.1 * p
    return {**{f"a.{n}": p for n, p in average.module.named_parameters()}, **ema}


def gradients_asked(model):
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss_of(model, 0), parameters)
    return {str(i): g / found[0].norm() for i, g in enumerate(found)}


def hooked(model):
    parameters = list(model.parameters())
    for p in parameters:
        p.register_hook(lambda g: 2 * g)
    loss_of(model, 0).backward()
    return {str(i): p.grad / parameters[0].grad.norm() for i, p in enumerate(parameters)}


def inputs_alone(model):
    first = next(model.parameters())
    loss_of(model, 0).backward(inputs=[first])
    return {"first": first.grad, "others": torch.tensor([p.grad is None for p in model.parameters()])}


def numbers(model):
    loss_of(model, 0).backward()
    p, q = model[0].weight, model[2].weight
    g = p.grad
    found = [p.sum(), p.mean(), p.std(), p.var(), p.max(), p.min(), p.norm(), p.norm(1), g.norm(float("inf"))]
    found += [torch.linalg.vector_norm(g), torch.norm(q, p=3), (g > 0).sum(), (p * g).sum(), p.abs().amax()]
    found += list(torch._foreach_norm([p, q, g]))
    found += [torch.nn.functional.mse_loss(p, 2 * p), torch.nn.functional.l1_loss(q, q * q, reduction="sum")]
    found += [torch.max(p, other=2 * p).sum(), p.view(p.shape).sum(), p.int().sum(), torch.linalg.norm(p)]
    found += [torch.nn.utils.get_total_norm([p, q, g])]
    found += [torch.tensor(float(torch.equal(p, p))), torch.tensor(float(torch.allclose(p, p + 1)))]
    return {str(i): value.double() for i, value in enumerate(found)}


def initialised(model):
    torch.manual_seed(11)
    for p in model.parameters():
        nn.init.normal_(p, 0, 0.02)
    for layer in (model[0], model[2]):
        nn.init.kaiming_uniform_(layer.weight, a=5**0.5)
        nn.init.uniform_(layer.bias, -0.1, 0.1)
    model[0].weight.data.copy_(torch.randn(MIDDLE, IN, dtype=torch.float64))
    return dict(model.named_parameters())


def copied(model):
    other = copy.deepcopy(model)
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        q.data.mul_(2)
        p.data.copy_(q)
        q.data.div_(2)
    return dict(other.named_parameters())


def with_scaler(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def resumed(make):
    """The optimizer's state, saved and loaded in the middle."""

    def habit(model):
        optimizer = make(model.parameters())
        train(model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = make(model.parameters())
        optimizer.load_state_dict(state)
        return train(model, optimizer)

    return habit


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "lamb": lambda p: Lamb(p, lr=0.01),
}
BETWEEN = [
    *(halved_and_clipped, clipped_by_hand, clipped_by_squares, clipped_by_value, clipped_each),
    *(normalised, noisy, finite_alone),
]
HABITS = {
    **{f.__name__: lambda m, f=f: train(m, torch.optim.AdamW(m.parameters(), lr=0.05), f) for f in BETWEEN},
    **{name: lambda m, make=make: train(m, make(m.parameters())) for name, make in OPTIMIZERS.items()},
    **{f"{name}, resumed": resumed(OPTIMIZERS[name]) for name in ("adamw", "lamb", "sgd foreach")},
    **{
        f.__name__: f
        for f in (by_hand, penalised, averaged, gradients_asked, hooked, inputs_alone, numbers, initialised)
    },
    **{f.__name__: f for f in (copied, with_scaler)},
}


def equal_case(group, names):
    wrong = {}
    for name in names:
        try:
            plain, ours = both(HABITS[name], group)
        except (RuntimeError, ValueError, TypeError) as error:
            wrong[name] = repr(error)
            continue
        assert plain.keys() == ours.keys()
        for key, value in ours.items():
            got, want = whole(value).detach(), plain[key].detach()
            if got.shape != want.shape or not torch.allclose(got, want, rtol=1e-9, atol=1e-12):
                wrong[f"{name}: {key}"] = float((got - want).abs().max())
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.second_tier("3")
def test_habits_give_what_plain_torch_gives(ranks, world_size):
    for outcome in ranks.run(equal_case, world_size, list(HABITS)):
        assert not outcome, outcome


# -- and what is refused

REFUSED = {
    "G @ G.mT": lambda p: p.grad @ p.grad.mT,
    "matmul": lambda p: torch.matmul(torch.eye(p.shape[0], dtype=p.dtype), p.grad),
    "sum over a dimension": lambda p: p.grad.sum(dim=0),
    "mean over a dimension": lambda p: p.grad.square().mean(-1),
    "norm over a dimension": lambda p: p.norm(dim=1),
    "max over a dimension": lambda p: p.grad.max(1),
    "rows": lambda p: p.grad[:2],
    "view": lambda p: p.grad.view(-1),
    "svd": lambda p: torch.linalg.svdvals(p.data),
    "sorted": lambda p: p.detach().sort(),
    "xavier": lambda p: nn.init.xavier_uniform_(p),
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p),
    "drawn": lambda p: p.data.normal_(0, 0.02),
    "linear": lambda p: torch.nn.functional.linear(torch.ones(2, p.shape[1], dtype=p.dtype), p),
    "concatenated": lambda p: torch.cat([p, p]),
    "a vector of all": lambda p: torch.nn.utils.parameters_to_vector([p]),
    "matrix norm": lambda p: torch.linalg.norm(p, 2),
    "nuclear norm": lambda p: torch.norm(p, p="nuc"),
    "another cut": lambda p: p + torch.empty_like(p.other),
}


def refused_case(group):
    model = pyruntime.parallelize(made(), group, PLAN)
    loss_of(model, 0).backward()
    messages = {}
    for name, habit in REFUSED.items():
        p = model[0].weight
        p.other = model[2].weight
        try:
            messages[name] = f"gave {habit(p)}"
        except (RuntimeError, ValueError) as error:
            messages[name] = str(error)
    return messages


def test_what_mixes_elements_is_refused(ranks):
    for outcome in ranks.run(refused_case, 2):
        for name, message in outcome.items():
            assert ("cut over group" in message and "full_tensor()" in message) or "copy_()" in message, (
                name,
                message,
            )


# -- what they are


def saved_case(group):
    model = pyruntime.parallelize(made(), group, PLAN)
    loss_of(model, 0).backward()
    p = model[0].weight
    file = io.BytesIO()
    torch.save(p.grad, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    kinds = [type(each).__name__ for each in (p, p.grad, p.data, p.grad / 2, p.to_local(), p.full_tensor())]
    local = p.to_local()
    return (
        kinds,
        isinstance(loaded, DTensor) and torch.equal(loaded.full_tensor(), p.grad.full_tensor()),
        local.data_ptr() == p.data_ptr() and tuple(local.shape) == tuple(p.shape),
        p.grad is p.grad,
        repr(p)[:9],
    )


def test_a_cut_weight_says_what_it_is(ranks):
    for kinds, saved, same_memory, same_object, text in ranks.run(saved_case, 2):
        assert kinds == ["CutParameter", "CutTensor", "CutTensor", "CutTensor", "Tensor", "Tensor"]
        assert saved and same_memory and same_object
        assert text


def exchanges_of_clipping(group) -> int:
    linears = [ColumnParallelLinear(8, 6, bias=False, group=group) for _ in range(5)]
    for linear in linears:
        linear.weight.grad = torch.ones_like(linear.weight)
    with patch.object(ops, "all_gather_stats", wraps=ops.all_gather_stats) as gathered:
        torch.nn.utils.clip_grad_norm_([linear.weight for linear in linears], 1.0)
    return gathered.call_count


def test_the_norms_of_all_gradients_are_one_exchange(ranks):
    assert ranks.run(exchanges_of_clipping, 2) == [1, 1]
